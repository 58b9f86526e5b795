"""Evaluate mask and score at the pairs of few rows with a block of keys: once for all layers of a
model that ask the same at a step."""

import torch
from torch import Tensor

from ...caches import LRUCache
from ...mods.evaluation.pointwise import Positions, mask_at, score_at
from ...mods.graph import Graph
from ...types import Spec, acc_dtype
from ..base import Call, graphs, split
from ..cache_rows import CacheRow
from .decode_block import KeyBlock
from .key_ranges import KeyRange

_CACHED_PAIRS = 1 << 16  # of a block whose mask and score are cached
_CACHED_CAPTURES = 1 << 12  # numbers that these capture: comparing more takes longer

# Results of `_evaluate`: all layers of a model ask the same at a step.
_evaluations: LRUCache[tuple[KeyBlock, Tensor | None, Tensor | None]] = LRUCache(16)


class RowBatch:
    """Rows that are computed together: neighbours in q and in the cache."""

    def __init__(self, rows: list[CacheRow], row_ranges: list[list[KeyRange]]) -> None:
        self.rows, self.row_ranges = rows, row_ranges
        self.q_len = rows[0].query_count
        self.cache_rows = slice(rows[0].index, rows[-1].index + 1)
        # The queries in q.
        self.q_index = slice(rows[0].q_row, rows[0].q_row + len(rows)), slice(None), rows[0].queries
        same = all(ranges == row_ranges[0] for ranges in row_ranges)
        # The ranges to visit: a row's own, or one that spans those of all rows.
        self.ranges = row_ranges[0]
        if not same:
            start = min(ranges[0].start for ranges in row_ranges if ranges)
            stop = max(ranges[-1].stop for ranges in row_ranges if ranges)
            self.ranges = [KeyRange(start, stop, False)]
        # Keys that are read, and those that rows see.
        self.read_keys = len(rows) * sum(stop - start for start, stop, _ in self.ranges)
        self.seen_keys = self.read_keys
        if not same:
            self.seen_keys = sum(r.stop - r.start for ranges in row_ranges for r in ranges)

    @property
    def ragged(self) -> bool:
        """Return whether rows have different numbers of keys."""
        return any(row.length != self.rows[0].length for row in self.rows)

    def halves(self) -> "list[RowBatch]":
        """Return the two halves of its rows as batches."""
        half = len(self.rows) // 2
        return [
            RowBatch(self.rows[part], self.row_ranges[part])
            for part in (slice(0, half), slice(half, None))
        ]


