"""Evaluate scores and masks with torch, on index tensors that broadcast.

The CPU backend, the reference and the builder of block masks call these on tiles; the index
tensors may have any shapes that broadcast, such as `h` as `(hk, g, 1, 1)` beside `q_idx` `(i, 1)`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import CapturedIndexError
from ...types import Captured
from ..graph import DTYPES, Graph
from .evaluate import evaluate

_FEW = 1 << 15  # numbers that PyTorch gives to one thread


class Positions:
    """The index tensors b, h, q_idx, kv_idx of a tile (int64, broadcasting)."""

    def __init__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> None:
        self.values = {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx}


class Gathers:
    """Reads captured tensors, clamping indices into range and remembering which were outside."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        # Where an index was outside; the index, the line, the dimension, the tensor's shape.
        self.outside: list[tuple[Tensor, Tensor, str, int, tuple[int, ...]]] = []
        self.indices: dict[int, tuple[Tensor | int, ...]] = {}

    def __call__(self, n: int, table: Tensor, indices: tuple[Tensor | int, ...]) -> Tensor:
        if not indices:
            return table
        inside: list[Tensor | int] = []
        for dim, index in enumerate(indices):
            size = table.shape[dim]
            if not isinstance(index, Tensor):
                if -size <= index < size:
                    inside.append(index % size)
                    continue
                index = torch.tensor(index, device=table.device)
            low, high = index.aminmax() if index.numel() else (index.new_zeros(()),) * 2
            if int(low) < 0:  # Python's meaning of a negative index
                index = torch.where(index < 0, index + size, index)
                low, high = index.aminmax()
            if int(low) < 0 or int(high) >= size:
                outside = (index < 0) | (index >= size)
                self.outside.append(
                    (outside, index, self.graph.nodes[n].line, dim, tuple(table.shape))
                )
                index = index.clamp(0, max(size - 1, 0))
            inside.append(index)
        self.indices[n] = tuple(inside)
        if table.numel() == 0:  # every index is outside
            return table.new_zeros(_broadcast(inside))
        return _read(table, inside)

    def check(self, kept: Tensor) -> None:
        """Raise if a pair that is kept read out of range."""
        for outside, index, line, dim, shape in self.outside:
            bad = outside & kept
            if bool(bad.any()):
                example = int(index.expand_as(bad)[bad][0])
                raise CapturedIndexError(
                    f"a score or mask reads index {example} of dimension {dim} of a captured "
                    f"tensor of shape {shape}, at a pair that is kept; make the tensor cover every "
                    f"position, or clamp the index\n    {line}",
                    line,
                )


def _read(table: Tensor, indices: list[Tensor | int]) -> Tensor:
    shape = _broadcast(indices)
    if table.device.type == "cpu" and math.prod(shape) < _FEW and table.is_contiguous():
        # PyTorch's own indexing wakes every thread for a few thousand numbers.
        flat: Tensor | int = 0
        for index, step in zip(indices, table.stride(), strict=True):
            if not isinstance(index, int) or index:
                part = index if step == 1 else index * step
                flat = part if type(flat) is int and flat == 0 else flat + part
        if isinstance(flat, int):
            return table.view(-1)[flat]
        return table.view(-1).index_select(0, flat.expand(shape).reshape(-1)).view(shape)
    return table[tuple(indices)]


def _broadcast(indices: list[Tensor | int]) -> tuple[int, ...]:
    """The shape of all of them. (PyTorch's own takes as long as a small product.)"""
    shapes = [index.shape for index in indices if isinstance(index, Tensor)]
    if len(shapes) == 1:
        return tuple(shapes[0])
    shape = [1] * max(map(len, shapes), default=0)
    for own in shapes:
        for n in range(-len(own), 0):
            if own[n] != 1:
                shape[n] = own[n]
    return tuple(shape)


def bind(graph: Graph, captured: Captured | dict) -> dict:
    """The graph's captured inputs by name."""
    if isinstance(captured, dict):
        return captured
    given: dict = {}
    for letter, items in zip("tnx", captured, strict=True):
        for n, item in enumerate(items):
            given[f"{letter}{n}"] = item
    values: dict = {}
    for i in graph.inputs:
        if i.name in given:
            value = given[i.name]
            if i.ndim is None:
                value = torch.full((), value, dtype=DTYPES[i.dtype], device="cpu")
            values[i.name] = value
    return values


def mask_at(graph: Graph, captured: Captured | dict, at: Positions) -> Tensor:
    """The mask at some pairs, bool, of the shape that the positions broadcast to (or less).

    Who asks often binds once: `captured` may be the result of `bind`.
    """
    gathers = Gathers(graph)
    (kept,) = evaluate(graph, {**bind(graph, captured), **at.values}, gathers)
    kept = kept if isinstance(kept, Tensor) else at.values["q_idx"].new_full((), kept).bool()
    if gathers.outside:
        gathers.check(kept)
    return kept


def score_at(
    graph: Graph,
    captured: Captured | dict,
    at: Positions,
    score: Tensor,
    kept: Tensor | None,
    scratch: Callable[[torch.dtype], Tensor] | None = None,
    overwrite: bool = False,
) -> tuple[list, Gathers]:
    """The outputs of a score's graph (or of its joint graph) at some pairs, and its gathers.

    Indices out of range are clamped where `kept` is False (legal: `table[q_idx - kv_idx]` under a
    causal mask) and refused elsewhere. `kept` None means all.
    """
    gathers = Gathers(graph)
    values = {**bind(graph, captured), **at.values, "score": score}
    outputs = evaluate(graph, values, gathers, scratch, overwrite)
    if gathers.outside:
        gathers.check(
            torch.ones((), dtype=torch.bool, device=score.device) if kept is None else kept
        )
    return outputs, gathers
