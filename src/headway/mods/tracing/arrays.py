"""Tensors of symbols: an `Array` says which value of the graph each element of a tensor is.

A row of a captured tensor, a view of it, a short vector of values: all are a shape and a function
from an index to a value. Nothing is unrolled before a reduction asks for all elements. An index
may hold numbers and values of the graph.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..graph import Arg

UNROLLED = 128  # numbers that a function may reduce per pair; kernels take fewer

Index = tuple[Arg, ...]
Emit = Callable[..., Arg]  # an op, its arguments and its dtype -> a value of the graph


@dataclass(frozen=True)
class Array:
    """The elements of a tensor of symbols.

    - `at`: returns the value at an index.
    - `tables`: numbers of the captured tensors whose shapes the array's shape follows from.
    - `captured`: it is a captured tensor, whose reads check their indices where they run.
    """

    shape: tuple[int, ...]
    at: Callable[[Index], Arg]
    tables: frozenset[int] = frozenset()
    captured: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def indices(self) -> Iterator[tuple[int, ...]]:
        """Yield the index of every element, the last dimension first."""
        return product(*map(range, self.shape))


Value = Arg | Array  # one number, or a tensor of them


class IndexRefused(Exception):
    """An index that cannot be followed; the message is a verb phrase."""


def tables_of(*values: Any) -> frozenset[int]:
    """Return the captured tensors whose shapes some values depend on."""
    return frozenset().union(*(v.tables for v in values if isinstance(v, Array)))


def broadcast(values: Iterable[Value]) -> tuple[tuple[int, ...], Callable[[Value, Index], Arg]]:
    """Return the shape that values broadcast to, and the function from an index of it to an element
    of one of them."""
    arrays = [v for v in values if isinstance(v, Array)]
    shape = tuple(torch.broadcast_shapes(*(a.shape for a in arrays)))
    # Dimensions from the end in which an array of full length checks an index that is a value.
    checked = {d for a in arrays if a.tables for d, n in enumerate(a.shape[::-1], 1)
               if n == shape[-d]}  # fmt: skip

    def element(value: Value, index: Index) -> Arg:
        if not isinstance(value, Array):
            return value
        place: list[Arg] = []
        for d in range(len(value.shape), 0, -1):
            repeated = value.shape[-d] != shape[-d]
            if repeated and isinstance(index[-d], str) and d not in checked:
                raise IndexRefused("indexes a dimension of length 1 with a value")
            place.append(0 if repeated else index[-d])
        return value.at(tuple(place))

    return shape, element


def elementwise(fn: Callable[..., Arg], *values: Value) -> Value:
    """Return the array whose elements are `fn` of elements that broadcast."""
    if not any(isinstance(v, Array) for v in values):
        return fn(*values)
    shape, element = broadcast(values)
    by_index: dict[Index, Arg] = {}

    def at(index: Index) -> Arg:
        if index not in by_index:
            by_index[index] = fn(*(element(v, index) for v in values))
        return by_index[index]

    array = Array(shape, at, tables_of(*values))
    if array.size <= UNROLLED:  # now, in the user's order
        for index in array.indices():
            at(index)
    return array


def constants(tensor: Tensor) -> Array:
    """Return the array of a tensor that has its numbers."""
    numbers: Any = tensor.tolist()

    def at(index: Index) -> Arg:
        if any(isinstance(i, str) for i in index):
            raise IndexRefused("indexes a tensor that it makes itself")
        place = numbers
        for i in index:
            place = place[i]
        return place

    return Array(tuple(tensor.shape), at)


# -- views ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceAxis:
    """One dimension of a source, as a function of a view's index: start + sum of step * index."""

    start: Arg
    steps: tuple[tuple[int, int], ...] = ()  # (step, dimension of the view)


def affine(source: Array, shape: tuple[int, ...], axes: list[SourceAxis], emit: Emit) -> Array:
    """Return a view, of which every dimension of the source is an affine function."""

    used = {d for axis in axes for _, d in axis.steps}

    def at(index: Index) -> Arg:
        place: list[Arg] = []
        outside: Arg = False
        for d in range(len(shape)):
            if d not in used:  # of length 1, or repeated
                outside = _either(outside, _wrapped(index[d], shape[d], emit)[1], emit)
        for axis, size in zip(axes, source.shape, strict=True):
            if not axis.steps or (
                axis == SourceAxis(0, ((1, axis.steps[0][1]),))
                and (shape[axis.steps[0][1]] == size)
            ):  # the index itself, which `gather` checks
                place.append(index[axis.steps[0][1]] if axis.steps else axis.start)
                continue
            position: Arg = axis.start
            for step, d in axis.steps:
                wrapped, beyond = _wrapped(index[d], shape[d], emit)
                outside = _either(outside, beyond, emit)
                position = _sum(position, _product(wrapped, step, emit), emit)
            place.append(position)
        return source.at(_marked(place, outside, source.shape, emit))

    return Array(shape, at, source.tables)


def strided(source: Array, view: Tensor, emit: Emit) -> Array:
    """Return a view of a source, as strides of the source's elements one after the other.

    - `view`: a tensor without data, the same view of a contiguous tensor.
    """
    shape = tuple(view.shape)
    axes = _axes(source.shape, view)
    if axes is not None:
        return affine(source, shape, axes, emit)

    def at(index: Index) -> Arg:
        flat: Any = view.storage_offset()
        outside: Arg = False
        for i, n, stride in zip(index, shape, view.stride(), strict=True):
            wrapped, beyond = _wrapped(i, n, emit)
            outside = _either(outside, beyond, emit)
            flat = _sum(flat, _product(wrapped, stride, emit), emit)
        place: list[Arg] = []
        for k, size in enumerate(source.shape):
            row = math.prod(source.shape[k + 1 :])
            position = _divided("floordiv", flat, row, emit)
            place.append(_divided("mod", position, size, emit) if k else position)
        return source.at(_marked(place, outside, source.shape, emit))

    return Array(shape, at, source.tables)


