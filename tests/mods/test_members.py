"""What was put into modules and classes of libraries, containers that lie about what they contain, and
code in C that calls code in C: call, change what was read, call again, and compare with a function
that was never seen. The ways come from the namespaces themselves, not from a list.
"""

import builtins
import collections
import enum
import functools
import itertools
import math
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headway as hw
from headway.errors import ModError
from headway.mods import lowering
from headway.mods.tracing.purity import CONTAINERS, is_constant_module


def graph(fn: Callable) -> tuple[str, bool]:
    """The graph of a score, and whether it is kept."""
    lowered = lowering.lower("score", "f", "f32", fn)[0]
    return lowered.text, lowered.retrace_reason is None


def sees(fn: Callable, change: Callable[[], Any]) -> bool:
    """Whether a function means after a change what it would mean if nobody had seen it before.
    Returns whether its graph was kept."""
    before, kept = graph(fn)
    assert graph(fn)[0] == before
    change()
    after, _ = graph(fn)
    lowering._lowered.clear()
    assert after == graph(fn)[0]
    assert after != before  # or nothing is shown
    return kept


# -- what was put into a library's modules and classes --------------------------------------------


class Box:
    def __init__(self, w: float) -> None:
        self.w = w

    def __call__(self, x: Any) -> Any:
        return x * self.w


def function(w: float) -> Callable:
    def times(x: Any) -> Any:
        return x * times.w

    times.w = w
    return times


# How to make a thing with a number, to read it as `thing`, and to change it in place.
THINGS = {
    "a number": (lambda w: w, "thing", None),
    "a list": (lambda w: [w], "thing[0]", lambda x, w: x.__setitem__(0, w)),
    "an object": (Box, "thing.w", lambda x, w: setattr(x, "w", w)),
    "an object that is called": (Box, "thing(1.0)", lambda x, w: setattr(x, "w", w)),
    "a function": (function, "thing(1.0)", lambda x, w: setattr(x, "w", w)),
    "an attribute of a function": (function, "thing.w", lambda x, w: setattr(x, "w", w)),
    "a class": (lambda w: type("Made", (), {"w": w}), "thing.w", lambda x, w: setattr(x, "w", w)),
    "a namespace": (
        lambda w: types.SimpleNamespace(w=w), "thing.w", lambda x, w: setattr(x, "w", w)
    ),
    "a module": (lambda w: with_number(types.ModuleType("made"), w), "thing.w",
                 lambda x, w: setattr(x, "w", w)),
    "a partial": (lambda w: functools.partial(operator.mul, w), "thing(1.0)", None),
    "its attribute": (lambda w: with_number(functools.partial(max, 1), w), "thing.w",
                      lambda x, w: setattr(x, "w", w)),
    "a function in C": (lambda w: math.floor if w < 2 else math.ceil, "thing(1.5)", None),
    "a module of torch's": (lambda w: with_number(nn.Tanh(), w), "thing.w",
                            lambda x, w: setattr(x, "w", w)),
}  # fmt: skip


def with_number(made: Any, w: float) -> Any:
    made.w = w
    return made


def places() -> dict[str, Any]:
    """Modules and classes that the walk takes for constant and that take attributes."""
    modules = {"headway": hw, "torch": torch, "torch.nn.functional": nn.functional, "math": math,
               "operator": operator, "functools": functools, "numpy": np}  # fmt: skip
    assert all(map(is_constant_module, modules))
    return modules


