"""Compiled programs: whatever a function reads is changed, and the next call sees it.

A program is drawn by its seed: one or two kinds of things to read, a host (the function that reads
them: made inside what is compiled or outside, a method, a partial, an object), and the changes. The
kinds are those that Dynamo takes for constant or guards in part. The truth is the function itself on
index tensors. Nothing may be stale; what cannot be guarded compiles with a graph break.

    python -m mods.test_compiled_changes --programs 500        (in tests/)
"""

import argparse
import itertools
import random
import sys
import types
from typing import NamedTuple

import pytest
import torch

import headway as hw
from long import long

from .programs import PRELUDE
from .test_programs import TOLERANCE, _dense, _execute, given

pytestmark = pytest.mark.usefixtures("one_thread")


_numbers = itertools.count()
_PRELUDE = "import abc, gc, numbers\nimport numpy as np\nUNDO = []"


class Kind(NamedTuple):
    """`read` is 3, and 8 after `change`. A $ stands for a number that makes names unique."""

    setup: str
    read: str
    change: str


def _class(body: str, later: str, read: str = "(8 if x$ else 3)") -> Kind:
    return Kind(f"class C$:\n    {body}\nx$ = C$()", read, later)


KINDS = {
    "a member by name": Kind("class E$(enum.Enum):\n    A = 1\nE$.A.w = 3\nN$ = 'A'", "E$[N$].w", "E$.A.w = 8"),
    "another member by name": Kind("class E$(enum.Enum):\n    A = 3\n    B = 8\nN$ = 'A'", "E$[N$].value", "N$ = 'B'"),
    "the value of a member": Kind("class E$(enum.Enum):\n    A = 3", "E$['A'].value", "E$.A._value_ = 8"),
    "a member by value": Kind("class E$(enum.Enum):\n    A = 1\nE$.A.w = 3", "E$(1).w", "E$.A.w = 8"),
    "another enum": Kind("class E$(enum.IntEnum):\n    A = 3", "E$['A'] + 0", "class E$(enum.IntEnum):\n    A = 8"),
    "a hidden max": Kind("", "max(3, 1)", "max = lambda *x: 8"),
    "a hidden len": Kind("L$ = [1, 2, 3]", "len(L$)", "len = lambda x: 8"),
    "a hidden abs": Kind("", "abs(-3)", "abs = lambda x: 8"),
    "a name that hides no builtin any more": Kind("sum = lambda x: 3", "sum([8])", "del sum"),
    "a hook": Kind("x$ = nn.Identity()", "x$(3)", "x$.register_forward_hook(lambda m, args, out: 8)"),
    "a hook before": Kind("x$ = nn.Identity()", "x$(3)", "x$.register_forward_pre_hook(lambda m, args: (8,))"),
    "a hook of a module of yours": Kind("class C$(nn.Module):\n    def forward(self, x):\n        return x\nx$ = C$()", "x$(3)",
                                        "x$.register_forward_hook(lambda m, args, out: 8)"),
    "a namespace": Kind("S$ = {'__name__': 'math', 'x': 3}\nexec('def get():\\n    return x', S$)\nH$ = S$['get']", "H$()", "S$['x'] = 8"),
    "a namespace of no name": Kind("S$ = {'x': 3}\nexec('def get():\\n    return x', S$)\nH$ = S$['get']", "H$()", "S$['x'] = 8"),
    "a builtin of a namespace": Kind("S$ = {'__name__': 'nowhere'}\nexec('def get():\\n    return max(3, 1)', S$)\nH$ = S$['get']", "H$()",
                                     "S$['max'] = lambda *x: 8"),
    "the sign of zero": Kind("z$ = 0.0", "(3 if math.copysign(1.0, z$) > 0 else 8)", "z$ = -0.0"),
    "of an attribute": Kind("z$ = types.SimpleNamespace(z=0.0)", "(3 if math.copysign(1.0, z$.z) > 0 else 8)", "z$.z = -0.0"),
    "of an item": Kind("z$ = ((0.0, 1), 2)", "(3 if math.copysign(1.0, z$[0][0]) > 0 else 8)", "z$ = ((-0.0, 1), 2)"),
    "of a key": Kind("z$ = {0.0: 1}", "(3 if math.copysign(1.0, next(iter(z$))) > 0 else 8)", "z$.clear(); z$[-0.0] = 1"),
    "of an imaginary part": Kind("z$ = 0j", "(3 if math.copysign(1.0, z$.imag) > 0 else 8)", "z$ = complex(0.0, -0.0)"),
    "the type of an item": Kind("z$ = {1}", "(8 if isinstance(next(iter(z$)), bool) else 3)", "z$.clear(); z$.add(True)"),
    "the type of a number": Kind("z$ = 1", "(8 if z$ is True else 3)", "z$ = True"),
    "the order of a dict": Kind("z$ = {'a': 3, 'b': 8}", "list(z$.values())[0]", "z$['a'] = z$.pop('a')"),
    "the order of an OrderedDict": Kind("z$ = collections.OrderedDict(a=3, b=8)", "next(iter(z$.values()))", "z$.move_to_end('a')"),
    "a map behind a map": Kind("z$ = collections.ChainMap({}, {'w': 3})", "z$['w']", "z$.maps[0]['w'] = 8"),
    "a default of a map": Kind("z$ = collections.defaultdict(lambda: 3)", "z$.copy()['q']", "z$.default_factory = lambda: 8"),
    "a method of a class": _class("def get(self):\n        return 3", "C$.get = lambda self: 8", "x$.get()"),
    "a method below a class": Kind("class B$:\n    def get(self):\n        return 3\nclass C$(B$):\n    pass\nx$ = C$()", "x$.get()",
                                   "C$.get = lambda self: 8"),
    "a method of an object": _class("def get(self):\n        return 3", "x$.get = lambda: 8", "x$.get()"),
    "a property": _class("w = property(lambda self: 3)", "C$.w = property(lambda self: 8)", "x$.w"),
    "an attribute over a class's": _class("w = 3", "x$.w = 8", "x$.w"),
    "a truth": _class("pass", "C$.__bool__ = lambda self: False", "(3 if x$ else 8)"),
    "a length": _class("pass", "C$.__len__ = lambda self: 0", "(3 if x$ else 8)"),
    "an equality": _class("pass", "C$.__eq__ = lambda self, other: True", "(8 if x$ == 1 else 3)"),
    "a call": _class("pass", "C$.__call__ = lambda self: 3", "(8 if callable(x$) else 3)"),
    "a __getattribute__": _class("w = 3", "C$.__getattribute__ = lambda self, name: 8", "x$.w"),
    "a descriptor": Kind("class D$:\n    pass\nclass C$:\n    w = D$()\nx$ = C$()", "(3 if isinstance(x$.w, D$) else 8)",
                         "D$.__get__ = lambda self, of, cls=None: 8"),
    "a default of a class": Kind("@dataclasses.dataclass\nclass C$:\n    w: int = 3", "C$().w", "C$.__init__.__defaults__ = (8,)"),
    "what makes an object": Kind("class C$:\n    def __init__(self):\n        self.w = 3", "C$().w",
                                 "def init(self):\n    self.w = 8\nC$.__init__ = init"),
    "a forward": Kind("class C$(nn.Module):\n    def forward(self):\n        return 3\nx$ = C$()", "x$()", "C$.forward = lambda self: 8"),
    "buffers": Kind("x$ = nn.Tanh()\nx$.register_buffer('a', torch.zeros(1))", "len(dict(x$.named_buffers())) * 5 - 2",
                    "x$.register_buffer('b', torch.zeros(1))"),
    "modules": Kind("x$ = nn.ModuleList([nn.Linear(1, 1)])", "len(x$) * 5 - 2", "x$.append(nn.Linear(1, 1))"),
    "code": Kind("def f$():\n    return 3", "f$()", "f$.__code__ = (lambda: 8).__code__"),
    "a cell": Kind("def make$(x):\n    return lambda: x\nf$ = make$(3)", "f$()", "f$.__closure__[0].cell_contents = 8"),
    "a default": Kind("def f$(x=3):\n    return x", "f$()", "f$.__defaults__ = (8,)"),
    "which object": Kind("z$ = object()\ny$ = z$", "(3 if z$ is y$ else 8)", "y$ = object()"),
    "the surroundings": Kind("os.environ.pop('HW$', None)", "int(os.environ.get('HW$', '3'))", "os.environ['HW$'] = '8'"),
    "a virtual subclass": Kind("class A$(abc.ABC):\n    pass\nclass C$:\n    pass\nx$ = C$()", "(8 if isinstance(x$, A$) else 3)", "A$.register(C$)"),
    "a virtual subclass below": Kind("class A$(abc.ABC):\n    pass\nclass B$(A$):\n    pass\nclass C$:\n    pass", "(8 if issubclass(C$, A$) else 3)",
                                     "B$.register(C$)"),
    "of an object's class": Kind("class A$(abc.ABC):\n    pass\nclass C$:\n    pass\ny$ = A$()\nx$ = C$()", "(8 if isinstance(x$, type(y$)) else 3)",
                                 "A$.register(C$)"),
    "a number": Kind("class C$:\n    pass\nx$ = C$()", "(8 if isinstance(x$, numbers.Real) else 3)", "numbers.Real.register(C$)"),
    "a structure": _class("pass", "C$.__len__ = lambda self: 1", "(8 if isinstance(x$, collections.abc.Sized) else 3)"),
    "a protocol": Kind("@typing.runtime_checkable\nclass P$(typing.Protocol):\n    w: int\nclass C$:\n    pass\nx$ = C$()",
                       "(8 if isinstance(x$, P$) else 3)", "x$.w = 1"),
    "a protocol of methods": Kind("@typing.runtime_checkable\nclass P$(typing.Protocol):\n    def get(self):\n        ...\nclass C$:\n    pass\nx$ = C$()",
                                  "(8 if isinstance(x$, P$) else 3)", "C$.get = lambda self: 1"),
    "a check of instances": Kind("class M$(type):\n    def __instancecheck__(cls, x):\n        return cls.w > 5\nclass A$(metaclass=M$):\n    w = 3\nx$ = 1",
                                 "(8 if isinstance(x$, A$) else 3)", "A$.w = 8"),
    "another check of instances": Kind("class M$(type):\n    pass\nclass A$(metaclass=M$):\n    pass\nx$ = 1",
                                       "(8 if isinstance(x$, A$) else 3)", "M$.__instancecheck__ = lambda cls, x: True"),
    "a hook of subclasses": Kind("class A$(abc.ABC):\n    pass\nx$ = 1", "(8 if isinstance(x$, A$) else 3)",
                                 "A$.__subclasshook__ = classmethod(lambda cls, c: True); abc.ABCMeta.register(A$, bytes)"),
    "a bases' list": Kind("class A$:\n    pass\nclass B$:\n    pass\nclass C$(B$):\n    pass\nx$ = C$()", "(8 if isinstance(x$, A$) else 3)",
                          "C$.__bases__ = (A$,)"),
    "another class": Kind("class A$:\n    w = 3\nclass B$:\n    w = 8\nx$ = A$()", "x$.w", "x$.__class__ = B$"),
    "single dispatch": Kind("@functools.singledispatch\ndef f$(x):\n    return 3\nclass C$:\n    pass\nx$ = C$()", "f$(x$)", "f$.register(C$, lambda x: 8)"),
    "a cache": Kind("z$ = [3]\n@functools.cache\ndef f$():\n    return z$[0]", "f$()", "z$[0] = 8; f$.cache_clear()"),
    "a context": Kind("z$ = contextvars.ContextVar('z', default=3)", "z$.get()", "z$.set(8)"),
    "a weak reference": Kind("class C$:\n    w = 3\nx$ = C$()\nr$ = weakref.ref(x$)", "(3 if r$() is not None else 8)", "del x$"),
    "a collector": Kind("gc.enable()", "(3 if gc.isenabled() else 8)", "gc.disable(); UNDO.append(gc.enable)"),
    "a slot": Kind("class C$:\n    __slots__ = ('w',)\nx$ = C$()\nx$.w = 3", "x$.w", "x$.w = 8"),
    "a __getattr__": Kind("z$ = {'w': 3}\nclass C$:\n    def __getattr__(self, name):\n        return z$[name]\nx$ = C$()", "x$.w", "z$['w'] = 8"),
    "a dataclass": Kind("@dataclasses.dataclass\nclass C$:\n    w: int\nx$ = C$(3)", "x$.w", "x$ = dataclasses.replace(x$, w=8)"),
    "a frozen dataclass": Kind("@dataclasses.dataclass(frozen=True, slots=True)\nclass C$:\n    w: int\nx$ = C$(3)", "x$.w", "x$ = C$(8)"),
    "a cached property": Kind("class C$:\n    n = 3\n    @functools.cached_property\n    def w(self):\n        return self.n\nx$ = C$()", "x$.w",
                              "x$.n = 8; x$.__dict__.pop('w', None)"),
    "a map of modules": Kind("x$ = nn.ModuleDict({'a': nn.Identity()})", "(3 if 'b' not in x$ else 8)", "x$['b'] = nn.Identity()"),
    "a mode of a module": Kind("x$ = nn.Identity()", "(3 if x$.training else 8)", "x$.eval()"),
    "a number of NumPy's": Kind("z$ = np.int64(3)", "int(z$)", "z$ = np.int64(8)"),
    "an array": Kind("z$ = np.array([3])", "int(z$[0])", "z$[0] = 8"),
    "a dtype": Kind("torch.set_default_dtype(torch.float32)", "(3 if torch.tensor(1.0).dtype == torch.float32 else 8)",
                    "torch.set_default_dtype(torch.float64); UNDO.append(lambda: torch.set_default_dtype(torch.float32))"),
    "a limit": Kind("sys.setrecursionlimit(3000)", "(3 if sys.getrecursionlimit() == 3000 else 8)", "sys.setrecursionlimit(4000); UNDO.append(lambda: sys.setrecursionlimit(1000))"),
    "threads": Kind("torch.set_num_threads(1)", "(3 if torch.get_num_threads() == 1 else 8)", "torch.set_num_threads(2); UNDO.append(lambda: torch.set_num_threads(1))"),
    "determinism": Kind("torch.use_deterministic_algorithms(False)", "(8 if torch.are_deterministic_algorithms_enabled() else 3)",
                        "torch.use_deterministic_algorithms(True); UNDO.append(lambda: torch.use_deterministic_algorithms(False))"),
    "a super's": Kind("class B$:\n    def get(self):\n        return 3\nclass C$(B$):\n    def get(self):\n        return super().get()\nx$ = C$()",
                      "x$.get()", "B$.get = lambda self: 8"),
    "what a class makes": Kind("class C$:\n    pass", "(C$().w if hasattr(C$, 'w') else 3)", "C$.w = 8"),
    "a global": Kind("w$ = 3", "w$", "w$ = 8"),
    "a list": Kind("w$ = [3]", "w$[0]", "w$[0] = 8"),
    "an attribute": Kind("w$ = types.SimpleNamespace(w=3)", "w$.w", "w$.w = 8"),
}  # fmt: skip
# Definitions, and the expression that the compiled step passes; $b is the body.
HOSTS = {
    "made inside": ("", "lambda b, h, i, j: $b"),
    "calls a helper": ("def helper(i, j):\n    return $b", "lambda b, h, i, j: helper(i, j)"),
    "a partial": ("def fn(n, b, h, i, j):\n    return $b", "functools.partial(fn, 1)"),
    "a method": ("class Host:\n    def fn(self, b, h, i, j):\n        return $b\nhost = Host()", "host.fn"),
    "an object made inside": ("class Host:\n    def __call__(self, b, h, i, j):\n        return $b", "Host()"),
    "a module's": ("class Host(nn.Module):\n    def fn(self, b, h, i, j):\n        return $b\nhost = Host()", "host.fn"),
    "made outside": ("def fn(b, h, i, j):\n    return $b", "fn"),
    "a closure from outside": ("def make():\n    return lambda b, h, i, j: $b\nfn = make()", "fn"),
}  # fmt: skip


