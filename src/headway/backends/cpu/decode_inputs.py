"""The rows and keys that a call with few queries reads, in the blocks that its mask leaves."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...mods.evaluation.pointwise import Positions, bind, mask_at
from ...types import Spec, acc_dtype
from ..base import Call, graphs, split
from ..cache_rows import CacheRow
from .decode_batches import RowBatch
from .decode_keys import KeyReader
from .key_ranges import KeyRange, key_ranges
from .tile_plan import segments_of_row

_BLOCK_PAIRS = 1 << 20  # 4 MB of float32, the caches of two cores
COPIED_NUMBERS = 1 << 19  # of a block of keys that is copied


@dataclass
class KeyBlock:
    """Some keys of a batch of rows, and the heads that see them."""

    kv_heads: slice
    group_heads: slice  # query heads of each key head
    keys: slice
    full: bool  # every pair is kept


class DecodeInputs:
    """The rows of a call with few queries, their keys, and the pairs that its mask keeps."""

    def __init__(
        self, spec: Spec, call: Call, rows: list[CacheRow], first_positions: list[int],
        first_key_position: int,
    ) -> None:  # fmt: skip
        self.hk, self.g = call.k.shape[1], call.q.shape[1] // call.k.shape[1]
        self.spec, self.call, self.kv = spec, call, call.kv
        self.rows = rows if self.g else []  # without heads there is nothing to compute
        self.first_position = {
            row.index: position for row, position in zip(rows, first_positions, strict=True)
        }
        self.first_key_position = first_key_position
        self.score, self.mask = graphs(spec)
        self.score_captured, self.mask_captured = split(spec, call.captured)
        self.acc = acc_dtype(call.q.dtype)
        self.keys = KeyReader(call)

    @cached_property
    def bound_score(self) -> dict:
        """Return the values that the score captures, by name."""
        return {} if self.score is None else bind(self.score, self.score_captured)

    @cached_property
    def bound_mask(self) -> dict:
        """Return the values that the mask captures, by name."""
        return {} if self.mask is None else bind(self.mask, self.mask_captured)

    def row_ranges(self, rows: list[CacheRow]) -> list[list[KeyRange]]:
        """Return the ranges of keys that each row may see."""
        if self.mask is None or not rows or self.spec.tiles is not None:
            exact = self.mask is None
            return [[KeyRange(0, row.length, exact)] if row.length else [] for row in rows]
        counts = [row.queries.stop - row.queries.start for row in rows]
        q_positions = [
            self.first_position[row.index] + i
            for row, count in zip(rows, counts, strict=True)
            for i in range(count)
        ]
        batch_indices = [
            row.index + self.call.coords.b
            for row, count in zip(rows, counts, strict=True)
            for _ in range(count)
        ]
        first_key = self.first_key_position
        lengths = [first_key + row.length for row in rows]
        row_ranges = key_ranges(
            self.mask, self.mask_captured, batch_indices, q_positions, counts, lengths
        )
        if not first_key:
            return row_ranges
        return [
            [
                KeyRange(max(0, start - first_key), stop - first_key, exact)
                for start, stop, exact in ranges
                if max(0, start - first_key) < stop - first_key
            ]
            for ranges in row_ranges
        ]

    def positions_of(self, batch: RowBatch, heads: Tensor, keys: slice) -> Positions:
        """Return the positions of (rows, key heads, heads of a group, queries, keys)."""
        first_positions = [self.first_position[row.index] for row in batch.rows]
        q_idx = torch.arange(batch.q_len, device="cpu")[:, None]
        cache_rows = torch.arange(batch.cache_rows.start, batch.cache_rows.stop, device="cpu")
        b = cache_rows + self.call.coords.b
        start = torch.tensor(first_positions, device="cpu")
        if len(first_positions) == 1:
            b = b[0]
        else:
            b = b.view(-1, 1, 1, 1, 1)
            start = start.view(b.shape) if len(set(first_positions)) > 1 else start[0]
        first_key = self.first_key_position
        kv_idx = torch.arange(keys.start + first_key, keys.stop + first_key, device="cpu")
        return Positions(b, heads, q_idx + start, kv_idx)

    @cached_property
    def heads(self) -> Tensor:
        """Return the query heads, (key heads, heads of a group, 1, 1)."""
        first_head, head_count = self.call.coords.h, self.hk * self.g
        return torch.arange(first_head, first_head + head_count, device="cpu").view(
            self.hk, self.g, 1, 1
        )

    def mask_block(self, batch: RowBatch, positions: Positions | None, keys: slice) -> Tensor:
        """Return which pairs are kept: bool, broadcasting to (rows, key heads, heads of a group,
        queries, keys)."""
        per_row = lambda numbers: torch.tensor(numbers, device="cpu").view(-1, 1, 1, 1, 1)
        key_idx = torch.arange(keys.start, keys.stop, device="cpu")
        row_ranges = batch.row_ranges
        if all(len(ranges) <= 1 and (not ranges or ranges[0].exact) for ranges in row_ranges):
            limits = [ranges[0][:2] if ranges else (0, 0) for ranges in row_ranges]
            starts, stops = zip(*limits, strict=True)
            keep_mask = key_idx < per_row(stops)
            return (
                keep_mask if max(starts) <= keys.start else keep_mask & (key_idx >= per_row(starts))
            )
        assert self.mask is not None
        if positions is None:
            positions = self.positions_of(batch, self.heads, keys)
        keep_mask = mask_at(self.mask, self.bound_mask, positions)
        if batch.ragged:
            keep_mask = keep_mask & (key_idx < per_row([row.length for row in batch.rows]))
        return keep_mask

    def key_blocks(self, batch: RowBatch) -> Iterator[KeyBlock]:
        """Yield the blocks to visit; those of the same heads follow each other."""
        row_count, copied = len(batch.rows), self.keys.copied
        row_width = row_count * max(self.call.k.shape[3], self.call.v.shape[3], 1)
        page_len = self.call.k.shape[2] if self.keys.paged else 1
        for kv_heads, group_heads, ranges in self.ranges_by_head(batch):
            longest = max((key_range.stop - key_range.start for key_range in ranges), default=0)
            if not longest:
                yield KeyBlock(kv_heads, group_heads, slice(0, 0), True)
                continue
            heads_per_block = kv_heads.stop - kv_heads.start
            if copied:  # as few heads at a time as give long stretches of keys
                fitting_heads = max(1, COPIED_NUMBERS // (row_width * longest))
                heads_per_block = min(heads_per_block, fitting_heads)
            group_size = group_heads.stop - group_heads.start
            queries = row_count * heads_per_block * group_size * batch.q_len
            keys_per_block = max(128, _BLOCK_PAIRS // queries)
            if copied:
                fitting_keys = max(128, COPIED_NUMBERS // (row_width * heads_per_block))
                keys_per_block = min(keys_per_block, fitting_keys)
            keys_per_block = max(page_len, keys_per_block - keys_per_block % page_len)
            for h in range(kv_heads.start, kv_heads.stop, heads_per_block):
                block_heads = slice(h, min(h + heads_per_block, kv_heads.stop))
                for range_start, range_stop, exact in ranges:
                    start = range_start
                    while start < range_stop:
                        page_start = (start // page_len) * page_len
                        stop = min(page_start + keys_per_block, range_stop)
                        yield KeyBlock(block_heads, group_heads, slice(start, stop), exact)
                        start = stop

    def ranges_by_head(self, batch: RowBatch) -> Iterator[tuple[slice, slice, list[KeyRange]]]:
        """Yield key heads and heads of their groups that see the same keys, and those keys."""
        hk, g, spec = self.hk, self.g, self.spec
        if spec.tiles is None or self.call.tiles is None:
            yield slice(0, hk), slice(0, g), batch.ranges
            return
        mask_b, mask_h, tile_q, tile_kv = spec.tiles
        row, first_position = batch.rows[0], self.first_position[batch.rows[0].index]
        mask_row = row.index if mask_b > 1 else 0
        capacity = self.call.kv.capacity(self.call.k) if self.call.kv is not None else 0
        for h in range(mask_h):
            segments = segments_of_row(
                spec, self.call.tiles, (tile_q, tile_kv), mask_row * mask_h + h, mask_b * mask_h,
                slice(max(first_position, 0), first_position + batch.q_len), capacity,
            )  # fmt: skip
            ranges = [
                KeyRange(segment.start, min(segment.stop, row.length), segment.full)
                for segment in segments if segment.start < row.length
            ]  # fmt: skip
            if mask_h == 1:
                yield slice(0, hk), slice(0, g), ranges
            else:
                yield slice(h // g, h // g + 1), slice(h % g, h % g + 1), ranges
