"""Compute the tiles of masks under which every query keeps one interval of keys, without a search.

Causal masks, windows, documents and chunks are such masks, and so is what `&` makes of them: the
distance q_idx - kv_idx lies in a range, and both positions lie in one segment of the sequence (a
document or a chunk; its keys may have other positions than its queries). The queries of a tile that
lie in one segment then keep one interval of keys together, and each pair is kept within another
one. So the cost follows the tile rows and the segments: a million tokens in 256 causal documents
take a quarter of the time that the search from coarse to fine (`quadtree.py`) takes for the same
tiles.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..mods.bounds import interval
from ..mods.evaluation.evaluate import evaluate
from ..mods.evaluation.pointwise import Gathers
from ..mods.graph import FLOATS, Arg, Graph
from .axis_bounds import Axis, Groups, known_sizes, values_along
from .runs import Runs
from .tiles import Tiles

Linear = tuple[int, int, int]  # of q_idx, of kv_idx, and a constant
_POSITIONS = 1 << 15  # evaluated together
_MOST_SEGMENTS = 8  # of a tile row, on the average: with more the search is faster
_COMPARISONS = {"lt": (-1, 0), "le": (0, 0), "gt": (0, 1), "ge": (0, 0), "eq": (0, 0)}


class _Segments(NamedTuple):
    """Segments, ascending within a group, each with the indices of its queries and of its keys."""

    group: np.ndarray
    q_start: np.ndarray
    q_stop: np.ndarray
    kv_start: np.ndarray
    kv_stop: np.ndarray

    def transposed(self) -> "_Segments":
        """Return the segments with keys for queries."""
        return _Segments(self.group, *self[3:], *self[1:3])


class _Along(NamedTuple):
    """Segments along one axis, ascending within a group, with their values (by name)."""

    group: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    values: list[np.ndarray]


def interval_tiles(
    graph: Graph, values: dict, groups: Groups, q: Axis, kv: Axis, device: torch.device
) -> Tiles | None:
    """Return the tiles of a mask of this kind; None for other masks.

    - `values`: the captured values, by name.
    """
    if q.positions is not None or kv.positions is not None:
        return None
    terms = _Terms(graph, values, groups, q, kv)
    if not terms.read(graph.outputs[0]):
        return None
    segments = _segments(terms, groups, q, kv, device)
    if segments is None:
        return None
    shift = kv.start - q.start  # from distances of positions to distances of indices
    longest = q.length + kv.length + 1
    low, high = (min(max(x + shift, -longest), longest) for x in (terms.low, terms.high))
    rows = _runs(segments, groups.count, (q, kv), (low, high), device)
    cols = _runs(segments.transposed(), groups.count, (kv, q), (-high, -low), device)
    return Tiles.of_runs(*rows, *cols)


class _Terms:
    """The terms of a mask that is an "and" of comparisons.

    - `low`, `high`: what they leave of q_idx - kv_idx.
    - `same`: values of a query, and those of its key that have to equal them, by name.
    - `alike`: a query and a key at the same position have the same of these values.
    """

    def __init__(self, graph: Graph, values: dict, groups: Groups, q: Axis, kv: Axis) -> None:
        self.graph, self.values = graph, values
        parts = self.parts = interval.split(graph)
        numbers = evaluate(interval.subgraph(graph, parts.numbers), values, Gathers(graph))
        self.numbers = dict(zip(parts.numbers, numbers, strict=True))
        self.in_range = interval.nodes_in_range(graph, known_sizes(values, groups, q, kv))
        self.low, self.high = -(1 << 62), 1 << 62
        self.same: list[tuple[str, str]] = []
        self.alike = True

    def read(self, name: Arg) -> bool:
        """Add the terms of a boolean value; return False where it has others."""
        if not isinstance(name, str) or name[0] != "%":
            return False
        node = self.graph.nodes[int(name[1:])]
        if node.op == "and":
            return all(map(self.read, node.args))
        if node.op not in _COMPARISONS:
            return False
        left, right = node.args
        if isinstance(left, str) and isinstance(right, str) and node.op == "eq":
            row, column = (left, right) if left in self.parts.rows else (right, left)
            if self._are_integers(row, column):
                self.same.append((row, column))
                of_query = interval.subgraph(self.graph, (row,), "q_idx")
                self.alike &= of_query == interval.subgraph(self.graph, (column,), "kv_idx")
                return True
        return self._bound_distance(node.op, left, right)

    def _are_integers(self, row: str, column: str) -> bool:
        """Return whether these are an integer of the query and one of the key."""
        return (
            row in self.parts.rows
            and column in self.parts.cols
            and row[0] == column[0] == "%"
            and all(self.graph.nodes[int(x[1:])].dtype not in FLOATS for x in (row, column))
        )

    def _bound_distance(self, op: str, left: Arg, right: Arg) -> bool:
        for a, b, flipped in ((left, right, False), (right, left, True)):
            magnitude = self._absolute(a)
            if magnitude is not None and op in (("gt", "ge") if flipped else ("lt", "le")):
                # |x| < n: both x < n and -x < n.
                n = self._linear(b)
                of_q, of_kv, constant = magnitude
                negative = -of_q, -of_kv, -constant
                strict = "lt" if op in ("lt", "gt") else "le"
                return n is not None and all(
                    self._compare(strict, x, n) for x in (magnitude, negative)
                )
        a, b = self._linear(left), self._linear(right)
        return a is not None and b is not None and self._compare(op, a, b)

    def _compare(self, op: str, left: Linear, right: Linear) -> bool:
        """Take in `left op right`, of which the difference is a multiple of the distance."""
        of_q, of_kv, constant = (a - b for a, b in zip(left, right, strict=True))
        if (of_q, of_kv) not in ((1, -1), (-1, 1)):
            return False
        below, above = op in ("lt", "le", "eq"), op in ("gt", "ge", "eq")
        most, least = (-constant + x for x in _COMPARISONS[op])
        if of_q < 0:
            below, above, most, least = above, below, -least, -most
        self.high = min(self.high, most) if below else self.high
        self.low = max(self.low, least) if above else self.low
        return True

    def _absolute(self, name: Arg) -> Linear | None:
        """Return what an absolute value is of."""
        if not isinstance(name, str) or name[0] != "%" or int(name[1:]) not in self.in_range:
            return None
        node = self.graph.nodes[int(name[1:])]
        return self._linear(node.args[0]) if node.op == "abs" else None

    def _linear(self, name: Arg) -> Linear | None:
        """Return a sum of positions and a number; None for another value, or one that may wrap."""
        if not isinstance(name, str):
            return (0, 0, name) if type(name) is int else None
        if name in self.numbers:
            number = self.numbers[name]
            number = number.item() if isinstance(number, Tensor) else number
            return (0, 0, number) if type(number) is int else None
        if name in ("q_idx", "kv_idx"):
            return (1, 0, 0) if name == "q_idx" else (0, 1, 0)
        if name[0] != "%" or int(name[1:]) not in self.in_range:
            return None
        node = self.graph.nodes[int(name[1:])]
        if node.op not in ("add", "sub", "neg") or node.dtype != "i64":
            return None
        operands = [self._linear(arg) for arg in node.args]
        if None in operands:
            return None
        a, b = [(0, 0, 0), *operands][-2:]
        sign = 1 if node.op == "add" else -1
        return tuple(x + sign * y for x, y in zip(a, b, strict=True))  # type: ignore[union-attr, return-value]


def _segments(
    terms: _Terms, groups: Groups, q: Axis, kv: Axis, device: torch.device
) -> _Segments | None:
    """Return the segments in which all values are the same. None where there are too many, where a
    value comes back or is read past the end of its tensor, or where keys are in another order."""
    if not terms.same:
        group = np.arange(groups.count)
        zeros = np.zeros_like(group)
        return _Segments(group, zeros, zeros + q.length, zeros, zeros + kv.length)
    most = _MOST_SEGMENTS * groups.count * max(q.boxes(0), kv.boxes(0))
    rows, columns = zip(*terms.same, strict=True)
    queries = _segments_along(terms, rows, groups, q, device, most)
    if queries is None:
        return None
    if terms.alike and (q.start, q.length) == (kv.start, kv.length):
        group, start, stop, _ = queries
        return _Segments(group, start, stop, start, stop)
    keys = _segments_along(terms, columns, groups, kv, device, most)
    return None if keys is None else _joined(queries, keys)


def _segments_along(
    terms: _Terms, names: tuple[str, ...], groups: Groups, axis: Axis, device: torch.device,
    most: int,
) -> _Along | None:  # fmt: skip
    """Return the segments of an axis. None where there are more than `most`, and so on."""
    part, length = interval.subgraph(terms.graph, names, axis.name), axis.length
    # On the CPU so few at a time that PyTorch uses one thread, and that they stay in its cache.
    step = length if device.type != "cpu" else max(1, _POSITIONS // groups.count)
    chunks: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in part.outputs]
    for begin in range(0, length, step):
        first, stop = max(0, begin - 1), min(begin + step, length)
        results, outside = values_along(axis, part, terms.values, groups, device, first, stop)
        if outside:
            return None
        for result, changes in zip(results, chunks, strict=True):
            value = torch.as_tensor(result, device=device).expand(groups.b, groups.h, stop - first)
            value = value.reshape(groups.count, stop - first).cpu().numpy()
            if not begin:
                changes.append((np.arange(groups.count) * length, value[:, 0]))
            changed = np.flatnonzero(value[:, 1:] != value[:, :-1])
            group, before = np.divmod(changed, max(1, stop - first - 1))
            changes.append((group * length + first + before + 1, value[group, before + 1]))
            if (most := most - len(group)) < 0:
                return None
    per_value = []
    for changes in chunks:
        start, value = (np.concatenate(x) for x in zip(*changes, strict=True))
        if _comes_back(value, start // length):
            return None
        order = np.argsort(start)  # chunks of several groups are not in the order of groups
        per_value.append((start[order], value[order]))
    start = np.unique(np.concatenate([starts for starts, _ in per_value]))
    values = [value[starts.searchsorted(start, "right") - 1] for starts, value in per_value]
    group, start = np.divmod(start, length)
    stop = np.append(start[1:], length)
    stop[stop == 0] = length  # where the next group begins
    return _Along(group, start, stop, values)


def _joined(queries: _Along, keys: _Along) -> _Segments | None:
    """Return the segments of queries and of keys that have the same values. None where those of
    keys are not in the order of those of queries."""
    sides = zip((queries.group, *queries.values), (keys.group, *keys.values), strict=True)
    columns = [np.concatenate(side).astype(np.int64) for side in sides]
    _, number = np.unique(np.stack(columns, 1), axis=0, return_inverse=True)
    of_query, of_key = np.split(number.reshape(-1), [len(queries.group)])
    place = np.full(len(number), -1)
    place[of_key] = np.arange(len(of_key))
    place = place[of_query]
    live = place >= 0
    place = place[live]
    if (place[1:] < place[:-1]).any():
        return None
    group, start, stop = (x[live] for x in queries[:3])
    return _Segments(group, start, stop, keys.start[place], keys.stop[place])


def _comes_back(value: np.ndarray, group: np.ndarray) -> bool:
    """Return whether two segments of a group have the same value."""
    order = np.lexsort((value, group))
    value, group = value[order], group[order]
    return bool(((value[1:] == value[:-1]) & (group[1:] == group[:-1])).any())


def _runs(
    segments: _Segments, groups: int, axes: tuple[Axis, Axis], distances: tuple[int, int],
    device: torch.device,
) -> tuple[Runs, Runs]:  # fmt: skip
    """Return the runs of full and of partial tiles, along the tile rows of the first axis.

    - `distances`: the least and the greatest distance, row's index minus column's, that is kept.
    """
    (rows, height), (columns, width) = ((axis.tile, axis.boxes(0)) for axis in axes)
    low, high = distances
    length, row_length = axes[1].length, axes[0].length
    group, start, stop, first, end = segments
    # The rows of a segment that keep some column of it: row i keeps i - high up to i - low.
    start, stop = np.maximum(start, first + low), np.minimum(stop, end + high)
    live = (stop > start) & (end > first) & (low <= high)
    group, start, stop, first, end = (x[live] for x in (group, start, stop, first, end))
    # Cut them where tile rows end.
    first_row, count = start // rows, -(-stop // rows) - start // rows
    part = np.repeat(np.arange(len(count)), count)
    row = np.arange(len(part)) + np.repeat(first_row - (count.cumsum() - count), count)
    top = np.maximum(start[part], row * rows)
    bottom = np.minimum(stop[part], (row + 1) * rows) - 1
    base = (group[part] * height + row) * (width + 1)
    first, end = first[part], end[part]
    # Live columns: what any row keeps. Both ends ascend within a tile row.
    key = base + np.maximum(first, top - high) // columns
    key_stop = base + np.minimum(end - 1, bottom - low) // columns + 1
    begins = np.append(True, key[1:] > key_stop[:-1])[: len(key)]
    ends = np.append(key[1:] > key_stop[:-1], True)[: len(key)]
    key, key_stop = key[begins], key_stop[ends]
    # Full ones: what every row keeps, where the segment has the whole tile row.
    whole = bottom - top + 1 == np.minimum(rows, row_length - row * rows)
    full_first = np.maximum(first, bottom - high)
    full_end = np.minimum(end, top - low + 1)
    full_stop = np.where(full_end == length, width, full_end // columns)
    full = base + -(-full_first // columns), base + full_stop
    whole &= full[1] > full[0]
    full_key, full_stop = full[0][whole], full[1][whole]
    # Partial ones: a run of live tiles before and behind the full ones that it holds.
    holder = np.searchsorted(key, full_key, side="right") - 1
    behind = key_stop[holder]
    key_stop = key_stop.copy()
    key_stop[holder] = full_key
    partial_key = np.concatenate([key, full_stop])
    partial_stop = np.concatenate([key_stop, behind])
    order = np.argsort(partial_key, kind="stable")
    partial_key, partial_stop = partial_key[order], partial_stop[order]
    some = partial_stop > partial_key
    return (
        _of_keys(full_key, full_stop, groups * height, width, device),
        _of_keys(partial_key[some], partial_stop[some], groups * height, width, device),
    )


def _of_keys(
    key: np.ndarray, stop: np.ndarray, rows: int, width: int, device: torch.device
) -> Runs:
    """Return the runs of ascending keys (`runs.py`)."""
    row, start = np.divmod(key, width + 1)
    offsets = np.append(0, np.bincount(row, minlength=rows).cumsum())
    arrays = offsets, start, stop - key
    return Runs(*[torch.from_numpy(x.astype(np.int32)).to(device) for x in arrays])
