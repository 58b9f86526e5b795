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
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import CapturedIndexError
from ...mods.evaluation.pointwise import score_at
from ...types import Forward, Spec, in_dtype
from ..base import Call
from ..cache_rows import CacheRow, rows_of
from .decode_batches import RowBatch, batch_rows, one_batch_per_row
from .decode_inputs import COPIED_NUMBERS, DecodeInputs, KeyBlock
from .decode_pages import attend_by_page
from .flash import MAX_DECODE_QUERIES, _finite, _forward, _some_zero, add_sink, in_half
from .key_ranges import KeyRange
from .tiled import _exp

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


class _PartialSoftmax(NamedTuple):
    """Attention over a block of keys, before its division."""

    row_max: Tensor  # the largest score of every query
    total: Tensor  # the sum of exponentials, relative to row_max
    out: Tensor  # the values times those exponentials
    max_logit: Tensor | None  # of every head, where the spec asks for it


class _DecodeCall(DecodeInputs):
    """A call with few queries, computed a batch of rows at a time."""

    def run(self) -> Forward:
        """Return the results of all rows."""
        call, kv = self.call, self.kv
        decode_rows = [
            row for row in self.rows
            if row.queries.stop - row.queries.start <= MAX_DECODE_QUERIES
        ]  # fmt: skip
        row_ranges = self.row_ranges(decode_rows)
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
        max_numbers = None if self.fits_flash else 2 * COPIED_NUMBERS
        return batch_rows(rows, row_ranges, key_width, max_numbers)

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
        return numbers <= 2 * COPIED_NUMBERS

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
            keep_mask = self.mask_block(batch, None, slice(start, stop))
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
        blocks = [b for b in self.key_blocks(batch) if b.keys.start < b.keys.stop]
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

    def _attend_block(self, batch: RowBatch, q: Tensor, block: KeyBlock) -> _PartialSoftmax:
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
            positions = self.positions_of(batch, heads, block.keys)
        if not block.full:
            keep_mask = self.mask_block(batch, positions, block.keys)
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