class Program(NamedTuple):
    """A program, by the names of what was drawn."""

    host: str
    kinds: list[str]
    source: str
    mask: str
    changes: list[str]


def program(seed: int) -> Program:
    """Return the program of a seed."""
    draw = random.Random(seed)
    names = draw.sample([*KINDS], draw.choice([1, 1, 2]))
    host = draw.choice([*HOSTS])
    kinds = [
        Kind(*[text.replace("$", str(n)) for text in KINDS[name]]) for n, name in enumerate(names)
    ]
    uses = ["(i - j).abs() < {}", "(i + j) % ({} + 1) != 0"]
    body = " & ".join(f"({u.format(k.read)})" for u, k in zip(uses, kinds, strict=False))
    changes = draw.sample([k.change for k in kinds], len(kinds))
    return _program(host, names, kinds, body, changes)


def _program(
    host: str, names: list[str], kinds: list[Kind], body: str, changes: list[str]
) -> Program:
    definitions, mask = (text.replace("$b", body) for text in HOSTS[host])
    source = "\n".join([PRELUDE, _PRELUDE, *[k.setup for k in kinds], definitions])
    return Program(host, names, source, mask, changes)


def program_of(name: str, host: str) -> Program:
    """Return the program of one kind in a host."""
    kind = Kind(*[text.replace("$", "0") for text in KINDS[name]])
    return _program(host, [name], [kind], f"(i - j).abs() < {kind.read}", [kind.change])