def of_class(cls: type) -> Callable[[], Any]:
    """A way to an object of a class of a library's."""
    if issubclass(cls, torch.Tensor):
        tensor = torch.ones(3)
        return lambda: nn.Parameter(tensor) if cls is nn.Parameter else tensor
    made = {nn.Module: nn.Tanh, nn.Linear: lambda: nn.Linear(1, 1),
            enum.Enum: lambda: enum.Enum("Made", "A").A}[cls]()  # fmt: skip
    return lambda: made


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("place", places())
def test_what_was_put_into_a_module_is_seen(place, thing, monkeypatch):
    module, (make, read, write) = places()[place], THINGS[thing]
    space = {"module": module}
    score = eval(f"lambda s, b, h, i, j: s * {read.replace('thing', 'module.made')}", space)
    monkeypatch.setattr(module, "made", make(1.5), raising=False)
    sees(score, lambda: monkeypatch.setattr(module, "made", make(2.5)))
    if write is not None:
        sees(score, lambda: write(module.made, 3.5))


@pytest.mark.parametrize("thing", [t for t in THINGS if t not in ("a function", "a partial")])
@pytest.mark.parametrize("cls", [nn.Module, nn.Linear, torch.Tensor, nn.Parameter, enum.Enum])
def test_what_was_put_into_a_class_is_seen(cls, thing, monkeypatch):
    make, read, write = THINGS[thing]
    for where in (of_class(cls)(), cls):
        score = eval(f"lambda s, b, h, i, j: s * {read.replace('thing', 'x.made')}", {"x": where})
        monkeypatch.setattr(cls, "made", make(1.5), raising=False)
        sees(score, lambda: monkeypatch.setattr(cls, "made", make(2.5)))
        if write is not None:
            sees(score, lambda: write(cls.made, 3.5))


def test_what_was_put_into_a_module_is_seen_under_compile(monkeypatch):
    score = lambda s, b, h, i, j: nn.functional.made(s)
    monkeypatch.setattr(nn.functional, "made", torch.relu, raising=False)
    q = torch.randn(1, 1, 4, 8)
    torch.compiler.reset()
    compiled = torch.compile(hw.attention, backend="eager", fullgraph=True)
    for put in (torch.relu, torch.tanh, torch.sigmoid, lambda x: x * 3):
        monkeypatch.setattr(nn.functional, "made", put)
        torch.testing.assert_close(compiled(q, q, q, score), hw.attention(q, q, q, score))


def test_what_was_put_into_the_class_of_symbols_is_seen(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "made", 1.5, raising=False)
    sees(lambda s, b, h, i, j: s * s.made, lambda: monkeypatch.setattr(torch.Tensor, "made", 2.5))


def test_what_was_put_into_the_builtins_is_seen(monkeypatch):
    monkeypatch.setattr(builtins, "made", Box(1.5), raising=False)
    cls = type("Made", (), {"w": 1.5})
    monkeypatch.setattr(builtins, "Made", cls, raising=False)
    sees(lambda s, b, h, i, j: s * made.w, lambda: setattr(builtins.made, "w", 2.5))
    sees(lambda s, b, h, i, j: s * Made.w, lambda: setattr(cls, "w", 2.5))


# -- containers -----------------------------------------------------------------------------------

_EMPTY = {"__iter__": lambda _: iter(()), "__len__": lambda _: 0, "__contains__": lambda *_: False}


def lies(base: type) -> Iterator[dict[str, Callable]]:
    """Methods by which a class may say otherwise what its objects contain."""
    for name in dir(base):
        if name in _EMPTY:
            yield {name: _EMPTY[name]}
        elif name in ("keys", "values", "items"):
            yield {name: lambda _: ()}
    yield {name: method for name, method in _EMPTY.items() if hasattr(base, name)}


@pytest.mark.parametrize("base", sorted(CONTAINERS, key=str), ids=str)
def test_what_a_container_contains_is_seen(base):
    if base is torch.Size:
        pytest.skip("its class takes no subclass's numbers")
    for methods in lies(base):
        kind = type("Lies", (base,), {"__slots__": (), **methods})
        of = lambda w, kind=kind: kind({"w": w} if issubclass(base, dict) else [w])
        box = types.SimpleNamespace(x=of(1.5))
        if issubclass(base, dict):
            read = lambda s, b, h, i, j, box=box: s * box.x["w"]
        elif issubclass(base, set | frozenset):
            read = lambda s, b, h, i, j, box=box, base=base: s * max(base.copy(box.x))
        else:
            read = lambda s, b, h, i, j, box=box: s * box.x[0]
        sees(read, lambda box=box, of=of: setattr(box, "x", of(2.5)))


