"""From values and functions to graphs.

`describe` takes a value (or a bare function) apart into its structure, a string, and its
ingredients; `lower` turns the structure into a `Graph`, once; `captured_of` collects what a call
passes to it.
"""

import ast
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ModError
from ..types import Captured
from .base import Mod
from .capture import Path, leaves, resolve, shared
from .graph import DTYPE_NAMES, DTYPES, Graph, Input, parse
from .trace import trace
from .tracer import Tracer


class Parts(NamedTuple):
    """What a score or mask is made of. `structure` is text, the rest its ingredients in order."""

    structure: str
    functions: list[Callable]
    tensors: list[Tensor]
    ints: list[int]
    floats: list[float]


def describe(mod: Callable) -> Parts:
    """Take a value or a function apart."""
    structure, functions, captured = take_apart(mod)
    return Parts(structure, functions, *captured)


def take_apart(mod: Callable) -> tuple[str, list[Callable], Captured]:
    """Its structure, the functions in it, and the tensors and numbers of its values. Plain code
    that Dynamo can trace; what it reads is guarded at every call, so it reads little."""
    functions: list[Callable] = []
    captured = Captured([], [], [])
    return _structure(mod, functions, captured), functions, captured


def parts_of(mod: Callable) -> Parts:
    """`describe`, outside of `torch.compile`: a value, whose fields never change, is taken apart
    once. (The dtype of a tensor of it may: the structure tells what it was at first.)"""
    if not isinstance(mod, Mod):
        return Parts("f", [mod], [], [], [])
    found = mod.__dict__.get("parts")
    if found is None:
        found = mod.__dict__["parts"] = describe(mod)
    return found


# Written out once: `int | float` makes a new type wherever it is read, and this runs at every call.
_WHOLE, _REAL, _WORD = (int, torch.SymInt), (float, torch.SymFloat), (bool, str)


def _structure(item: Any, functions: list[Callable], captured: Captured) -> str:
    if isinstance(item, Mod):
        inner = [_structure(getattr(item, name), functions, captured) for name in item.fields]
        return type(item).__name__ + "(" + ",".join(inner) + ")"
    if type(item) is int:
        captured.ints.append(item)
        return "n"
    if isinstance(item, tuple):
        return "(" + ",".join([_structure(part, functions, captured) for part in item]) + ")"
    if isinstance(item, Tensor):
        captured.tensors.append(item)
        return "t:" + DTYPE_NAMES[item.dtype] + ":" + str(item.dim())
    if item is None or isinstance(item, _WORD):
        return repr(item)
    if isinstance(item, _WHOLE):
        captured.ints.append(item)  # type: ignore[arg-type]
        return "n"
    if isinstance(item, _REAL):
        captured.floats.append(item)  # type: ignore[arg-type]
        return "x"
    if type(item) is functools.partial and all(
        isinstance(x, Tensor | int | float | None) for x in (*item.args, *item.keywords.values())
    ):
        given = [_constant(x, captured) for x in item.args]
        given += [name + "=" + _constant(x, captured) for name, x in item.keywords.items()]
        return "partial(" + ",".join([_structure(item.func, functions, captured), *given]) + ")"
    functions.append(item)
    return "f"


def _constant(item: Any, captured: Captured) -> str:
    """An argument of a `functools.partial`: its numbers are the formula's, its tensors captured
    with their shape, which the function may read."""
    if not isinstance(item, Tensor):
        return "c:" + repr(item)
    captured.tensors.append(item)
    return "T:" + DTYPE_NAMES[item.dtype] + ":" + "x".join([str(size) for size in item.shape])


class Lowered(NamedTuple):
    """A traced score or mask: its graph's text, and where the functions' tensors are found."""

    text: str
    paths: tuple[tuple[int, Path], ...]  # (which function, path) of each tensor after the library's
    numbers: tuple[tuple[int, Path, Any], ...]  # captured numbers that are constants of the graph


_lowered: "OrderedDict[tuple, Lowered]" = OrderedDict()
_LOWERED_SIZE = 1024


def lower(kind: str, structure: str, dtype: str, *functions: Callable) -> Lowered:
    """The graph of a structure. Traced once for all values of its numbers and tensors."""
    if not functions:
        return _lower_library(kind, structure, dtype)
    found = [leaves(fn) for fn in functions]
    cacheable = all(f.cacheable for f in found)
    key = (kind, structure, dtype, shared(found), *(tuple(f.key) for f in found))
    if cacheable:
        try:
            lowered = _lowered.get(key)
        except TypeError:  # something unhashable in a closure
            cacheable, lowered = False, None
        if lowered is not None:
            _lowered.move_to_end(key)
            return lowered
    lowered = _lower(kind, structure, dtype, functions, found)
    if cacheable:
        _lowered[key] = lowered
        if len(_lowered) > _LOWERED_SIZE:
            _lowered.popitem(last=False)
    return lowered


@lru_cache(maxsize=1024)
def _lower_library(kind: str, structure: str, dtype: str) -> Lowered:
    return _lower(kind, structure, dtype, (), [])