def run(p: Program, backend: str | None = "eager", fullgraph: bool = False) -> str | None:
    """Call, change, call again; return what is wrong, if anything. Backend None: not compiled."""
    # (Dynamo finds modules by their names, and keeps them.)
    module = types.ModuleType(f"program_of_changes_{next(_numbers)}")
    space, x = module.__dict__, given(0)
    q, k, v = x.q.detach(), x.k, x.v
    sys.modules[module.__name__] = module
    try:
        _execute(p.source, space, "<program>")
        space["_dense"] = _dense
        for name, call in (
            ("step", "hw.attention(q, k, v, mask=m)"),
            ("dense", "_dense(m, None, q, k, v)"),
        ):
            _execute(
                f"def {name}(q, k, v):\n    m = {p.mask}\n    return {call}", space, f"<{name}>"
            )
        torch.compiler.reset()
        step = space["step"]
        if backend is not None:
            step = torch.compile(step, backend=backend, fullgraph=fullgraph)
        for n, change in enumerate(["", *p.changes]):
            _execute(change, space, "<change>")
            right = space["dense"](q, k, v)
            try:
                out = step(q, k, v)
            except hw.errors.ModError:
                if fullgraph:
                    return None
                raise
            off = (out - right).abs().max().item()
            if not off <= TOLERANCE:
                return f"off by {off:.3g} after {n} changes: {p}"
    finally:
        del sys.modules[module.__name__]
        for undo in space.get("UNDO", ()):
            undo()
    return None


