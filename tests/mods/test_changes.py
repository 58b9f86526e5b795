"""Whatever a function reads may change between two calls, and the second call sees it: eager, under
`torch.compile`, and where nothing can be seen, by tracing anew. (`test_programs` does so with random
programs; these are the ones that were once wrong.)"""

import dataclasses
import enum
import functools
import math
import random
import re
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headway as hw
from headway.errors import ModError
from headway.mods import lowering, retraced
from headway.mods.compiled import GUARDS_CLASSES
from long import long

L = 12
_draw = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(1, 2, L, 8, generator=_draw) for _ in range(3))
AT = (
    torch.arange(1)[:, None, None, None], torch.arange(2)[:, None, None],
    torch.arange(L)[:, None], torch.arange(L),
)  # fmt: skip
THREE = torch.tensor(3)
TABLE = torch.randn(2, L, generator=_draw)


def right(fn: Callable, kind: str) -> Tensor:
    """The function itself on index tensors, and dense attention in float64."""
    s = (Q @ K.mT / math.sqrt(8)).double()
    s = fn(s, *AT) if kind == "score" else s.masked_fill(~fn(*AT).expand(s.shape), -math.inf)
    return s.softmax(-1).nan_to_num() @ V.double()


def call(fn: Callable, kind: str, attention: Callable = hw.attention) -> Tensor:
    return attention(Q, K, V, **{kind: fn})


def check(fn: Callable, kind: str, attention: Callable = hw.attention) -> None:
    torch.testing.assert_close(
        call(fn, kind, attention).double(), right(fn, kind), rtol=1e-5, atol=1e-5
    )


class Change(NamedTuple):
    """- `make`: the function; `then`: changes what it reads, and may return another function.
    - `guarded`: `torch.compile` can see it.
    """

    make: Callable[[], Any]
    then: Callable[[Any], Any]
    kind: str = "mask"
    guarded: bool = True


class Box:
    def __init__(self, **items: Any) -> None:
        self.__dict__.update(items)


def near(window: Any) -> Callable:
    return lambda b, h, i, j: (i - j).abs() < window()


causal = lambda b, h, i, j: i >= j
window = lambda b, h, i, j: (i - j).abs() < 3
both = lambda f, g: lambda b, h, i, j: f(b, h, i, j) & g(b, h, i, j)
either = lambda f, g: lambda b, h, i, j: f(b, h, i, j) | g(b, h, i, j)
listed = lambda fs: lambda b, h, i, j: fs[0](b, h, i, j) | (fs[1](b, h, i, j) & fs[2](b, h, i, j))
tables = lambda ts: lambda s, b, h, i, j: s + ts[0][h, j] - ts[1][h, i] * j


class Settings:
    window = 3


class Inherits(Settings):
    pass


