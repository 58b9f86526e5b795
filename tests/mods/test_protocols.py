"""Random programs over all that Python and its C library can do to reach a value: call, change what
was read, call again, and compare with a function that was never seen.

Nothing here lists what is safe or unsafe. `dir`, the slots of type objects, and the namespaces of
modules in C say which types hold an object, and how one gets at it; what works is kept.

`python tests/mods/test_protocols.py --programs 2000` tries many.
"""

import argparse
import builtins
import collections
import contextlib
import contextvars
import enum
import functools
import itertools
import math
import operator
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from headway.errors import ModError
from headway.mods import lowering

MODULES = (
    builtins, collections, contextlib, contextvars, functools, itertools, operator,
    types, weakref,
)  # fmt: skip
_NOT_CALLED = {  # they wait, print, or end the process
    "breakpoint", "copyright", "credits", "exit", "help", "input", "license", "open", "print", "quit",
    "count", "finalize",
}  # fmt: skip

# -- leaves: objects with a number `w` ------------------------------------------------------------


def number(x: Any) -> int:
    """The number that an object's protocols make of it: 3 or 8."""
    if isinstance(x, bool):
        return 8 if x else 3
    if isinstance(x, int | float):
        return int(x)
    if isinstance(x, complex):
        return int(x.real)
    if isinstance(x, str | bytes | list | tuple | set | frozenset | dict):
        return len(x)
    return next(iter(x))


SLOTS = sorted({
    name
    for cls in vars(builtins).values() if isinstance(cls, type)
    for name, item in vars(cls).items()
    if isinstance(item, types.WrapperDescriptorType | types.MethodDescriptorType)
    and name[:2] == "__"
} - {"__init__", "__new__", "__setattr__", "__delattr__", "__getattribute__", "__del__", "__dir__",
     "__sizeof__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__",
     "__deepcopy__", "__class_getitem__", "__init_subclass__", "__eq__", "__ne__",
     "__subclasshook__", "__instancecheck__", "__subclasscheck__", "__set__", "__delete__"})  # fmt: skip
# What the interpreter asks of the result of a slot.
_RESULTS: dict[str, Callable[[int], Any]] = {
    "__bool__": lambda w: w > 5, "__contains__": lambda w: w > 5, "__float__": float,
    "__complex__": complex, "__repr__": lambda w: "w" * w, "__str__": lambda w: "w" * w,
    "__format__": lambda w: "w" * w, "__bytes__": lambda w: b"w" * w,
    "__iter__": lambda w: iter([w]), "__reversed__": lambda w: iter([w]),
}  # fmt: skip


def _slot(name: str) -> Callable:
    def method(self, *args):
        result = self.w
        return convert(result) if convert is not None else result

    convert = _RESULTS.get(name)
    return method


def _leaves() -> dict[str, Callable[[int], Any]]:
    """How to make an object with an attribute `w`, of every type that can have one."""

    def plain(kind: type) -> Callable[[int], Any]:
        def make(w: int) -> Any:
            made = kind()
            made.w = w
            return made

        return make

    def on_class(base: type) -> Callable[[int], Any]:
        return lambda w: type(base)("Leaf", (base,), {"w": w})()

    makers = {
        "class": lambda w: type("Leaf", (), {"w": w}),
        "metaclass": lambda w: type("Meta", (type,), {"w": w})("Leaf", (), {})(),
        "class of a metaclass": lambda w: type("Meta", (type,), {"w": w})("Leaf", (), {}),
        "function": lambda w: _with(lambda: 0, w),
        "partial": lambda w: _with(functools.partial(max, 1), w),
        "module": lambda w: _with(types.ModuleType("leaf"), w),
        "lazy module": lambda w: type("Lazy", (types.ModuleType,), {"w": w})("leaf"),
        "enum member": lambda w: _with(enum.Enum("Leaf", "A").A, w),
        "flag": lambda w: _with(enum.IntFlag("Leaf", "A").A, w),
        "slots": lambda w: _with(type("Leaf", (), {"__slots__": ("w",)})(), w),
        "protocols": lambda w: _with(type("Leaf", (), {n: _slot(n) for n in SLOTS})(), w),
    }  # fmt: skip
    for module in MODULES:
        for name, base in vars(module).items():
            if isinstance(base, type) and name not in _NOT_CALLED:
                for way, make in (("", lambda b=base: plain(type("Leaf", (b,), {}))),
                                  (" by class", lambda b=base: on_class(b))):  # fmt: skip
                    with contextlib.suppress(Exception):
                        maker = make()
                        if maker(3).w == 3:
                            makers[f"{module.__name__}.{name}{way}"] = maker
    return makers


def _with(made: Any, w: int) -> Any:
    made.w = w
    return made


# -- holders: what has an object, and how to get at it --------------------------------------------


class Holder(NamedTuple):
    name: str
    make: Callable[[Any], Any]
    read: str  # an expression, $ for the holder