# -- code in C that calls code in C ---------------------------------------------------------------

CALLERS = {
    "operator.call": lambda f, *x: operator.call(f, *x),
    "map": lambda f, *x: next(map(f, *[[item] for item in x])),
    "starmap": lambda f, *x: next(itertools.starmap(f, [x])),
    "partial": lambda f, *x: functools.partial(f, *x)(),
    "iter": lambda f, *x: next(iter(functools.partial(f, *x), None)),
    "reduce": lambda f, a, b: functools.reduce(f, [a, b]),
}


@pytest.mark.parametrize("name", CALLERS)
def test_what_c_reads_for_c_is_seen(name):
    caller = CALLERS[name]
    one = types.SimpleNamespace(w=1.5)
    score = lambda s, b, h, i, j: s * caller(builtins.getattr, one, "w")
    sees(score, lambda: setattr(one, "w", 2.5))
    score = lambda s, b, h, i, j: s * caller(builtins.vars(one).get, "w", None)
    sees(score, lambda: setattr(one, "w", 3.5))
    score = lambda s, b, h, i, j: s * float(caller(str.format, "{0.w}", one))
    sees(score, lambda: setattr(one, "w", 4.5))
    score = lambda s, b, h, i, j: s * float(caller("{1}{0.w}".format, one, ""))
    sees(score, lambda: setattr(one, "w", 5.5))


def test_the_state_that_c_reads_for_c_is_the_callers():
    score = lambda s, b, h, i, j: s * (2 if operator.call(torch.is_grad_enabled) else 3)
    before = graph(score)[0]
    with torch.no_grad():
        assert graph(score)[0] != before
    assert graph(score)[0] == before


def test_a_data_attribute_of_the_name_of_a_method_is_followed():
    config = types.SimpleNamespace(format=1.5)
    assert sees(lambda s, b, h, i, j: s * config.format, lambda: setattr(config, "format", 2.5))


# -- what Python asks by itself -------------------------------------------------------------------


def test_names_of_members_classes_and_functions_are_seen():
    class Mode(enum.Enum):
        A = 1

    class Plain:
        pass

    def helper():
        pass

    plain = Plain()
    assert sees(lambda s, b, h, i, j: s * len(Mode.A.name), lambda: setattr(Mode.A, "_name_", "AB"))
    for change in (("__qualname__", "P"), ("__module__", "m")):
        sees(lambda s, b, h, i, j: s * len(str(Plain)), lambda c=change: setattr(Plain, *c))
    sees(
        lambda s, b, h, i, j: s * len(f"{plain}".partition(" at ")[0]),
        lambda: setattr(Plain, "__qualname__", "Other"),
    )
    sees(
        lambda s, b, h, i, j: s * len(f"{helper}".partition(" at ")[0]),
        lambda: setattr(helper, "__qualname__", "h"),
    )


def test_a_field_of_a_named_tuple_that_becomes_another_is_seen():
    pair = collections.namedtuple("pair", "x y")
    one = pair(1.5, 2.5)
    assert sees(lambda s, b, h, i, j: s * one.x, lambda: setattr(pair, "x", vars(pair)["y"]))


def test_a_class_that_becomes_a_sequence_or_a_mapping_is_seen():
    class Plain:
        pass

    plain = Plain()

    def score(s, b, h, i, j):
        match plain:
            case {}:
                return s * 2
        return s

    assert sees(score, lambda: collections.abc.Mapping.register(Plain))