class BlockPairs:
    """Mask and score at the pairs of a batch of rows with a block of keys.

    - `adds`: the score adds numbers to S, and they are wanted apart.
    """

    def __init__(self, spec: Spec, call: Call, adds: bool) -> None:
        self.spec, self.call, self.kv, self.adds = spec, call, call.kv, adds
        self.hk, self.g = call.k.shape[1], call.q.shape[1] // call.k.shape[1]
        self.score, self.mask = graphs(spec)
        self.score_captured, self.mask_captured = split(spec, call.captured)
        self.acc = acc_dtype(call.q.dtype)

    def first_position(self, row: CacheRow) -> int:
        """Return the position of a row's first query."""
        return self.call.coords.q if self.kv is None else row.first_position

    def evaluated(
        self, batch: RowBatch, block: KeyBlock
    ) -> tuple[KeyBlock, Tensor | None, Tensor | None]:
        """Return the block, cut to the keys that a query sees, which of its pairs are kept (None:
        all), and what the score adds to S (None: nothing, or `adds` is False)."""
        if block.full and not self.adds:
            return block, None, None
        key = self._key(batch, block)
        evaluated = None if key is None else _evaluations.get(key)
        if evaluated is None:
            evaluated = self._evaluate(batch, block)
            if key is not None:
                _evaluations.put(key, evaluated)
        return evaluated

    def positions(self, batch: RowBatch, block: KeyBlock, graph: Graph) -> Positions:
        """Return the positions of (rows, key heads, heads of a group, queries, keys) that a graph
        reads."""
        coords, per_row = self.call.coords, (-1, 1, 1, 1, 1)
        arange = lambda start, count: torch.arange(start, start + count, device="cpu")
        b = heads = q_idx = kv_idx = torch.zeros((), dtype=torch.int64, device="cpu")
        if graph.uses("q_idx"):
            starts = [self.first_position(row) for row in batch.rows]
            if len(set(starts)) == 1:
                q_idx = torch.full((), starts[0], dtype=torch.int64, device="cpu")
            else:
                q_idx = torch.tensor(starts, device="cpu").view(per_row)
            if batch.q_len > 1:
                q_idx = q_idx + arange(0, batch.q_len)[:, None]
        if graph.uses("b"):
            b = arange(batch.cache_rows.start + coords.b, len(batch.rows))
            b = b[0] if len(b) == 1 else b.view(per_row)
        if graph.uses("h"):
            heads = arange(coords.h, self.hk * self.g).view(self.hk, self.g, 1, 1)
            heads = heads[block.kv_heads, block.group_heads]
        if graph.uses("kv_idx"):
            first_key = coords.kv if self.kv is None else 0
            kv_idx = arange(block.keys.start + first_key, block.keys.stop - block.keys.start)
        return Positions(b, heads, q_idx, kv_idx)

    def _keep_mask(self, batch: RowBatch, block: KeyBlock) -> tuple[KeyBlock, Tensor | None]:
        """Return the block, cut to the keys that a query sees, and which of its pairs are kept:
        bool, broadcasting to (rows, key heads, heads of a group, queries, keys); None for all."""
        if block.full:
            return block, None
        per_row = lambda numbers: torch.tensor(numbers, device="cpu").view(-1, 1, 1, 1, 1)
        keys = torch.arange(block.keys.start, block.keys.stop, device="cpu")
        row_ranges = batch.row_ranges
        if all(len(ranges) <= 1 and (not ranges or ranges[0].exact) for ranges in row_ranges):
            limits = [ranges[0][:2] if ranges else (0, 0) for ranges in row_ranges]
            starts, stops = zip(*limits, strict=True)
            keep_mask = keys < per_row(stops)
            if max(starts) > block.keys.start:
                keep_mask &= keys >= per_row(starts)
            return block, keep_mask
        assert self.mask is not None
        positions = self.positions(batch, block, self.mask)
        keep_mask = mask_at(self.mask, self.mask_captured, positions)
        if batch.ragged:
            keep_mask = keep_mask & (keys < per_row([row.length for row in batch.rows]))
        return _cut_to_seen(block, keep_mask)

    def _evaluate(
        self, batch: RowBatch, block: KeyBlock
    ) -> tuple[KeyBlock, Tensor | None, Tensor | None]:
        """Return `_keep_mask`, and the numbers that a score adds to S, where it does no more."""
        block, keep_mask = self._keep_mask(batch, block)
        if not self.adds:
            return block, keep_mask, None
        assert self.score is not None
        positions = self.positions(batch, block, self.score)
        zero = torch.zeros(1, 1, 1, 1, 1, dtype=self.acc, device="cpu")
        (addend,), _ = score_at(self.score, self.score_captured, positions, zero, keep_mask)
        return block, keep_mask, addend

    def _key(self, batch: RowBatch, block: KeyBlock) -> tuple | None:
        """Return all that `_evaluate` depends on; None where that, or its result, is large."""
        (tensors, ints, floats), coords = self.call.captured, self.call.coords
        pairs = (
            len(batch.rows) * self.hk * self.g * batch.q_len * (block.keys.stop - block.keys.start)
        )
        if self.spec.tiles is not None or pairs > _CACHED_PAIRS:
            return None
        if sum([t.numel() for t in tensors]) > _CACHED_CAPTURES:
            return None
        contents = [
            (t.dtype, t.shape, t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            for t in tensors
        ]  # fmt: skip
        rows = [(row.index, self.first_position(row), row.length) for row in batch.rows]
        slices = [(part.start, part.stop) for part in block[:3]]
        return (
            self.spec.score, self.spec.mask, self.adds, self.acc, self.hk, self.g,
            coords.b, coords.h, coords.kv, self.kv is None, batch.q_len, block.full, *slices, *rows,
            *contents, *ints, *map(repr, floats),
        )  # fmt: skip


def _cut_to_seen(block: KeyBlock, keep_mask: Tensor) -> tuple[KeyBlock, Tensor | None]:
    """Return the stretch of a block's keys that any query sees, and its keep mask; None if every
    pair of it is kept."""
    key_count = block.keys.stop - block.keys.start
    if keep_mask.dim() == 0 or keep_mask.shape[-1] != key_count:  # it does not depend on keys
        return block, keep_mask
    alike = keep_mask.numel() == key_count  # all queries see the same keys
    seen = keep_mask.view(-1) if alike else keep_mask.flatten(0, -2).any(0)
    places = seen.nonzero()
    if not len(places):
        return block, keep_mask
    first, stop = int(places[0]), int(places[-1]) + 1
    keys = slice(block.keys.start + first, block.keys.start + stop)
    full = alike and len(places) == stop - first
    return block._replace(keys=keys, full=full), None if full else keep_mask[..., first:stop]