# (Some iterators never end.)
ACCESS = (
    "$[0]", "$['w']", "next(iter($))", "$()", "list(itertools.islice($, 9))[0]",
    "max(itertools.islice($, 9))", "[x for x in itertools.islice($, 9)][0]",
)  # fmt: skip


def _found(get: Callable[[], Any], leaf: Any) -> bool:
    try:
        return get() is leaf
    except Exception:  # noqa: BLE001 - most of what is tried cannot work
        return False


def _arguments(leaf: Any) -> Iterator[tuple]:
    yield from ((leaf,), ([leaf],), ({"w": leaf},), ([(leaf, 0)],), ({leaf: 0},), (lambda: leaf,))
    yield from ((lambda *_: leaf, [0]), ("w", leaf))


def _holders() -> list[Holder]:
    """Every type of the modules that can be made around an object, with every access that works."""
    probe, holders = types.SimpleNamespace(w=3), []
    probe = _leaves()["class"](3)  # hashable, and compares by identity
    classes = {
        f"{module.__name__}.{name}": item
        for module in MODULES
        for name, item in vars(module).items()
        if callable(item) and name not in _NOT_CALLED and name[:1] != "_"
    }
    for name, cls in classes.items():
        for n, arguments in enumerate(_arguments(probe)):
            try:
                made = cls(*arguments)
            except Exception:  # noqa: BLE001
                continue
            if made is probe or isinstance(made, str | int | float):
                continue
            reads = [*ACCESS]
            for attribute in dir(made):
                if attribute[:1] != "_":
                    path = f"$.{attribute}"
                    reads += [
                        path,
                        f"{path}()",
                        f"{path}(0)",
                        f"{path}('w')",
                        f"next(iter({path}()))",
                    ]
            for read in reads:
                make = lambda leaf, c=cls, k=n: c(*list(_arguments(leaf))[k])
                text = f"lambda holder: {read.replace('$', 'holder')}"
                if _found(lambda t=text, m=make: eval(t)(m(probe)), probe):
                    holders.append(Holder(f"{name}: {read}", make, read))
    attribute = lambda how: lambda leaf: how(leaf)
    holders += [
        Holder("instance", attribute(lambda leaf: types.SimpleNamespace(a=leaf)), "$.a"),
        Holder("class", attribute(lambda leaf: type("Box", (), {"a": leaf})), "vars($)['a']"),
        Holder("property", lambda leaf: type("Box", (), {"a": property(lambda s: leaf)})(), "$.a"),
        Holder("descriptor", lambda leaf: type("Box", (), {
            "a": type("D", (), {"__get__": lambda *_: leaf})()})(), "$.a"),
        Holder("static method", lambda leaf: type("Box", (), {"a": staticmethod(lambda: leaf)}),
               "$.a()"),
        Holder("class method", lambda leaf: type("Box", (), {"a": classmethod(lambda c: leaf)}),
               "$.a()"),
        Holder("closure", lambda leaf: lambda: leaf, "$()"),
        Holder("default", lambda leaf: lambda x=leaf: x, "$()"),
        Holder("keyword default", lambda leaf: _keyword(leaf), "$()"),
        Holder("context", lambda leaf: contextlib.nullcontext(leaf), "entered($)"),
        Holder("attribute of a function", lambda leaf: _held(lambda: 0, leaf), "$.a"),
        Holder("enum value", lambda leaf: enum.Enum("Box", {"A": (leaf,)}), "$['A'].value[0]"),
        Holder("enum by iteration", lambda leaf: enum.Enum("Box", {"A": (leaf,)}),
               "next(iter($)).value[0]"),
    ]  # fmt: skip
    return holders


def _keyword(leaf: Any) -> Callable:
    def get(*, x=leaf):
        return x

    return get


def _held(made: Any, leaf: Any) -> Any:
    made.a = leaf
    return made


def entered(context: Any) -> Any:
    with context as value:
        return value


def _numbers() -> list[str]:
    """Every function of the C library that makes another number of another leaf, through a slot."""
    make = _leaves()["protocols"]
    reads = [f"x {op} 1" for op in "+ - * / // % @ << >> & | ^ ** < >".split()]
    reads += [f"1 {op} x" for op in "+ - * / // % @ << >> & | ^ **".split()]
    reads += ["-x", "+x", "~x", "x[0]", "x()", "0 in x", "f'{x}'", "[*x]", "(8 if x else 3)"]
    for module in (builtins, operator, math, itertools):
        for name, item in vars(module).items():
            if callable(item) and name not in _NOT_CALLED and name[:1] != "_":
                called = name if module is builtins else f"{module.__name__}.{name}"
                reads += [f"{called}({text})" for text in ("x", "x, 1", "1, x", "x, x", "[x]")]
    kept = []
    for read in reads:
        try:
            values = [eval(f"number({read})", {**globals(), "x": make(w)}) for w in (3, 8)]
        except Exception:  # noqa: BLE001
            continue
        if values[0] != values[1] and all(type(v) is int and -40 < v < 99 for v in values):
            kept.append(read)
    return kept


# -- programs -------------------------------------------------------------------------------------

