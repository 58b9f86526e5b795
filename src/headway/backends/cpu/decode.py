"""Decoding on the CPU: few queries over many keys, with a cache or without.

Decoding is bound by reading keys and values, so each is read once, and only where the mask's
formula allows it (`key_ranges`). The queries of all heads of a group are the rows of one product.
Keys are visited in blocks that fit the caches: pages are gathered, and 8 or 16-bit numbers widened,
one block at a time (`decode_keys`). PyTorch's flash kernel attends to a block in one pass, with a
mask, or the numbers of a score that adds (ALiBi), added to its logits. Any other score, and what
the kernel may get wrong, take some torch ops more. Small calls are bound by launches, so rows that
see nearly the same keys are computed together, and all layers of a step share evaluated masks.

It buys 1.0 to 3.1 times the speed of F.sdpa over contiguous keys, 0.3 to 1.2 times over pages,
whose gathering alone would cost F.sdpa 1.4 to 7 times as much (docs/lab/cpu.md, 2026-11-26).
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import CapturedIndexError
from ...types import Forward, Spec, acc_dtype, in_dtype
from ..base import Call, graphs, split
from ..cache_rows import CacheRow, rows_of
from .decode_block import BlockAttention, KeyBlock, PartialSoftmax
from .decode_keys import KeyReader, attend_by_page
from .decode_pairs import BlockPairs, RowBatch
from .flash import MAX_DECODE_QUERIES, _finite, add_sink
from .key_ranges import KeyRange, key_ranges
from .tile_plan import segments_of_row

_BLOCK_PAIRS = 1 << 20  # 4 MB of float32, the caches of two cores
_COPIED_NUMBERS = 1 << 19  # of a block of keys that is copied
_UNSEEN_NUMBERS = 1 << 16  # numbers that are read in the time of a row's launches


def suits(spec: Spec, call: Call) -> bool:
    """Return whether a call without a cache has few queries. Keys that heads share, and 16-bit
    keys, are then read once."""
    q_len, kv_len, coords = call.q.shape[2], call.k.shape[2], call.coords
    return (
        0 < q_len <= MAX_DECODE_QUERIES < kv_len
        and spec.tiles is None
        and spec.dropout == 0
        and not spec.entropy
        and coords.q_pos is None
        and coords.kv_pos is None
    )


def forward(spec: Spec, call: Call) -> Forward:
    """Return the results of a call without a cache."""
    (b, _, q_len, _), kv_len = call.q.shape, call.k.shape[2]
    rows = [CacheRow(n, n, slice(0, q_len), kv_len) for n in range(b)]
    return _DecodeCall(spec, call, rows).run()


def infer(spec: Spec, call: Call) -> Forward:
    """Return the results of a call over a cache. A row of many queries becomes its own call."""
    return _DecodeCall(spec, call, rows_of(spec, call)).run()


class _Results(NamedTuple):
    """The results of some rows; the maxima are None where the spec does not ask for them."""

    out: Tensor
    lse: Tensor
    max_logit: Tensor | None = None
    row_max: Tensor | None = None


class _DecodeCall:
    """A call with few queries, computed a batch of rows at a time."""

    def __init__(self, spec: Spec, call: Call, rows: list[CacheRow]) -> None:
        self.hk, self.g = call.k.shape[1], call.q.shape[1] // call.k.shape[1]
        self.spec, self.call, self.kv = spec, call, call.kv
        self.rows = rows if self.g else []  # without heads there is nothing to compute
        self.score, self.mask = graphs(spec)
        _, self.mask_captured = split(spec, call.captured)
        self.acc = acc_dtype(call.q.dtype)
        self.keys = KeyReader(call)
        self.attention = BlockAttention(spec, call, self.keys)
        self.pairs = BlockPairs(spec, call, self.attention.adds)

    def run(self) -> Forward:
        """Return the results of all rows."""
        call, kv = self.call, self.kv
        packed = kv is not None and kv.cu_q is not None
        rows = [row for row in self.rows if row.query_count <= MAX_DECODE_QUERIES]
        row_ranges = self._row_ranges(rows)
        all_rows = len(rows) == call.q.shape[0] and not packed
        results, batches = None, []
        if (
            all_rows
            and kv is not None
            and kv.page_table is not None
            and self.attention.by_kernel_alone
        ):
            results = self._attend_by_page(kv.page_table, row_ranges)
        if results is None:
            batches = self._batches(RowBatch(rows, row_ranges), packed) if rows else []
            if all_rows and len(batches) == 1:
                results = self._attend(batches[0])
                batches = batches if results is not None else batches[0].halves()
        if results is None:
            return self._run_in_batches(batches)
        out, lse, *maxima = results
        out = in_dtype(out, self.spec.out_dtype(call.q.dtype)).contiguous()
        lse = lse.contiguous()  # as operators say that they are
        empty = lse.new_empty(0)
        max_logit, row_max = (empty if m is None else m for m in maxima)
        return Forward(out, lse, max_logit, row_max, empty)

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
                batches.extend(batch.halves())
            else:
                store(batch.q_index, batch.cache_rows, results)
        for row in self.rows:
            if row.query_count > MAX_DECODE_QUERIES:
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
        return Forward(out, lse, max_logit, row_max, empty(0))

    # -- which rows and keys -----------------------------------------------------------------------

    def _row_ranges(self, rows: list[CacheRow]) -> list[list[KeyRange]]:
        """Return the ranges of keys that each row may see."""
        if self.mask is None or not rows or self.spec.tiles is not None:
            exact = self.mask is None
            return [[KeyRange(0, row.length, exact)] if row.length else [] for row in rows]
        queries = [
            [(row.index + self.call.coords.b, self.pairs.first_position(row) + i)
             for i in range(row.query_count)] for row in rows
        ]  # fmt: skip
        first_key = self.call.coords.kv if self.kv is None else 0
        lengths = [first_key + row.length for row in rows]
        row_ranges = key_ranges(self.mask, self.mask_captured, queries, lengths)
        if not first_key:
            return row_ranges
        return [
            [KeyRange(max(0, start - first_key), stop - first_key, exact)
             for start, stop, exact in ranges if stop > first_key]
            for ranges in row_ranges
        ]  # fmt: skip

    def _batches(self, batch: RowBatch, one_by_one: bool) -> list[RowBatch]:
        """Return a batch in parts of neighbours that see nearly the same keys: reading a few that a
        row does not see costs less than the launches of another batch."""
        if len(batch.rows) == 1:
            return [batch]
        call = self.call
        width = self.hk * (call.k.shape[3] + call.v.shape[3])
        lies_ready = self.attention.by_kernel_alone and not self.keys.copied
        joins = lies_ready or self.keys.copied or _rows_and_heads_join(call.k, call.v)
        fits = joins and (lies_ready or batch.read_keys * width <= 2 * _COPIED_NUMBERS)
        unseen = (batch.read_keys - batch.seen_keys) * width
        one_by_one = one_by_one or self.spec.tiles is not None
        if fits and not one_by_one and unseen <= _UNSEEN_NUMBERS * len(batch.rows):
            return [batch]
        return [part for half in batch.halves() for part in self._batches(half, one_by_one)]

    def _key_blocks(self, batch: RowBatch) -> Iterator[KeyBlock]:
        """Yield the blocks to visit; those of the same heads follow each other."""
        row_count, copied = len(batch.rows), self.keys.copied
        as_it_lies = self.attention.by_kernel_alone and not copied and self.spec.tiles is None
        if as_it_lies and len(batch.ranges) == 1 and batch.ranges[0].exact:
            keys = slice(*batch.ranges[0][:2])  # the kernel has blocks of its own
            yield KeyBlock(slice(0, self.hk), slice(0, self.g), keys, True)
            return
        row_width = row_count * max(self.call.k.shape[3], self.call.v.shape[3], 1)
        page_len = self.call.k.shape[2] if self.keys.paged else 1
        for kv_heads, group_heads, ranges in self._ranges_by_head(batch):
            longest = max((key_range.stop - key_range.start for key_range in ranges), default=0)
            heads_per_block = kv_heads.stop - kv_heads.start
            if copied and longest:  # as few heads at a time as give long stretches of keys
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
                for start, range_stop, exact in ranges:
                    while start < range_stop:
                        page_start = (start // page_len) * page_len
                        stop = min(page_start + keys_per_block, range_stop)
                        yield KeyBlock(block_heads, group_heads, slice(start, stop), exact)
                        start = stop

    def _ranges_by_head(self, batch: RowBatch) -> Iterator[tuple[slice, slice, list[KeyRange]]]:
        """Yield key heads and heads of their groups that see the same keys, and those keys."""
        hk, g, spec, tiles = self.hk, self.g, self.spec, self.call.tiles
        if spec.tiles is None or tiles is None or self.kv is None:
            yield slice(0, hk), slice(0, g), batch.ranges
            return
        mask_b, mask_h, *tile = spec.tiles
        row, first_position = batch.rows[0], self.pairs.first_position(batch.rows[0])
        positions = slice(max(first_position, 0), first_position + batch.q_len)
        capacity = self.kv.capacity(self.call.k)
        for h in range(mask_h):
            mask_row = (row.index if mask_b > 1 else 0) * mask_h + h
            segments = segments_of_row(
                spec, tiles, tuple(tile), mask_row, mask_b * mask_h, positions, capacity  # type: ignore[arg-type]
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

    def _attend_by_page(
        self, page_table: Tensor, row_ranges: list[list[KeyRange]]
    ) -> _Results | None:
        """Return the results of all rows by pages; None where that is impossible or slower."""
        call, kv = self.call, self.kv
        if call.k.dtype != self.acc or not call.k.stride(3) == call.v.stride(3) == 1:
            return None
        if kv is None or kv.k_scale is not None or kv.v_scale is not None:
            return None
        if any(len(ranges) > 1 or (ranges and not ranges[0].exact) for ranges in row_ranges):
            return None
        limits = [(ranges[0].start, ranges[0].stop) if ranges else (0, 0) for ranges in row_ranges]
        key_count = sum(stop - start for start, stop in limits)
        if key_count * self.hk * (call.k.shape[3] + call.v.shape[3]) <= 2 * _COPIED_NUMBERS:
            return None
        q = call.q.unflatten(1, (self.hk, self.g)).flatten(2, 3)
        results = attend_by_page(q, call.k, call.v, page_table, limits, self.spec.scale)
        if results is None:
            return None
        out, lse = results[0].reshape(call.q.shape), results[1].reshape(call.q.shape[:3])
        return _Results(*((out, lse) if call.sink is None else add_sink(out, lse, call.sink)))

    def _attend(self, batch: RowBatch) -> _Results | None:
        """Return the results of a batch; None where its rows, several, must be computed by fewer at
        a time: a row may read what another has no keys for."""
        several = len(batch.rows) > 1
        try:
            results = self._attend_to_blocks(batch)
        except CapturedIndexError:
            if several:
                return None
            raise
        return None if several and batch.ragged and not _finite(results.out) else results

    def _attend_to_blocks(self, batch: RowBatch) -> _Results:
        """Attend to each block, and merge the softmaxes of the blocks."""
        call, acc, hk, g = self.call, self.acc, self.hk, self.g
        heads_shape, q_len = (len(batch.rows), hk, g), batch.q_len
        q = in_dtype(call.q[batch.q_index], acc).reshape(*heads_shape, q_len, call.q.shape[3])
        blocks = list(self._key_blocks(batch))
        all_heads = slice(0, hk), slice(0, g)
        if len(blocks) == 1 and blocks[0][:2] == all_heads:
            m, total, out, max_logit = self._attend_to_block(batch, q, blocks[0], single=True)
        else:
            filled = lambda value, *shape: torch.full(
                (*heads_shape, *shape), value, dtype=acc, device="cpu"
            )
            out, total = filled(0.0, q_len, call.v.shape[3]), filled(0.0, q_len, 1)
            m, max_logit = filled(-math.inf, q_len, 1), filled(-math.inf)
            for block in blocks:
                heads = slice(None), block.kv_heads, block.group_heads
                update = self._attend_to_block(batch, q[heads], block, single=False)
                m_before, m_after = m[heads], torch.maximum(m[heads], update.row_max)
                base = m_after.masked_fill(m_after == -math.inf, 0)
                rescale, rescale_update = (m_before - base).exp_(), (update.row_max - base).exp_()
                m[heads] = m_after
                block_total = rescale_update if update.total is None else (
                    update.total * rescale_update
                )  # fmt: skip
                total[heads] = total[heads] * rescale + block_total
                out[heads] = (out[heads] * rescale).addcmul_(update.out, rescale_update)
                if update.max_logit is not None:
                    max_logit[heads] = torch.maximum(max_logit[heads], update.max_logit)
        row_max = m
        if call.sink is not None:
            sink = call.sink.to(acc).view(hk, g, 1, 1)
            m_after = torch.maximum(m, sink)
            base = m_after.masked_fill(m_after == -math.inf, 0)
            rescale = (m - base).exp_()
            total = (rescale if total is None else total * rescale) + (sink - base).exp_()
            out, m = out * rescale, m_after
        if total is not None:
            m = m + total.log()
            out = out / total.masked_fill(total == 0, 1)
        return _Results(
            out.flatten(1, 2), m[..., 0].flatten(1, 2),
            max_logit.flatten(1, 2) if self.spec.max_logit else None,  # type: ignore[union-attr]
            row_max[..., 0].flatten(1, 2) if self.spec.row_max else None,
        )  # fmt: skip

    def _attend_to_block(
        self, batch: RowBatch, q: Tensor, block: KeyBlock, *, single: bool
    ) -> PartialSoftmax:
        """Return attention of q over a block, `single` if it holds all keys."""
        block, keep_mask, addend = self.pairs.evaluated(batch, block)
        positions = None
        if self.score is not None:
            positions = partial(self.pairs.positions, batch, block, self.score)
        return self.attention(q, batch.cache_rows, block, positions, keep_mask, addend, single)

    def _prefill_row(self, row: CacheRow) -> _Results:
        """Return the results of a row of many queries, by the forward of training."""
        from . import forward  # it stands above this module

        call, kv = self.call, self.kv
        assert kv is not None
        index = slice(row.index, row.index + 1), slice(0, self.hk), slice(0, row.length)
        k, v = call.k[index], call.v[index]
        if kv.page_table is not None or k.dtype != call.q.dtype or kv.k_scale is not None:
            k = self.keys.k(*index).clone()
        if kv.page_table is not None or v.dtype != call.q.dtype or kv.v_scale is not None:
            v = self.keys.v(*index).clone()
        q = in_dtype(call.q[row.q_row : row.q_row + 1, :, row.queries], k.dtype)
        b = call.coords.b + row.index
        row_call = call.replace(
            q=q, k=k, v=in_dtype(v, k.dtype), tiles=None, kv=None,
            coords=call.coords._replace(b=b, q=row.first_position),
        )  # fmt: skip
        out, lse, max_logit, row_max, _ = forward(self.spec.replace(tiles=None), row_call)
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
