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

from .programs import PRELUDE
from .test_programs import TOLERANCE, _dense, _execute, given

pytestmark = pytest.mark.usefixtures("one_thread")


_numbers = itertools.count()


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
    definitions, mask = (text.replace("$b", body) for text in HOSTS[host])
    source = "\n".join([PRELUDE, *[k.setup for k in kinds], definitions])
    return Program(host, names, source, mask, draw.sample([k.change for k in kinds], len(kinds)))


def run(p: Program, backend: str = "eager", fullgraph: bool = False) -> str | None:
    """Call, change, call again; return what is wrong, if anything."""
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
        step = torch.compile(space["step"], backend=backend, fullgraph=fullgraph)
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
    return None


@pytest.mark.parametrize("quarter", range(4))
def test_changes_are_seen(quarter):
    wrong = [run(program(seed)) for seed in range(6 * quarter, 6 * quarter + 6)]
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
