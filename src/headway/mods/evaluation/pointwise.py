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
from .derivative import SCORE_TANGENT
from .evaluate import evaluate

_SINGLE_THREAD = 1 << 15  # numbers that PyTorch gives to one thread


class Positions:
    """The index tensors b, h, q_idx, kv_idx of a tile (int64, broadcasting)."""

    def __init__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> None:
        self.values = {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx}


class Gathers:
    """A reader of captured tensors that clamps indices and records which were out of range."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        # (whether out of range, index, source line, dimension, shape of the tensor)
        self.outside: list[tuple[Tensor, Tensor, str, int, tuple[int, ...]]] = []
        self.indices: dict[int, tuple[Tensor | int, ...]] = {}

    def __call__(self, n: int, table: Tensor, indices: tuple[Tensor | int, ...]) -> Tensor:
        if not indices:
            return table
        indices = tuple([
            int(i) if isinstance(i, Tensor) and not i.dim() else i for i in indices
        ])  # fmt: skip
        if self.graph.kind != "joint":  # whose gathers are scattered to
            values = _take(table, indices)
            if values is not None:
                return values
        clamped: list[Tensor | int] = []
        for dim, index in enumerate(indices):
            size = table.shape[dim]
            if not isinstance(index, Tensor):
                if -size <= index < size:
                    clamped.append(index % size)
                    continue
                index = torch.tensor(index, device=table.device)
            callers_index = index
            low, high = map(int, index.aminmax()) if index.numel() else (0, 0)
            if low < 0:  # Python's meaning of a negative index
                index = torch.where(index < 0, index + size, index)
                low, high = map(int, index.aminmax())
            if low < 0 or high >= size:
                out_of_range = (index < 0) | (index >= size)
                self.outside.append(
                    (out_of_range, callers_index, self.graph.nodes[n].line, dim, tuple(table.shape))
                )
                index = index.clamp(0, max(size - 1, 0))
            clamped.append(index)
        self.indices[n] = tuple(clamped)
        if table.numel() == 0:  # every index is outside
            return table.new_zeros(_broadcast(clamped))
        return _read(table, clamped)

    def check(self, keep: Tensor) -> None:
        """Raise `CapturedIndexError` if a pair that is kept read out of range."""
        for out_of_range, index, line, dim, shape in self.outside:
            violations = out_of_range & keep
            if bool(violations.any()):
                example = int(index.expand_as(violations)[violations][0])
                raise CapturedIndexError(
                    f"a score or mask reads index {example} of dimension {dim} of a captured "
                    f"tensor of shape {shape}, at a pair that is not masked out; make the tensor "
                    f"cover every position, or clamp the index\n    {line}",
                    line,
                )


def _take(table: Tensor, indices: tuple[Tensor | int, ...]) -> Tensor | None:
    """Return a few numbers along the last of some dimensions, which `torch.take` checks itself;
    None where it cannot, or where an index is out of range."""
    *places, last = indices
    if table.device.type != "cpu" or not all(isinstance(place, int) for place in places):
        return None
    try:
        for place in places:
            table = table[place]
        if isinstance(last, int):
            return table[last]
        if last.numel() < _SINGLE_THREAD and last.dtype == torch.int64:
            return torch.take(table, last)
    except IndexError:
        pass
    return None


def _read(table: Tensor, indices: list[Tensor | int]) -> Tensor:
    shape = _broadcast(indices)
    if table.device.type == "cpu" and math.prod(shape) < _SINGLE_THREAD and table.is_contiguous():
        # PyTorch's own indexing starts every thread for a few thousand numbers.
        offset: Tensor | int = 0
        for index, stride in zip(indices, table.stride(), strict=True):
            if not isinstance(index, int) or index:
                term = index if stride == 1 else index * stride
                offset = term if type(offset) is int and offset == 0 else offset + term
        if isinstance(offset, int):
            return table.view(-1)[offset]
        return torch.take(table, offset.long())
    return table[tuple(indices)]


def _broadcast(indices: list[Tensor | int]) -> tuple[int, ...]:
    """Return the shape that indices broadcast to. PyTorch's own takes as long as a small matmul."""
    shapes = [index.shape for index in indices if isinstance(index, Tensor)]
    if len(shapes) == 1:
        return tuple(shapes[0])
    shape = [1] * max(map(len, shapes), default=0)
    for index_shape in shapes:
        for n in range(-len(index_shape), 0):
            if index_shape[n] != 1:
                shape[n] = index_shape[n]
    return tuple(shape)


def bind(graph: Graph, captured: Captured | dict) -> dict:
    """Return the graph's captured inputs by name."""
    if isinstance(captured, dict):
        return captured
    by_name: dict = {}
    for letter, items in zip("tnx", captured, strict=True):
        for n, item in enumerate(items):
            by_name[f"{letter}{n}"] = item
    values: dict = {}
    for i in graph.inputs:
        if i.name in by_name:
            value = by_name[i.name]
            if i.ndim is None:
                value = torch.full((), value, dtype=DTYPES[i.dtype], device="cpu")
            values[i.name] = value
    return values


def mask_at(graph: Graph, captured: Captured | dict, positions: Positions) -> Tensor:
    """Return the mask at some pairs: bool, of a shape that broadcasts to that of the positions.

    `captured` may be the result of `bind`, which saves time over many calls.
    """
    gathers = Gathers(graph)
    (keep,) = evaluate(graph, {**bind(graph, captured), **positions.values}, gathers)
    keep = keep if isinstance(keep, Tensor) else positions.values["q_idx"].new_full((), keep).bool()
    if gathers.outside:
        gathers.check(keep)
    return keep


def score_at(
    graph: Graph,
    captured: Captured | dict,
    positions: Positions,
    score: Tensor,
    keep: Tensor | None,
    scratch: Callable[[torch.dtype], Tensor] | None = None,
    overwrite: bool = False,
    score_tangent: Tensor | None = None,
) -> tuple[list, Gathers]:
    """Return the outputs of a score's graph, or joint graph, at some pairs, and its gathers.
    `score_tangent` is the tangent of `score`, for a graph of `with_tangent`.

    Where `keep` is False, indices out of range are clamped, as in `table[q_idx - kv_idx]` under a
    causal mask. Elsewhere they raise `CapturedIndexError`. `keep` None means all pairs.
    """
    gathers = Gathers(graph)
    values = {**bind(graph, captured), **positions.values, "score": score}
    if score_tangent is not None:
        values[SCORE_TANGENT] = score_tangent
    outputs = evaluate(graph, values, gathers, scratch, overwrite)
    if gathers.outside:
        gathers.check(
            torch.ones((), dtype=torch.bool, device=score.device) if keep is None else keep
        )
    return outputs, gathers
