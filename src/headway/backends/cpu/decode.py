"""Decoding on the CPU: few queries over many keys, with a cache or without.

Decoding is bound by reading keys and values, so each is read once, and only where the mask's
formula allows it (`key_ranges`). The queries of all heads of a group are the rows of one product.
Keys are visited in blocks that fit the caches: pages are gathered, and 8 or 16-bit numbers
widened, one block at a time. Where a row needs only a softmax, PyTorch's flash kernel computes it
in one pass, and a mask that is no range of keys is added to the logits. Small calls are bound by
launches, so their rows are computed together (`decode_batches`).

It buys 1.0 to 3.1 times the speed of F.sdpa over contiguous keys, 0.3 to 1.2 times over pages,
whose gathering alone would cost F.sdpa 1.4 to 7 times as much (docs/lab/cpu.md, 2026-11-26).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import CapturedIndexError
from ...mods.evaluation.pointwise import Positions, bind, mask_at, score_at
from ...types import Forward, Spec, acc_dtype, in_dtype
from ..base import Call, graphs, split
from ..cache_rows import CacheRow, rows_of
from .decode_batches import RowBatch, batch_rows, one_batch_per_row
from .decode_keys import KeyReader
from .decode_pages import attend_by_page
from .flash import MAX_DECODE_QUERIES, _finite, _forward, _some_zero, add_sink, in_half
from .key_ranges import KeyRange, key_ranges
from .tile_plan import segments_of_row
from .tiled import _exp

_BLOCK_PAIRS = 1 << 20  # 4 MB of float32, the caches of two cores
_COPIED_NUMBERS = 1 << 19  # of a block of keys that is copied
_BIAS_NUMBERS = 1 << 22  # of a mask that is added


def suits(spec: Spec, call: Call) -> bool:
    """Return whether a call without a cache has few queries. Keys that heads share, and 16-bit
    keys, are then read once."""
    q_len, kv_len, coords = call.q.shape[2], call.k.shape[2], call.coords
    return (
        0 < q_len <= MAX_DECODE_QUERIES < kv_len
        and spec.tiles is None
        and spec.dropout == 0
        and coords.q_pos is None
        and coords.kv_pos is None
    )


def forward(spec: Spec, call: Call) -> Forward:
    """Return the results of a call without a cache."""
    b, _, q_len, _ = call.q.shape
    kv_len = call.k.shape[2]
    rows = [CacheRow(n, n, slice(0, q_len), kv_len) for n in range(b)]
    return _DecodeCall(spec, call, rows, [call.coords.q] * b, call.coords.kv).run()


def infer(spec: Spec, call: Call) -> Forward:
    """Return the results of a call over a cache. A row of many queries becomes its own call."""
    rows = rows_of(call)
    return _DecodeCall(spec, call, rows, [row.first_position for row in rows], 0).run()


class _Results(NamedTuple):
    """The results of some rows; the maxima are None where the spec does not ask for them."""

    out: Tensor
    lse: Tensor
    max_logit: Tensor | None = None
    row_max: Tensor | None = None


@dataclass
class _KeyBlock:
    """Some keys of a batch of rows, and the heads that see them."""

    kv_heads: slice
    group_heads: slice  # query heads of each key head
    keys: slice
    full: bool  # every pair is kept


class _PartialSoftmax(NamedTuple):
    """Attention over a block of keys, before its division."""

    row_max: Tensor  # the largest score of every query
    total: Tensor  # the sum of exponentials, relative to row_max
    out: Tensor  # the values times those exponentials
    max_logit: Tensor | None  # of every head, where the spec asks for it


class _DecodeCall:
    """A call with few queries, computed a batch of rows at a time."""

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

    def run(self) -> Forward:
        """Return the results of all rows."""
        call, kv = self.call, self.kv
        decode_rows = [
            row for row in self.rows
            if row.queries.stop - row.queries.start <= MAX_DECODE_QUERIES
        ]  # fmt: skip
        row_ranges = self._row_ranges(decode_rows)
        results, batches = self._attend_by_page(decode_rows, row_ranges), []
        if results is None:
            batches = self._batches(decode_rows, row_ranges)
            all_rows = len(batches) == 1 and len(decode_rows) == call.q.shape[0]
            if all_rows and (kv is None or kv.cu_q is None):
                results = self._attend(batches[0])
        if results is None:
            return self._run_in_batches(batches)
        out, lse, *maxima = results
        out = in_dtype(out, self.spec.out_dtype(call.q.dtype)).contiguous()
        lse = lse.contiguous()  # as operators say that they are
        return Forward(out, lse, *[lse.new_empty(0) if m is None else m for m in maxima])

    def _run_in_batches(self, batches: list[RowBatch]) -> Forward:
        """Return the results of all rows, batch after batch, then row after row of many queries."""
        result = self._empty_results()

        def store(index: tuple[slice | int, ...], rows: slice | int, results: _Results) -> None:
            result.out[index], result.lse[index] = results.out, results.lse
            if results.max_logit is not None:
                result.max_logit[rows] = results.max_logit
            if results.row_max is not None:
                result.row_max[index] = results.row_max

        for batch in batches:
            results = self._attend(batch)
            if results is None:
                batches.extend(one_batch_per_row(batch.rows, batch.row_ranges))
            else:
                store(batch.q_index, batch.cache_rows, results)
        for row in self.rows:
            if row.queries.stop - row.queries.start > MAX_DECODE_QUERIES:
                index = row.q_row, slice(None), row.queries
                store(index, row.index, self._prefill_row(row))
        return result

    def _empty_results(self) -> Forward:
        """Return memory for the results of all rows; queries of no row have theirs already."""
        spec, call, kv = self.spec, self.call, self.kv
        (b, hq, q_len, _), dv = call.q.shape, call.v.shape[3]
        row_count = b if kv is None else kv.lengths.shape[0]
        empty = lambda *shape: torch.empty(shape, dtype=self.acc, device="cpu")
        out = torch.empty(b, hq, q_len, dv, dtype=spec.out_dtype(call.q.dtype), device="cpu")
        lse = empty(b, hq, q_len)
        row_max = empty(b, hq, q_len) if spec.row_max else empty(0)
        max_logit = empty(row_count, hq).fill_(-math.inf) if spec.max_logit else empty(0)
        if kv is not None and (kv.cu_q is not None or not self.rows):
            out.zero_()
            lse.fill_(-math.inf)
            if call.sink is not None:
                lse.copy_(call.sink.to(self.acc)[:, None])
            row_max.fill_(-math.inf)
        return Forward(out, lse, max_logit, row_max)

    # -- which rows and keys -----------------------------------------------------------------------

    def _batches(self, rows: list[CacheRow], row_ranges: list[list[KeyRange]]) -> list[RowBatch]:
        """Return the rows in batches, where that is possible and faster."""
        call, kv = self.call, self.kv
        packed = kv is not None and kv.cu_q is not None
        if packed or self.spec.tiles is not None:
            return one_batch_per_row(rows, row_ranges)
        if not (self.fits_flash or self.keys.copied or _rows_and_heads_join(call.k, call.v)):
            return one_batch_per_row(rows, row_ranges)
        key_width = self.hk * (call.k.shape[3] + call.v.shape[3])
        max_numbers = None if self.fits_flash else 2 * _COPIED_NUMBERS
        return batch_rows(rows, row_ranges, key_width, max_numbers)

    def _row_ranges(self, rows: list[CacheRow]) -> list[list[KeyRange]]:
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

    def _positions(self, batch: RowBatch, heads: Tensor, keys: slice) -> Positions:
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

    def _mask_block(self, batch: RowBatch, positions: Positions | None, keys: slice) -> Tensor:
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
            positions = self._positions(batch, self.heads, keys)
        keep_mask = mask_at(self.mask, self.bound_mask, positions)
        if batch.ragged:
            keep_mask = keep_mask & (key_idx < per_row([row.length for row in batch.rows]))
        return keep_mask

    def _key_blocks(self, batch: RowBatch) -> Iterator[_KeyBlock]:
        """Yield the blocks to visit; those of the same heads follow each other."""
        row_count, copied = len(batch.rows), self.keys.copied
        row_width = row_count * max(self.call.k.shape[3], self.call.v.shape[3], 1)
        page_len = self.call.k.shape[2] if self.keys.paged else 1
        for kv_heads, group_heads, ranges in self._ranges_by_head(batch):
            longest = max((key_range.stop - key_range.start for key_range in ranges), default=0)
            if not longest:
                yield _KeyBlock(kv_heads, group_heads, slice(0, 0), True)
                continue
            heads_per_block = kv_heads.stop - kv_heads.start
            if copied:  # as few heads at a time as give long stretches of keys
                fitting_heads = max(1, _COPIED_NUMBERS // (row_width * longest))
                heads_per_block = min(heads_per_block, fitting_heads)
            group_size = group_heads.stop - group_heads.start
            queries = row_count * heads_per_block * group_size * batch.q_len
            keys_per_block = max(128, _BLOCK_PAIRS // queries)
            if copied:
                fitting_keys = max(128, _COPIED_NUMBERS // (row_width * heads_per_block))
                keys_per_block = min(keys_per_block, fitting_keys)
            keys_per_block = max(page_len, keys_per_block - keys_per_block % page_len)
            for h in range(kv_heads.start, kv_heads.stop, heads_per_block):
                block_heads = slice(h, min(h + heads_per_block, kv_heads.stop))
                for range_start, range_stop, exact in ranges:
                    start = range_start
                    while start < range_stop:
                        page_start = (start // page_len) * page_len
                        stop = min(page_start + keys_per_block, range_stop)
                        yield _KeyBlock(block_heads, group_heads, slice(start, stop), exact)
                        start = stop

    def _ranges_by_head(self, batch: RowBatch) -> Iterator[tuple[slice, slice, list[KeyRange]]]:
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

    # -- the ways to compute a batch ---------------------------------------------------------------

    def _attend(self, batch: RowBatch) -> _Results | None:
        """Return the results of a batch; None where its rows, several, must be computed one by
        one."""
        results = None
        several = len(batch.rows) > 1
        if self.softmax_only:
            key_count = len(batch.rows) * (batch.stop - batch.start)
            if not self.keys.paged or self._fits_caches(key_count):
                results = self._attend_by_flash(batch)
        if results is None and several and self.fits_flash:
            return None
        if results is None:
            try:
                results = self._attend_by_blocks(batch)
            except CapturedIndexError:  # maybe where a row has no keys any more
                if several:
                    return None
                raise
            if several and batch.ragged and not _finite(results.out):
                return None  # a NaN behind the end of a row may show
        return results

    @cached_property
    def softmax_only(self) -> bool:
        """Return whether there is only a softmax between the products, in a dtype of PyTorch's
        flash kernel."""
        spec, call = self.spec, self.call
        dtype = call.q.dtype
        in_half_dtype = in_half(dtype) and spec.out_dtype(dtype) == dtype
        return (
            self.score is None
            and spec.tiles is None
            and not (spec.max_logit or spec.row_max)
            and (dtype == self.acc or in_half_dtype)
            and call.k.dtype == dtype
            and call.q.shape[3] == call.v.shape[3] > 0
            and call.k.stride(3) == call.v.stride(3) == call.q.stride(3) == 1
            and (self.kv is None or (self.kv.k_scale is None and self.kv.v_scale is None))
        )

    def _fits_caches(self, key_count: int) -> bool:
        """Return whether so many keys of all heads, with their values, fit into the caches."""
        numbers = key_count * self.hk * (self.call.k.shape[3] + self.call.v.shape[3])
        return numbers <= 2 * _COPIED_NUMBERS

    @cached_property
    def fits_flash(self) -> bool:
        """Return whether the flash kernel takes keys and values as they lie, row by row."""
        return self.softmax_only and not self.keys.paged

    def _attend_by_page(
        self, rows: list[CacheRow], row_ranges: list[list[KeyRange]]
    ) -> _Results | None:
        """Return the results of all rows by pages; None where that is impossible or slower."""
        call, kv = self.call, self.kv
        if kv is None or kv.page_table is None or kv.cu_q is not None or not self.softmax_only:
            return None
        if any(len(ranges) > 1 or (ranges and not ranges[0].exact) for ranges in row_ranges):
            return None
        if self._fits_caches(sum(rs[0].stop - rs[0].start for rs in row_ranges if rs)):
            return None
        q = call.q.unflatten(1, (self.hk, self.g)).flatten(2, 3)
        ranges = [ranges[0] if ranges else None for ranges in row_ranges]
        results = attend_by_page(q, call.k, call.v, kv.page_table, ranges, self.spec.scale)
        if results is None:
            return None
        out, lse = results[0].reshape(call.q.shape), results[1].reshape(call.q.shape[:3])
        if call.sink is not None:
            out, lse = add_sink(out, lse, call.sink)
        return _Results(out, lse)

    def _attend_by_flash(self, batch: RowBatch) -> _Results | None:
        """Return the results by PyTorch's flash kernel; None where it cannot compute them, or a row
        may be NaN."""
        call, row_count, start, stop = self.call, len(batch.rows), batch.start, batch.stop
        if start == stop:
            return None
        keep_mask = None
        if len(batch.ranges) != 1 or not batch.ranges[0].exact:
            keep_mask = self._dense_mask(batch)
            if keep_mask is None:
                return None
        q_rows, keys = call.q[batch.q_index], slice(start, stop)
        q = q_rows.reshape(row_count, self.hk, self.g * batch.q_len, q_rows.shape[3])
        all_heads = slice(0, self.hk)
        k, v = (self.keys.stored(x, batch.cache_rows, all_heads, keys) for x in (call.k, call.v))
        bias = None
        if keep_mask is not None:
            bias = torch.zeros(keep_mask.shape, dtype=q.dtype, device="cpu")
            bias.masked_fill_(~keep_mask, -math.inf)
        out, lse = _forward(q, k, v, 0.0, False, attn_mask=bias, scale=self.spec.scale)
        if keep_mask is not None and not math.isfinite(out.sum(dtype=self.acc) + lse.sum()):
            return None  # a mask that is added lets NaN and inf through
        if _some_zero(lse):
            if keep_mask is not None:  # of a row that sees nothing
                lse = lse.masked_fill(~keep_mask.any(-1), -math.inf)
            if _some_zero(lse) and not (_finite(q) and _finite(k)):
                return None
        out, lse = out.reshape(q_rows.shape), lse.reshape(q_rows.shape[:3])
        if call.sink is not None:
            out, lse = add_sink(out, lse, call.sink)
        return _Results(out, lse)

    def _dense_mask(self, batch: RowBatch) -> Tensor | None:
        """Return which pairs are kept, broadcasting to (rows, key heads, queries of a group, keys);
        None where that is large, or costs more than it saves."""
        start, stop = batch.start, batch.stop
        size = (stop - start) * len(batch.rows) * batch.q_len
        if self.mask is not None and self.mask.uses("h"):
            size *= self.hk * self.g
        live_keys = sum(key_range.stop - key_range.start for key_range in batch.ranges)
        if size > _BIAS_NUMBERS or 2 * live_keys < stop - start:
            return None
        try:
            keep_mask = self._mask_block(batch, None, slice(start, stop))
        except CapturedIndexError:
            return None
        keep_mask = keep_mask.view((1,) * (5 - keep_mask.dim()) + keep_mask.shape)
        if keep_mask.shape[1:4] == (1, 1, 1):
            return keep_mask[:, :, 0]
        rows, heads = keep_mask.shape[:2]
        return keep_mask.expand(rows, heads, self.g, batch.q_len, stop - start).flatten(2, 3)

    def _attend_by_blocks(self, batch: RowBatch) -> _Results:
        """Return the results by blocks of torch ops, and merge the softmaxes of the blocks."""
        call, acc, hk, g = self.call, self.acc, self.hk, self.g
        heads_shape, q_len, dv = (len(batch.rows), hk, g), batch.q_len, call.v.shape[3]
        q = call.q[batch.q_index].to(acc).reshape(*heads_shape, q_len, call.q.shape[3])
        blocks = [b for b in self._key_blocks(batch) if b.keys.start < b.keys.stop]
        all_heads = slice(0, hk), slice(0, g)
        if len(blocks) == 1 and (blocks[0].kv_heads, blocks[0].group_heads) == all_heads:
            m, total, out, max_logit = self._attend_block(batch, q, blocks[0])
        else:
            filled = lambda value, *shape: torch.full(
                (*heads_shape, *shape), value, dtype=acc, device="cpu"
            )
            out, total = filled(0.0, q_len, dv), filled(0.0, q_len, 1)
            m, max_logit = filled(-math.inf, q_len, 1), filled(-math.inf)
            for block in blocks:
                heads = slice(None), block.kv_heads, block.group_heads
                update = self._attend_block(batch, q[heads], block)
                m_before, m_after = m[heads], torch.maximum(m[heads], update.row_max)
                base = m_after.masked_fill(m_after == -math.inf, 0)
                rescale, rescale_update = (m_before - base).exp_(), (update.row_max - base).exp_()
                m[heads] = m_after
                total[heads] = total[heads] * rescale + update.total * rescale_update
                out[heads] = (out[heads] * rescale).addcmul_(update.out, rescale_update)
                if update.max_logit is not None:
                    max_logit[heads] = torch.maximum(max_logit[heads], update.max_logit)
        row_max = m
        if call.sink is not None:
            sink = call.sink.to(acc).view(hk, g, 1, 1)
            m_after = torch.maximum(m, sink)
            base = m_after.masked_fill(m_after == -math.inf, 0)
            rescale = (m - base).exp_()
            total, out, m = total * rescale + (sink - base).exp_(), out * rescale, m_after
        lse = (m + total.log())[..., 0].flatten(1, 2)
        out = (out / total.masked_fill(total == 0, 1)).flatten(1, 2)
        return _Results(
            out, lse, max_logit.flatten(1, 2) if self.spec.max_logit else None,  # type: ignore[union-attr]
            row_max[..., 0].flatten(1, 2) if self.spec.row_max else None,
        )  # fmt: skip

    def _attend_block(self, batch: RowBatch, q: Tensor, block: _KeyBlock) -> _PartialSoftmax:
        """Return attention of q `(rows, key heads, heads of a group, queries, d)` over a block."""
        spec, acc = self.spec, self.acc
        shape = *q.shape[:4], block.keys.stop - block.keys.start
        k = self.keys.k(batch.cache_rows, block.kv_heads, block.keys)
        s = self.keys.scratch("s", shape, acc)
        group_q = q.flatten(2, 3).flatten(0, 1)
        flat_s = s.view(*group_q.shape[:2], shape[4])
        torch.baddbmm(flat_s, group_q, k.mT, beta=0, alpha=spec.scale, out=flat_s)
        positions, keep_mask, t, max_logit = None, None, s, None
        if self.score is not None or (self.mask is not None and not block.full):
            heads = self.heads[block.kv_heads, block.group_heads]
            positions = self._positions(batch, heads, block.keys)
        if not block.full:
            keep_mask = self._mask_block(batch, positions, block.keys)
        if self.score is not None:
            logits = s.clone() if spec.max_logit else s
            (t,), _ = score_at(self.score, self.bound_score, positions, logits, keep_mask)  # type: ignore[arg-type]
            t = torch.as_tensor(t, dtype=acc, device="cpu").expand(shape)
        if keep_mask is not None:
            t = t.masked_fill(~keep_mask, -math.inf)
        if spec.max_logit:
            logits = t if self.score is None else s.masked_fill(t == -math.inf, -math.inf)
            max_logit = logits.amax((3, 4))
        m = t.amax(-1, keepdim=True)
        base = m.masked_fill(m == -math.inf, 0)
        p = _exp(torch.sub(t, base, out=self.keys.scratch("p", shape, acc)))
        total = p.sum(-1, keepdim=True)
        v = self.keys.v(batch.cache_rows, block.kv_heads, block.keys)
        out = torch.bmm(p.view(flat_s.shape), v).view(*q.shape[:4], v.shape[2])
        return _PartialSoftmax(m, total, out, max_logit)

    def _prefill_row(self, row: CacheRow) -> _Results:
        """Return the results of a row of many queries, by the forward of training."""
        from . import forward  # it stands above this module

        call, kv = self.call, self.kv
        assert kv is not None
        index = slice(row.index, row.index + 1), slice(0, self.hk), slice(0, row.length)
        plain_cache = kv.page_table is None and call.k.dtype == call.q.dtype
        k = (
            call.k[index]
            if plain_cache and kv.k_scale is None
            else self.keys.k(*index)[None].clone()
        )
        v = (
            call.v[index]
            if plain_cache and kv.v_scale is None
            else self.keys.v(*index)[None].clone()
        )
        q = in_dtype(call.q[row.q_row : row.q_row + 1, :, row.queries], k.dtype)
        b = call.coords.b + row.index
        row_call = call.replace(
            q=q, k=k, v=in_dtype(v, k.dtype), tiles=None, kv=None,
            coords=call.coords._replace(b=b, q=row.first_position),
        )  # fmt: skip
        out, lse, max_logit, row_max = forward(self.spec.replace(tiles=None), row_call)
        return _Results(
            out[0], lse[0], max_logit[0] if self.spec.max_logit else None,
            row_max[0] if self.spec.row_max else None,
        )  # fmt: skip


def _rows_and_heads_join(*caches: Tensor) -> bool:
    """Return whether rows and heads are one dimension of memory, so that a product takes several
    rows."""
    return all(
        cache.shape[1] == 1 or cache.stride(0) == cache.shape[1] * cache.stride(1)
        for cache in caches
    )