class Sub(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window


class Layer(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.sub = Sub(window)

    def mask(self, b, h, i, j):
        return (i - j).abs() < self.sub.window


WINDOW = 3


class Methods:
    def limit(self) -> int:
        return WINDOW

    @property
    def width(self) -> int:
        return WINDOW

    @classmethod
    def of_class(cls) -> int:
        return WINDOW

    def by_method(self, b, h, i, j):
        return (i - j).abs() < self.limit()

    def by_property(self, b, h, i, j):
        return (i - j).abs() < self.width

    def by_classmethod(self, b, h, i, j):
        return (i - j).abs() < self.of_class()


class Slots:
    __slots__ = ("window",)


class SlotsBelow(Slots):
    pass


class Anything:
    def __getattr__(self, name):
        return WINDOW


class Adds:
    def __add__(self, other):
        return WINDOW + other


def _set_window(_: Any) -> None:
    globals()["WINDOW"] = 5


def _setting(name: str, value: Any) -> Callable:
    def then(fn: Any) -> None:
        setattr(fn.__closure__[0].cell_contents, name, value)

    return then


def _of(thing: Any) -> Callable:
    return lambda b, h, i, j: (i - j).abs() < thing.window


def _slots() -> Any:
    made = SlotsBelow()
    made.window = 3
    return made


def _module(name: str) -> types.ModuleType:
    made = types.ModuleType(name)
    made.window = 3  # type: ignore[attr-defined]
    return made


def _executed() -> Any:
    space = {"__name__": __name__, "TABLE": TABLE * 2}
    exec("def score(s, b, h, i, j):\n    return s + TABLE[h, j]", space)
    return space["score"]


def _other_table(fn: Any) -> None:
    fn.__globals__["TABLE"] = TABLE * -3


def _by_value(read: Callable[[Tensor], Any]) -> Change:
    def make() -> Callable:
        t = torch.tensor(3)
        return lambda b, h, i, j: (i - j).abs() < read(t)

    def then(fn: Any) -> None:
        values = {
            n: c.cell_contents for n, c in zip(fn.__code__.co_freevars, fn.__closure__, strict=True)
        }
        values["t"].fill_(5)

    return Change(make, then, guarded=False)


def _named(name: str) -> Callable:
    box = Box(window=3)
    return lambda b, h, i, j: (i - j).abs() < getattr(box, name)


CHANGES = {
    "two of the same parts": Change(
        lambda: either(both(causal, window), causal),
        lambda _: either(both(causal, window), window),
    ),
    "a list of functions": Change(
        lambda: listed([causal, window, causal]), lambda _: listed([causal, window, window])
    ),
    "a list of tensors": Change(
        lambda: tables([TABLE, TABLE]), lambda _: tables([TABLE, -TABLE]), "score"
    ),
    "an attribute of a class": Change(
        lambda: _of(Settings), lambda _: setattr(Settings, "window", 5)
    ),
    "an attribute of the class below": Change(
        lambda: _of(Inherits()), lambda _: setattr(Settings, "window", 5)
    ),
    "an attribute of a submodule": Change(lambda: Layer(3).mask, lambda _: Layer(5).mask),
    "the same, written": Change(
        lambda: Layer(3).mask, lambda fn: setattr(fn.__self__.sub, "window", 5)
    ),
    "what a method reads": Change(lambda: Methods().by_method, _set_window),
    "what a property reads": Change(lambda: Methods().by_property, _set_window),
    "what a class method reads": Change(lambda: Methods().by_classmethod, _set_window),
    "a module in a cell": Change(lambda: _of(_module("settings")), _setting("window", 5)),
    "a slot of a base class": Change(lambda: _of(_slots()), _setting("window", 5)),
    "a namespace of its own": Change(_executed, _other_table, "score"),
    "an item by a key": Change(
        lambda: (lambda d: lambda b, h, i, j: (i - j).abs() < d[d["k"]])({"k": "a", "a": 3, "b": 5}),
        lambda fn: fn.__closure__[0].cell_contents.update(k="b"),
    ),
    "the shape of a tensor": Change(
        lambda: (lambda t: lambda s, b, h, i, j: s + t.shape[0] * j)(torch.zeros(3)),
        lambda fn: (lambda t: lambda s, b, h, i, j: s + t.shape[0] * j)(torch.zeros(5)),
        "score",
    ),
    "a number of a partial": Change(
        lambda: functools.partial(lambda b, h, i, j, n: i - j < n, n=3),
        lambda fn: functools.partial(fn.func, n=5),
    ),
    "item()": _by_value(lambda t: t.item()),
    "int()": _by_value(int),
    "tolist()": _by_value(lambda t: t.tolist()),
    "numpy()": _by_value(lambda t: int(t.numpy())),
    "a branch": _by_value(lambda t: 4 if torch.equal(t, THREE) else 2),
    "a name that is worked out": Change(
        lambda: _named("window"), lambda fn: setattr(fn.__closure__[0].cell_contents, "window", 5),
        guarded=False,
    ),
    "__getattr__": Change(lambda: _of(Anything()), _set_window, guarded=False),
    "an operator of an object": Change(
        lambda: (lambda a: lambda b, h, i, j: (i - j).abs() < a + 1)(Adds()), _set_window,
        guarded=False,
    ),
    "an object of an unknown kind": Change(
        lambda: (lambda a: lambda b, h, i, j: (i - j).abs() < a[0])(np.array([3])),
        lambda fn: fn.__closure__[0].cell_contents.fill(5),
        guarded=False,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    Settings.window = 3
    globals()["WINDOW"] = 3


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name):
    change = CHANGES[name]
    fn = change.make()
    check(fn, change.kind)
    before = call(fn, change.kind)
    fn = change.then(fn) or fn
    check(fn, change.kind)
    assert not torch.equal(before, call(fn, change.kind))  # or nothing is shown


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_traced_at_every_call_is_said(name):
    """With the line; nothing else is."""
    change = CHANGES[name]
    fn = change.make()
    told = retraced(change.kind, fn, torch.float32)
    explained = str(hw.explain(Q, K, V, **{change.kind: fn}))
    if change.guarded:
        assert told is None
        assert "at every call" not in explained
    else:
        assert told is not None
        assert __file__ in told
        assert told in explained


class Owner(nn.Module):
    """A module of the user's. Its methods are PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.sub = nn.Linear(2, 2)
        self.register_buffer("ids", torch.zeros(1))


def reads_of_a_module() -> list[str]:
    """The methods of a module that return another text after a parameter, a buffer and a submodule
    were added: found by calling all of them."""
    before, after = Owner(), Owner()
    grow(after)
    found = []
    for name in sorted({*dir(nn.Module)} - {"compile"}):
        try:
            texts = [shown(module, name) for module in (before, after)]
        except Exception:  # noqa: BLE001 it takes arguments, or is no method
            continue
        if texts[0] != texts[1] and texts[0] == shown(Owner(), name):
            found.append(name)
    return found


def grow(module: nn.Module) -> None:
    module.sub.extra = nn.Linear(3, 3)
    module.register_buffer("more", torch.zeros(2))


def shown(module: nn.Module, name: str) -> int:
    result = getattr(module, name)()
    items = result if isinstance(result, str) else list(result)
    if not all(isinstance(item, str | tuple | Tensor | nn.Module) for item in items):
        raise TypeError(name)
    return len(items)


@pytest.mark.parametrize("how", ["by name", "of the class", "bound"])
@pytest.mark.parametrize("name", reads_of_a_module())
def test_what_methods_of_modules_read_is_seen(name, how):
    """PyTorch's methods read all of a module of yours, by names that are not in your code."""
    module = Owner()
    of_class, bound = getattr(nn.Module, name), getattr(module, name)
    length = {
        "by name": eval(f"lambda: len(list(module.{name}()))", {"module": module}),
        "of the class": lambda: len(list(of_class(module))),
        "bound": lambda: len(list(bound())),
    }[how]
    first = length()
    fn = lambda b, h, i, j: (i - j).abs() < (3 if length() == first else 8)
    check(fn, "mask")
    grow(module)
    check(fn, "mask")
    assert length() != first


def test_modules_that_derive_from_containers_are_seen():
    class Layers(nn.ModuleList):
        pass

    layers = Layers([nn.Linear(3, 3)])
    for fn in (
        lambda b, h, i, j: (i - j).abs() < 3 * len(layers),
        lambda b, h, i, j: (i - j).abs() < sum(layer.in_features for layer in layers),
    ):
        check(fn, "mask")
        layers.append(nn.Linear(2, 2))
        check(fn, "mask")


def test_names_of_buffers_are_seen():
    act = nn.Tanh()
    act.register_buffer("a", torch.zeros(1))
    fn = lambda b, h, i, j: (i - j).abs() < (3 if "a" in dict(act.named_buffers()) else 8)
    kept = lambda b, h, i, j: (i - j).abs() < 3 + len(act.state_dict())
    for each in (fn, kept):
        check(each, "mask")
    act.register_buffer("b", act._buffers.pop("a"))
    act._non_persistent_buffers_set.add("b")
    for each in (fn, kept):
        check(each, "mask")


@pytest.mark.parametrize("read", [
    object.__getattribute__, types.ModuleType.__getattribute__,
], ids=str)  # fmt: skip
def test_methods_in_c_that_read_by_name_are_seen(read):
    held: Any = types.ModuleType("w") if read.__objclass__ is types.ModuleType else Box()
    held.w = 3
    fn = lambda b, h, i, j: (i - j).abs() < read(held, "w")
    check(fn, "mask")
    held.w = 8
    check(fn, "mask")


def test_a_function_of_a_module_that_becomes_a_value_is_seen(monkeypatch):
    monkeypatch.setattr(math, "window", len, raising=False)
    fn = lambda b, h, i, j: (i - j).abs() < (3 if callable(math.window) else math.window)
    check(fn, "mask")
    math.window = 8  # type: ignore[attr-defined]
    check(fn, "mask")


def test_a_long_comparison_is_said():
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(60)])
    whole = lambda b, h, i, j: (i - j).abs() < model[0].in_features
    width = model[0].in_features
    number = lambda b, h, i, j: (i - j).abs() < width
    assert retraced("mask", whole, torch.float32) is None
    explained = str(hw.explain(Q, K, V, mask=whole))
    assert re.search(
        r"compared at every call: the mask reads \d{3} values \(\d+\.\d ms\)", explained
    )
    assert "compared" not in str(hw.explain(Q, K, V, mask=number))


OF_CLASSES = (
    "an attribute of a class", "an attribute of the class below", "an attribute of a submodule",
    "the same, written", "what a method reads", "what a property reads", "what a class method reads",
)  # fmt: skip


# Where nothing breaks, a graph is the same one with `fullgraph=True` and without.
UNDER_COMPILE = [(n, True) for n, c in CHANGES.items() if c.guarded]
UNDER_COMPILE += [long(n, False) if GUARDS_CLASSES else (n, False) for n in OF_CLASSES]


@pytest.mark.parametrize(("name", "whole"), UNDER_COMPILE)
def test_a_change_is_seen_under_compile(name, whole):
    change = CHANGES[name]
    torch.compiler.reset()
    compiled = torch.compile(hw.attention, backend="eager", fullgraph=whole)
    fn = change.make()
    if whole and name in OF_CLASSES and not GUARDS_CLASSES:
        with pytest.raises(Exception, match=r"before PyTorch 2\.13"):
            call(fn, change.kind, compiled)
        return
    check(fn, change.kind, compiled)
    fn = change.then(fn) or fn
    check(fn, change.kind, compiled)


@pytest.mark.parametrize("name", [n for n, c in CHANGES.items() if not c.guarded])
def test_what_cannot_be_guarded_is_refused_or_not_compiled(name):
    change = CHANGES[name]
    torch.compiler.reset()
    fn = change.make()
    with pytest.raises(Exception, match="has to be traced at every call"):
        call(fn, change.kind, torch.compile(hw.attention, backend="eager", fullgraph=True))
    torch.compiler.reset()
    broken = torch.compile(hw.attention, backend="eager")
    check(fn, change.kind, broken)
    fn = change.then(fn) or fn
    check(fn, change.kind, broken)


def test_a_length_that_a_function_reads_is_guarded_when_lengths_are_dynamic():
    torch.compiler.reset()
    compiled = torch.compile(hw.attention, backend="eager", fullgraph=True, dynamic=True)
    for n in (3, 5, 7):
        check(
            (lambda t: lambda s, b, h, i, j: s + t.shape[0] * j)(torch.zeros(n)), "score", compiled
        )


def test_a_class_that_gets_a_getattribute_later():
    class Thing:
        def __init__(self):
            self.window = 3

    fn = _of(Thing())
    check(fn, "mask")
    Thing.__getattribute__ = lambda self, name: 5
    check(fn, "mask")


def test_numbers_that_are_drawn():
    draw = random.Random(0)
    fn = lambda s, b, h, i, j: s * draw.random()
    assert not torch.equal(call(fn, "score"), call(fn, "score"))


def test_a_function_that_changes_what_it_reads():
    counts = [0]

    def fn(s, b, h, i, j):
        counts[0] += 1
        return s * counts[0]

    first, second = call(fn, "score"), call(fn, "score")
    assert counts[0] >= 2
    assert not torch.equal(first, second)


def test_the_default_dtype():
    """`0.1 * (j - i)` has it."""
    fn = lambda s, b, h, i, j: s + 0.1 * (j - i)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        narrow = call(fn, "score")
    finally:
        torch.set_default_dtype(before)
    check(fn, "score")
    assert not torch.equal(narrow, call(fn, "score"))


@pytest.mark.parametrize(
    "number", [5, 5.0, -math.inf, math.inf, np.int64(5), np.float64(5.0), True]
)
def test_partials_combine(number):
    fn = functools.partial(lambda b, h, i, j, n: i - j < n, n=number)
    check(fn, "mask")
    for made in (hw.causal() & fn, fn | hw.causal(), ~(hw.causal() & fn)):
        check(made, "mask")
        bound = hw.block_mask(made, 1, 1, L, L)
        now = right(made, "mask")
        torch.testing.assert_close(call(bound, "mask").double(), now, rtol=1e-5, atol=1e-5)
    score = hw.softcap(5.0) >> functools.partial(lambda s, b, h, i, j, n: s + n * j, n=0.5)
    check(score, "score")
    ids = torch.arange(L) // 5
    check(hw.causal() & functools.partial(lambda b, h, i, j, t: t[i] == t[j], t=ids), "mask")


@pytest.mark.parametrize("number", [2, 0.5, -3])
def test_partials_made_in_what_is_compiled(number):
    """Whose numbers change, with dynamic shapes and without."""

    def fn(b, h, i, j, n):
        return i - j < n

    for dynamic in (None, True):
        torch.compiler.reset()
        compiled = torch.compile(
            lambda n: hw.attention(Q, K, V, mask=hw.causal() | functools.partial(fn, n=n)),
            backend="eager", fullgraph=True, dynamic=dynamic,
        )  # fmt: skip
        for n in (number, number + 1, number + 2):
            now = right(hw.causal() | functools.partial(fn, n=n), "mask")
            torch.testing.assert_close(compiled(n).double(), now, rtol=1e-5, atol=1e-5)


def test_lists_in_partials_under_compile():
    """Numbers in them become symbols once they change."""
    items, named = [1.0], {"w": 2.0}
    scale = lambda items, named, s, b, h, i, j: s * items[0] * named["w"]
    fn = functools.partial(scale, items, named)
    torch.compiler.reset()
    compiled = torch.compile(hw.attention, backend="eager", fullgraph=True)
    for number in (1.5, 3.0, 2.5):
        items[0] = named["w"] = number
        check(fn, "score", compiled)
    items.insert(0, 0.5)
    check(fn, "score", compiled)


class Twice(hw.Mask):
    """A user's own kind of mask, which has a name of the library's in another one."""

    def __init__(self, n):
        self.__dict__["n"] = n

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < self.n + WINDOW


def test_a_kind_of_mask_of_ones_own():
    causal_ = type("causal", (Twice,), {"__module__": __name__})
    for n in (1, 3):
        for made in (Twice(n), hw.causal() & Twice(n), causal_(n)):
            check(made, "mask")
    _set_window(None)
    check(Twice(3), "mask")
    check(hw.causal(), "mask")


# -- detach, no_grad ------------------------------------------------------------------------------


def _gradients(score: Callable, learned: list[Tensor]) -> tuple[list, list]:
    """Ours, and those of dense attention."""
    found = []
    for dense in (False, True):
        q, k, v = (x.double().requires_grad_() for x in (Q, K, V))
        if dense:
            out = score(q @ k.mT / math.sqrt(8), *AT).softmax(-1) @ v
        else:
            out = hw.attention(q, k, v, score)
        made = torch.autograd.grad(out.square().sum(), [q, k, v, *learned], allow_unused=True)
        found.append([torch.zeros((), dtype=torch.float64) if g is None else g for g in made])
    return found[0], found[1]


X = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
T = torch.randn(2, L, dtype=torch.float64, generator=_draw).requires_grad_()


def _without(s, b, h, i, j):
    with torch.no_grad():
        c = torch.sigmoid(s) * T[h, j]
    return s + c


def _partly(s, b, h, i, j):
    s = s + T[h, j]
    with torch.no_grad():
        s = s * 2
        with torch.enable_grad():
            s = s * X
    return s + T[h, i]


CUT = {
    "a number": lambda s, b, h, i, j: s * X.detach(),
    "what is gathered": lambda s, b, h, i, j: s * T[h, j].detach(),
    "half of the uses": lambda s, b, h, i, j: s * T[h, j].detach() + T[h, j] * X,
    "straight through": lambda s, b, h, i, j: s + (torch.round(s) - s).detach(),
    "all of S": lambda s, b, h, i, j: s.detach() + T[h, j],
    "ALiBi's slope": lambda s, b, h, i, j: s + X.detach() * (j - i),
    "no_grad": _without,
    "no_grad, partly": _partly,
    "clone under no_grad": torch.no_grad()(lambda s, b, h, i, j: s.clone() * X),
}


@pytest.mark.parametrize("name", CUT)
def test_what_is_detached_has_no_gradient(name):
    ours, theirs = _gradients(CUT[name], [X, T])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.expand_as(a), rtol=1e-9, atol=1e-9)