def _lower(kind: str, structure: str, dtype: str, functions: tuple, found: list) -> Lowered:
    dummies: list[Tensor] = []
    mod = _rebuild(structure, None, functions, dummies)  # once for the list of dummies
    library = list(dummies)
    of_function = [(n, path, t) for n, f in enumerate(found) for path, t in f.tensors]
    known = library + [t for _, _, t in of_function]

    def with_numbers(tracer: Tracer) -> Callable:
        return _rebuild(structure, tracer, functions, library)

    bare = not isinstance(mod, Mod)
    graph, captured = trace(kind, mod, DTYPES[dtype], known, numbers=None if bare else with_numbers)
    # The library's tensors come first, used or not; then the functions' that the graph reads.
    order = list(library)
    paths = []
    used = [(i, t) for i, t in enumerate(captured) if graph.uses(f"t{i}")]
    for _, t in used:
        if not any(t is x for x in library):
            where = next(i for i, (_, _, x) in enumerate(of_function) if x is t)
            paths.append(of_function[where][:2])
            order.append(t)
    names = {f"t{i}": f"T{_index(order, t)}" for i, t in used}
    graph = _rename(graph, names, order)
    numbers = tuple((n, path, v) for n, f in enumerate(found) for path, v in f.numbers)
    return Lowered(graph.text, tuple(paths), numbers)


def _index(items: list[Tensor], item: Tensor) -> int:
    return next(n for n, x in enumerate(items) if x is item)


def _rename(graph: Graph, names: dict[str, str], order: list[Tensor]) -> Graph:
    nodes = tuple(
        dataclasses.replace(
            node,
            args=tuple(names.get(a, a).lower() if isinstance(a, str) else a for a in node.args),
        )
        for node in graph.nodes
    )
    scalars = tuple(i for i in graph.inputs if i.ndim is None)
    tensors = tuple(Input(f"t{n}", DTYPE_NAMES[t.dtype], t.dim()) for n, t in enumerate(order))
    return Graph(graph.kind, (*scalars, *tensors), nodes, graph.outputs)


def _rebuild(structure: str, tracer: Tracer | None, functions: tuple, dummies: list[Tensor]) -> Any:
    """A value from its structure, with symbols for numbers and empty tensors for captured ones.

    Without a tracer, numbers are 0 and the dummies are made and appended to `dummies`.
    """
    fns, made = iter(functions), iter(list(dummies))
    counts = {"n": 0, "x": 0}
    dtype = "f32"
    if tracer is not None:
        dtype = next((i.dtype for i in tracer.inputs if i.name == "score"), "f32")

    def ingredient(text: str) -> Any:
        if text == "f":
            return next(fns)
        if text in ("n", "x"):
            if tracer is None:
                return 0
            name = f"{text}{counts[text]}"
            counts[text] += 1
            return tracer.add_input(name, "i64" if text == "n" else dtype)
        if tracer is not None:
            return next(made)
        letter, name, size = text.split(":")
        shape = [1] * int(size) if letter == "t" else [int(n) for n in size.split("x") if n]
        dummies.append(torch.empty(shape, dtype=DTYPES[name]))
        return dummies[-1]

    return _assemble(structure, ingredient)


def restore(parts: Parts) -> Any:
    """The value that `describe` took apart, from the same ingredients or others in their place."""
    functions, tensors = iter(parts.functions), iter(parts.tensors)
    ints, floats = iter(parts.ints), iter(parts.floats)
    return _assemble(
        parts.structure,
        lambda text: next({"f": functions, "n": ints, "x": floats}.get(text, tensors)),
    )


def _assemble(text: str, ingredient: Callable[[str], Any]) -> Any:
    if text in ("f", "n", "x") or text.startswith(("t:", "T:")):
        return ingredient(text)
    if text.startswith("c:"):
        return ast.literal_eval(text[2:])
    name, bracket, rest = text.partition("(")
    if not bracket:
        return {"None": None, "True": True, "False": False}.get(text, text.strip("'"))
    parts = [("", x) if "=" not in x else x.split("=") for x in _split(rest[:-1])]
    names = [key for key, _ in parts]
    items = [_assemble(part, ingredient) for _, part in parts]
    if name == "partial":
        given = [x for key, x in zip(names, items, strict=True) if not key]
        return functools.partial(*given, **{k: x for k, x in zip(names, items, strict=True) if k})
    if not name:
        return tuple(items)
    if name not in Mod.kinds:
        raise ModError(f"there is no score or mask named {name!r} in this version of Headway")
    cls = Mod.kinds[name]
    mod = object.__new__(cls)
    for field, item in zip(cls.fields, items, strict=True):
        object.__setattr__(mod, field, item)
    return mod


def _split(text: str) -> list[str]:
    """Split at the commas that are not inside parentheses."""
    items, depth, start = [], 0, 0
    for n, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            items.append(text[start:n])
            start = n + 1
    return [*items, text[start:]] if text else []


def captured_of(functions: list[Callable], captured: Captured, lowered: Lowered) -> Captured:
    """Add the functions' tensors; plain code that Dynamo can trace (and guards the captured
    numbers)."""
    for n, path, number in lowered.numbers:
        now = resolve(functions[n], path)
        if now is not number and now != number and now == now:
            raise ModError(f"a number captured by a score or mask changed from {number} to {now}")
    tensors = list(captured.tensors)
    for n, path in lowered.paths:
        tensors.append(resolve(functions[n], path))
    return Captured(tensors, captured.ints, captured.floats)


def lower_mod(kind: str, mod: Callable, dtype: torch.dtype) -> tuple[Graph, Captured]:
    """The graph of a score or mask and what it captures, outside of `torch.compile`."""
    structure, functions, captured = take_apart(mod)
    lowered = lower(kind, structure, DTYPE_NAMES[dtype], *functions)
    return parse(lowered.text), captured_of(functions, captured, lowered)