HOSTS = {
    "global": "def host():\n    return lambda b, h, i, j: (i - j).abs() < number({read})",
    "cell": "def host():\n    root = R\n    return lambda b, h, i, j: (i - j).abs() < number({read})",
    "default": "def host():\n    return lambda b, h, i, j, root=R: (i - j).abs() < number({read})",
    "keyword": "def host():\n    def f(b, h, i, j, *, root=R):\n        return (i - j).abs() < "
    "number({read})\n    return f",
    "partial": "def host():\n    return functools.partial(lambda root, b, h, i, j: (i - j).abs() < "
    "number({read}), R)",
    "method": "class Host:\n    def f(self, b, h, i, j):\n        root = self.root\n        return "
    "(i - j).abs() < number({read})\ndef host():\n    made = Host()\n    made.root = R\n    return made.f",
    "call": "class Host:\n    def __call__(self, b, h, i, j):\n        return (i - j).abs() < "
    "number({read})\ndef host():\n    Host.root = R\n    return Host()",
}  # fmt: skip


@functools.cache
def grammar() -> tuple[dict, list[Holder], list[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _leaves(), _holders(), _numbers()


class Outcome(NamedTuple):
    kind: str  # "right", "stale", "fails itself" or "no effect"
    program: str
    proven: bool = False


def run(seed: int) -> Outcome:
    draw = random.Random(seed)
    leaves, holders, numbers = grammar()
    leaf = draw.choice(["protocols", *draw.sample(sorted(leaves), 3)])
    chain = [draw.choice(holders) for _ in range(draw.choice([0, 1, 1, 1, 2]))]
    host = draw.choice(sorted(HOSTS))
    read = {"method": "root", "global": "R", "call": "self.root"}.get(host, "root")
    for holder in reversed(chain):
        read = holder.read.replace("$", read)
    last = "x.w" if leaf != "protocols" else draw.choice(numbers)
    read = f"(lambda x: {last})({read})"
    if last == "x.w" and draw.random() < 0.5:
        read = read.removeprefix("(lambda x: x.w)") + ".w"
    change = draw.choice(["the leaf's w", "its class's w", "another leaf"])
    text = f"{leaf} in {[h.name for h in chain]}, {host}: {read}; then {change}"
    name = f"protocols_{seed}"
    space = sys.modules[name] = types.ModuleType(name)
    space.__dict__.update({k: v for k, v in globals().items() if k[:1] != "_"}, __name__=name)

    def build(w: int) -> Any:
        made = root = leaves[leaf](w)
        for holder in chain:
            root = holder.make(root)
        return made, root

    try:
        made, space.R = build(3)
        exec(HOSTS[host].format(read=read), space.__dict__)
        fn = space.host()
        before, proven = _graph(fn)
        if change == "the leaf's w":
            made.w = 8
        elif change == "its class's w":
            type(made).w = 8
            vars(made).pop("w", None) if hasattr(made, "__dict__") else None
        else:
            made, space.R = build(8)
            fn = space.host()
        after = _graph(fn)[0]
        lowering._lowered.clear()
        if change == "another leaf":  # what an iterator gave is gone
            made, space.R = build(8)
            fn = space.host()
        anew = _graph(fn)[0]
    except Exception as error:  # noqa: BLE001 - a generator has ended, a class cannot be written
        return Outcome("fails itself", f"{text}: {type(error).__name__}: {error}")
    finally:
        del sys.modules[name]
    kind = "stale" if after != anew else "no effect" if before == anew else "right"
    return Outcome(kind, text, proven)


def _graph(fn: Callable) -> tuple[str, bool]:
    """The graph of a mask, and whether it is kept; or the first words of why there is none."""
    try:
        lowered = lowering.lower("mask", "f", "f32", fn)[0]
    except ModError as error:
        return str(error)[:40], False
    return lowered.text, lowered.retrace_reason is None


def many(seeds: range) -> tuple[collections.Counter, list[str]]:
    counts, stale = collections.Counter(), []
    for seed in seeds:
        outcome = run(seed)
        counts[outcome.kind] += 1
        counts["proven"] += outcome.proven
        if outcome.kind == "stale":
            stale.append(f"{seed}: {outcome.program}")
    return counts, stale


def test_no_protocol_hides_a_change():
    """300 programs: never stale; most of them say something, and many are kept."""
    counts, stale = many(range(300))
    assert not stale, "\n".join(stale)
    assert counts["right"] > 100, counts
    assert counts["proven"] > 40, counts


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parse.add_argument("--programs", type=int, default=2000, help="how many (2000)")
    parse.add_argument("--first", type=int, default=0, help="the first seed (0)")
    asked = parse.parse_args()
    leaves, holders, numbers = grammar()
    print(f"{len(leaves)} leaves, {len(holders)} ways to hold them, {len(numbers)} to read them")
    counts, stale = many(range(asked.first, asked.first + asked.programs))
    print(dict(counts), *stale, sep="\n")
    sys.exit(bool(stale))


if __name__ == "__main__":
    main()