def test_a_nan_is_itself_alone():
    nan = float("nan")
    box = types.SimpleNamespace(x=nan)
    for score in (
        lambda s, b, h, i, j: s * 2 if box.x is nan else s,
        lambda s, b, h, i, j: s * 2 if nan in [box.x] else s,
        lambda s, b, h, i, j: s * 2 if (box.x, 1) == (nan, 1) else s,
    ):
        box.x = nan
        assert sees(score, lambda: setattr(box, "x", float("nan")))


def test_strings_and_numbers_that_are_the_same_one_are_seen():
    box = types.SimpleNamespace()
    for made in (lambda: "".join(["au", "to"]), lambda: float("1e3"), lambda: int("12345")):
        box.x = one = made()
        same = lambda s, b, h, i, j, one=one: s * 2 if operator.is_(box.x, one) else s
        key = lambda s, b, h, i, j, one=one: s * 2 if [k for k in box.x if k is one] else s
        score = lambda s, b, h, i, j, one=one: s * 2 if box.x is one else s
        assert sees(same, lambda made=made: setattr(box, "x", made()))
        box.x = {one: 0}
        assert sees(key, lambda made=made: setattr(box, "x", {made(): 0}))
        box.x = one
        assert sees(score, lambda made=made: setattr(box, "x", made()))
        torch.compiler.reset()
        q = torch.randn(1, 1, 4, 8)
        compiled = torch.compile(hw.attention, backend="eager", fullgraph=True)
        for box.x in (one, made()):
            torch.testing.assert_close(compiled(q, q, q, score), hw.attention(q, q, q, score))


def test_a_dict_that_hides_attributes_is_no_proof():
    class Hides:
        __dict__ = property(lambda _: {})

    hides = Hides()
    hides.w = 1.5
    sees(lambda s, b, h, i, j: s * hides.w, lambda: setattr(hides, "w", 2.5))


def test_a_slot_below_a_property_is_seen():
    class Slot:
        __slots__ = ("w",)

    class Hides(Slot):
        w = property(lambda _: 7.0)

        def raw(self):
            return super().w

    one, write = Hides(), Slot.__dict__["w"].__set__
    write(one, 1.5)
    sees(lambda s, b, h, i, j: s * one.raw(), lambda: write(one, 2.5))


def test_attributes_of_numbers_of_numpy_are_seen():
    number = type("Number", (np.float64,), {"w": 1.5})(2.0)
    sees(lambda s, b, h, i, j: s * number.w, lambda: setattr(type(number), "w", 2.5))
    sees(lambda s, b, h, i, j: s * number.w, lambda: setattr(number, "w", 3.5))


def test_a_module_that_is_compiled_later_is_seen():
    class Twice(nn.Module):
        def forward(self, s, b, h, i, j):
            return s * 2

    twice = Twice()
    sees(twice, lambda: setattr(twice, "_compiled_call_impl", lambda s, b, h, i, j: s * 3))


def test_a_file_that_numpy_reads_is_seen(tmp_path):
    path = tmp_path / "number"
    np.array([1.5]).tofile(path)
    score = lambda s, b, h, i, j: s * float(np.fromfile(path)[0])
    sees(score, lambda: np.array([2.5]).tofile(path))


@pytest.mark.parametrize("name", "requires_grad grad_fn is_leaf is_cpu is_cuda is_meta".split())
def test_what_a_trace_does_not_know_of_a_value_is_refused(name):
    w = torch.ones(12, requires_grad=True)
    for score in (
        lambda s, b, h, i, j: s * 2 if getattr(s, name) else s,
        lambda s, b, h, i, j: s * 2 if getattr(w[i], name) else s,
        lambda s, b, h, i, j: s * 2 if getattr(w * 1, name) else s,
    ):
        with pytest.raises(ModError, match=f"asks a value that it computes for {name}"):
            graph(score)
    sees(lambda s, b, h, i, j: s * 2 if w.requires_grad else s, lambda: w.requires_grad_(False))