def _axes(source: tuple[int, ...], view: Tensor) -> list[SourceAxis] | None:
    """Return a view's axes, if no index of it carries over into another dimension of its source."""
    rows = [math.prod(source[k + 1 :]) for k in range(len(source))]
    starts, offset = [], view.storage_offset()
    for row in rows:
        starts.append(offset // row if row else 0)
        offset -= starts[-1] * row
    steps: list[list[tuple[int, int]]] = [[] for _ in source]
    most = list(starts)
    for d, (n, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if n == 1 or stride == 0:
            continue
        k = next((k for k, row in enumerate(rows) if source[k] > 1 and row <= stride), None)
        if k is None or stride % rows[k]:
            return None
        steps[k].append((stride // rows[k], d))
        most[k] += stride // rows[k] * (n - 1)
    if any(last >= n for last, n in zip(most, source, strict=True)):
        return None
    return [SourceAxis(start, tuple(s)) for start, s in zip(starts, steps, strict=True)]


def _wrapped(index: Arg, size: int, emit: Emit) -> tuple[Arg, Arg]:
    """Return an index that counts from the start, and whether it is outside of its dimension."""
    if not isinstance(index, str):
        if not -size <= index < size:
            raise IndexRefused(f"indexes a dimension of length {size} with {index}")
        return index % size, False
    negative = emit("lt", (index, 0), "bool")
    index = emit("where", (negative, emit("add", (index, size), "i64"), index), "i64")
    beyond = (emit("lt", (index, 0), "bool"), emit("ge", (index, size), "bool"))
    return index, emit("or", beyond, "bool")


def _marked(place: list[Arg], outside: Arg, shape: tuple[int, ...], emit: Emit) -> Index:
    """Return an index of the source, outside of it where that of the view is."""
    if outside is not False and place:
        place = [emit("where", (outside, shape[0], place[0]), "i64"), *place[1:]]
    return tuple(place)


def _either(a: Arg, b: Arg, emit: Emit) -> Arg:
    return b if a is False else a if b is False else emit("or", (a, b), "bool")


def _sum(a: Arg, b: Arg, emit: Emit) -> Arg:
    if isinstance(a, str) or isinstance(b, str):
        return emit("add", (a, b), "i64")
    return a + b


def _product(a: Arg, step: int, emit: Emit) -> Arg:
    return emit("mul", (a, step), "i64") if isinstance(a, str) else a * step


def _divided(op: str, a: Arg, by: int, emit: Emit) -> Arg:
    if isinstance(a, str):
        return a if by == 1 and op == "floordiv" else emit(op, (a, by), "i64")
    return a // by if op == "floordiv" else a % by


# -- indexing -------------------------------------------------------------------------------------


def indexed(source: Array, items: list[Any], emit: Emit) -> Array:
    """Return `source[items]`, of numbers, values, slices, None and arrays of integers.

    As in PyTorch, a number or a value takes its dimension away first; arrays broadcast, and their
    dimensions stand where the first array stood if they are neighbours, else first.
    """
    items = [*items, *[slice(None)] * (len(source.shape) - sum(i is not None for i in items))]
    shape: list[int] = []
    axes: list[SourceAxis] = []
    arrays: dict[int, Array] = {}  # dimension of the view -> array
    for item in items:
        if item is None:
            shape.append(1)
            continue
        size = source.shape[len(axes)]
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            axes.append(SourceAxis(start, ((step, len(shape)),)))
            shape.append(len(range(start, stop, step)))
        elif isinstance(item, Array):
            arrays[len(shape)] = item
            axes.append(SourceAxis(0, ((1, len(shape)),)))
            shape.append(size)
        else:
            if not isinstance(item, str) and not source.captured:
                item, _ = _wrapped(item, size, emit)
            axes.append(SourceAxis(item))
    view = affine(source, tuple(shape), axes, emit)
    if not arrays:
        return view
    common, element = broadcast(arrays.values())
    dims = sorted(arrays)
    first = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    rest = [n for d, n in enumerate(shape) if d not in arrays]
    result = (*rest[:first], *common, *rest[first:])

    def at(index: Index) -> Arg:
        middle = index[first : first + len(common)]
        others = iter((*index[:first], *index[first + len(common) :]))
        place = (
            element(arrays[d], middle) if d in arrays else next(others) for d in range(len(shape))
        )
        return view.at(tuple(place))

    return Array(result, at, tables_of(view, *arrays.values()))


def reduced(array: Array, dims: list[int], keep: bool, fold: Callable[[list[Arg]], Arg]) -> Value:
    """Return the array that a reduction of some dimensions leaves."""
    shape = tuple(1 if d in dims else n for d, n in enumerate(array.shape) if keep or d not in dims)
    ranges = [range(array.shape[d]) for d in dims]

    def at(index: Index) -> Arg:
        rest, numbers = iter(index), []
        kept = [next(rest) if keep or d not in dims else 0 for d in range(len(array.shape))]
        for combination in product(*ranges):
            place = list(kept)
            for d, i in zip(dims, combination, strict=True):
                place[d] = i
            numbers.append(array.at(tuple(place)))
        return fold(numbers)

    if not shape:
        return at(())
    return elementwise(lambda value: value, Array(shape, at, array.tables))