@pytest.mark.parametrize("quarter", range(4))
def test_changes_are_seen(quarter):
    wrong = [run(program(seed)) for seed in range(6 * quarter, 6 * quarter + 6)]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.parametrize("host", ["made inside", "made outside", "a module's"])
def test_changes_are_seen_without_a_compiler(host):
    wrong = [run(program_of(name, host), backend=None) for name in KINDS]
    assert not any(wrong), "\n".join(filter(None, wrong))


# Dynamo asks once what an object is an instance of, and keeps the answer.
CHECKS = [
    name
    for name, kind in KINDS.items()
    if "isinstance(x$" in kind.read or "issubclass" in kind.read
]


# Of these a whole graph is refused, and any other is broken. Where nothing breaks, it is the same one.
BREAK = (
    "a descriptor", "a structure", "a protocol", "a protocol of methods", "a check of instances",
    "another check of instances",
)  # fmt: skip


@pytest.mark.parametrize(
    ("names", "fullgraph"),
    [(CHECKS, True), (BREAK, False), long([name for name in CHECKS if name not in BREAK], False)],
    ids=["whole", "broken", "the same"],
)
def test_changes_of_what_is_an_instance(names, fullgraph):
    wrong = [run(program_of(name, "made inside"), fullgraph=fullgraph) for name in names]
    assert not any(wrong), "\n".join(filter(None, wrong))


def test_changes_are_seen_or_refused_in_a_whole_graph():
    wrong = [run(program(seed), fullgraph=True) for seed in range(1000, 1006)]
    assert not any(wrong), "\n".join(filter(None, wrong))


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parse.add_argument("--programs", type=int, default=200, help="how many (200)")
    parse.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parse.add_argument("--fullgraph", action="store_true")
    asked = parse.parse_args()
    torch.set_num_threads(1)
    count = 0
    for seed in range(asked.first, asked.first + asked.programs):
        try:
            wrong = run(program(seed), fullgraph=asked.fullgraph)
        except Exception as error:  # noqa: BLE001 - whatever a program raises is a fault
            wrong = f"{type(error).__name__}: {str(error)[:200]}: {program(seed)}"
        if wrong:
            count += 1
            print(f"seed {seed}: {wrong}\n")
    print(f"{asked.programs} programs, {count} wrong")
    sys.exit(bool(count))


if __name__ == "__main__":
    main()