def test_writing_in_place_under_no_grad_is_refused():
    def fn(s, b, h, i, j):
        with torch.no_grad():
            s.mul_(2)
        return s

    with pytest.raises(ModError, match=r"in place under torch\.no_grad"):
        call(fn, "score")


def test_a_trace_under_a_profiler_is_right():
    """Where nothing can be seen, nothing is kept."""
    import cProfile

    lowering._lowered.clear()
    fn = near(lambda: WINDOW)
    profiler = cProfile.Profile()
    profiler.enable()
    check(fn, "mask")
    _set_window(None)
    check(fn, "mask")
    profiler.disable()


# -- kinds that a walk by hand forgets ------------------------------------------------------------

_BODIES = {
    "a key": ("class L:\n    window = 3\nx = {L: 0}", "max(c.window for c in x)", "L.window = 8"),
    "a class in a set": ("class L:\n    window = 3\nx = {L}", "max(c.window for c in x)",
                         "L.window = 8"),
    "a member by name": ("class E(enum.Enum):\n    A = 1\nE.A.w = 3\nN = 'A'", "E[N].w", "E.A.w = 8"),
    "a member by value": ("class E(enum.Enum):\n    A = 1\nE.A.w = 3", "E(1).w", "E.A.w = 8"),
    "attrgetter": ("from operator import attrgetter as g\nclass C:\n    w = 3", "g('w')(C)", "C.w = 8"),
    "a range": ("r = range(0, 3, 2)", "r.stop", "r = range(0, 4, 2)"),
    "a partial's attribute": ("p = functools.partial(max, 1)\np.w = 3", "p.w", "p.w = 8"),
    "a metaclass": ("class M(type):\n    w = 3\nclass C(metaclass=M):\n    pass\nx = C()",
                    "type(x).w", "M.w = 8"),
    "a module's class": ("class M(types.ModuleType):\n    w = 3\nx = M('x')", "x.w", "M.w = 8"),
    "a row of sqlite": ("import sqlite3\nc = sqlite3.connect(':memory:')\n"
                        "c.row_factory = sqlite3.Row\nget = lambda n: c.execute(f'select {n} as w')"
                        ".fetchone()\nx = get(3)", "x['w']", "x = get(8)"),
    "math": ("import math", "math.tau", "math.tau = 3.0"),
    "an attribute over the class's": ("class C:\n    w = 3\nx = C()", "x.w", "x.w = 8"),
    "the order of a dict": ("x = {'a': 3, 'b': 8}", "next(iter(x.values()))", "x['a'] = x.pop('a')"),
    "a NumPy number": ("x = np.int64(3)", "x", "x = np.int64(8)"),
    "a forward": ("class A(nn.Module):\n    def forward(self):\n        return 3\nx = A()", "x()",
                  "x.forward = lambda: 8"),
    "a grown ModuleDict": ("x = nn.ModuleDict({'a': nn.Linear(3, 1)})",
                           "sum(m.in_features for m in x.values())", "x['b'] = nn.Linear(5, 1)"),
    "a dict by functions": ("def f():\n    pass\nx = {f: 3}", "x[f]", "x[f] = 8"),
    "a partial over a frozen dataclass": (
        "@dataclasses.dataclass(frozen=True)\nclass C:\n    w: int = 3\n"
        "m = functools.partial(lambda c, b, h, i, j: (i - j).abs() < c.w, C())", "",
        "m = functools.partial(m.func, C(8))"),
    "a hook of all modules": (
        "M = sys.modules['torch.nn.modules.module']\nact = nn.Identity()", "act(3)",
        "handle = M.register_module_forward_hook(lambda m, args, out: 8)"),
    "a hook": ("act = nn.Identity()", "act(3)", "act.register_forward_hook(lambda m, args, out: 8)"),
    "a builtin that is hidden": ("", "max(3, 1)", "max = lambda *x: 8"),
    "the order of an OrderedDict": ("from collections import OrderedDict\nx = OrderedDict(a=3, b=8)",
                                    "next(iter(x.values()))", "x.move_to_end('a')"),
    "a name that is defined later": (
        "def f():\n    try:\n        return later\n    except NameError:\n        return 3",
        "f()", "later = 8"),
    "a class that can be called later": ("class C:\n    pass\nx = C()", "(8 if callable(x) else 3)",
                                         "C.__call__ = lambda self: 3"),
}  # fmt: skip
# Each compiled program takes a second.
_COMPILED = (
    "an attribute over the class's", "the order of a dict", "a NumPy number", "a forward",
    "a grown ModuleDict", "a range", "a dict by functions", "a partial over a frozen dataclass",
    "a hook of all modules", "a hook", "a builtin that is hidden", "the order of an OrderedDict",
    "a name that is defined later", "a class that can be called later",
)  # fmt: skip


def _changed_body(name: str, attention: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "tau", math.tau)  # put back afterwards
    setup, read, change = _BODIES[name]
    module = types.ModuleType(f"changed_{name.replace(' ', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__dict__.update(
        enum=enum, functools=functools, types=types, np=np, nn=nn, dataclasses=dataclasses, sys=sys
    )
    exec(setup, module.__dict__)
    if read:
        exec(f"m = lambda b, h, i, j: (i - j).abs() < {read}", module.__dict__)
    check(module.m, "mask", attention)
    before = call(module.m, "mask", attention)
    exec(change, module.__dict__)
    try:
        check(module.m, "mask", attention)
        assert not torch.equal(before, call(module.m, "mask", attention))
    finally:
        if "handle" in module.__dict__:
            module.__dict__["handle"].remove()


@pytest.mark.parametrize("name", _BODIES)
def test_kinds_that_change(name, monkeypatch):
    _changed_body(name, hw.attention, monkeypatch)


@pytest.mark.parametrize("name", _COMPILED)
def test_kinds_that_change_under_compile(name, monkeypatch):
    torch.compiler.reset()
    _changed_body(name, torch.compile(hw.attention, backend="eager"), monkeypatch)
