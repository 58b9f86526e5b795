"""Few queries over many keys: decoding, with a cache or without.

The time goes into reading keys and values, so they are read once, and no more of them than there
are: the queries of all heads of a group are the rows of one product, every row of the batch has its
own keys, and of those the stretches that the mask's formula allows (`key_ranges`). Blocks of keys
are as large as the caches hold: pages are gathered, and numbers of 8 or 16 bits widened, a block at
a time. Where a row needs nothing but a softmax, PyTorch's flash kernel does it in one pass; a mask
that is no range of keys is added to it. Small calls are made of launches: their rows are computed
together, over the keys that any of them sees.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...errors import CapturedIndexError
from ...mods.evaluation.pointwise import Positions, bind, mask_at, score_at
from ...types import Forward, Spec, acc_dtype, in_dtype
from ..base import Call, graphs, split
from ..cache_rows import Row, rows_of
from .few_keys import Keys
from .few_pages import by_pages
from .few_parts import Part, alone, together
from .flash import MOST, _finite, _forward, _some_zero, in_half
from .key_ranges import Ranges, key_ranges
from .tile_plan import segments_of_row
from .tiled import _exp

_PAIRS = 1 << 20  # of a block: 4 MB of float32, the caches of two cores
_NUMBERS = 1 << 19  # of a block of keys that is copied
_BIAS = 1 << 22  # numbers of a mask that is added


def suits(spec: Spec, call: Call) -> bool:
    """Whether a call without a cache is one of few queries: shared keys, or 16-bit ones, are then
    read once."""
    q_len, kv_len, at = call.q.shape[2], call.k.shape[2], call.coords
    return (
        0 < q_len <= MOST < kv_len
        and spec.tiles is None
        and spec.dropout == 0
        and at.q_pos is None
        and at.kv_pos is None
    )


def forward(spec: Spec, call: Call) -> Forward:
    """Of a call without a cache."""
    b, _, q_len, _ = call.q.shape
    first, kv_len = call.coords.q, call.k.shape[2]
    rows = [Row(n, n, slice(0, q_len), kv_len) for n in range(b)]
    return _Rows(spec, call, rows, [first] * b, call.coords.kv).run()


def infer(spec: Spec, call: Call) -> Forward:
    """Of a call over a cache; rows of many queries are calls of their own."""
    rows = rows_of(call)
    return _Rows(spec, call, rows, [row.first for row in rows], 0).run()


@dataclass
class _Block:
    """Some keys of a part and the heads that see them."""

    heads: slice  # key heads
    g: slice  # query heads of each
    keys: slice
    full: bool  # every pair is kept


class _Rows:
    """A call, a few rows at a time."""

    def __init__(
        self, spec: Spec, call: Call, rows: list[Row], firsts: list[int], kv_first: int
    ) -> None:
        self.hk, self.g = call.k.shape[1], call.q.shape[1] // call.k.shape[1]
        self.spec, self.call, self.kv = spec, call, call.kv
        self.rows = rows if self.g else []  # without heads there is nothing to compute
        self.first = {row.n: first for row, first in zip(rows, firsts, strict=True)}
        self.kv_first = kv_first
        self.score, self.mask = graphs(spec)
        self.of_score, self.of_mask = split(spec, call.captured)
        self.acc = acc_dtype(call.q.dtype)
        self.keys = Keys(call)

    @cached_property
    def bound_score(self) -> dict:
        """What the score captures, by name."""
        return {} if self.score is None else bind(self.score, self.of_score)

    @cached_property
    def bound_mask(self) -> dict:
        """What the mask captures, by name."""
        return {} if self.mask is None else bind(self.mask, self.of_mask)

    def run(self) -> Forward:
        """The results of all rows."""
        spec, call, acc, kv = self.spec, self.call, self.acc, self.kv
        few = [row for row in self.rows if row.i.stop - row.i.start <= MOST]
        ranges = self._ranges(few)
        found, parts = self._by_pages(few, ranges), []
        if found is None:
            parts = self._parts(few, ranges)
            whole = len(parts) == 1 and len(few) == call.q.shape[0]
            if whole and (kv is None or kv.cu_q is None):
                found = self._together(parts[0])
        if found is not None:
            out, lse, *maxima = found
            out = in_dtype(out, spec.out_dtype(call.q.dtype)).contiguous()
            lse = lse.contiguous()  # as operators say that they are
            return Forward(out, lse, *[lse.new_empty(0) if x is None else x for x in maxima])
        (b, hq, q_len, _), dv = call.q.shape, call.v.shape[3]
        count = b if kv is None else kv.lengths.shape[0]
        empty = lambda *shape: torch.empty(shape, dtype=acc, device="cpu")
        out = torch.empty(b, hq, q_len, dv, dtype=spec.out_dtype(call.q.dtype), device="cpu")
        lse = empty(b, hq, q_len)
        row_max = empty(b, hq, q_len) if spec.row_max else empty(0)
        max_logit = empty(count, hq).fill_(-math.inf) if spec.max_logit else empty(0)
        if kv is not None and (kv.cu_q is not None or not self.rows):
            out.zero_()  # tokens of nobody
            lse.fill_(-math.inf)
            if call.sink is not None:
                lse.copy_(call.sink.to(acc)[:, None])
            row_max.fill_(-math.inf)

        def put(at: tuple[slice | int, ...], of: slice | int, found: tuple) -> None:
            out[at], lse[at], largest, row_largest = found
            if spec.max_logit:
                max_logit[of] = largest
            if spec.row_max:
                row_max[at] = row_largest

        for part in parts:
            found = self._together(part)
            if found is None:
                parts.extend(alone(part.rows, part.own))
            else:
                put(part.at, part.of, found)
        for row in self.rows:
            if row.i.stop - row.i.start > MOST:
                put((row.of, slice(None), row.i), row.n, self._by_itself(row))
        return Forward(out, lse, max_logit, row_max)

    # -- which rows and keys -----------------------------------------------------------------------

    def _parts(self, rows: list[Row], ranges: list[list[Ranges]]) -> list[Part]:
        """The rows, together where that can be and is worth it."""
        call, kv = self.call, self.kv
        packed = kv is not None and kv.cu_q is not None
        if packed or self.spec.tiles is not None:
            return alone(rows, ranges)
        if not (self.fits_flash or self.keys.copied or _joins(call.k, call.v)):
            return alone(rows, ranges)
        width = self.hk * (call.k.shape[3] + call.v.shape[3])
        return together(rows, ranges, width, None if self.fits_flash else 2 * _NUMBERS)

    def _ranges(self, rows: list[Row]) -> list[list[Ranges]]:
        """The stretches of keys of every row."""
        if self.mask is None or not rows or self.spec.tiles is not None:
            exact = self.mask is None
            return [[Ranges(0, row.length, exact)] if row.length else [] for row in rows]
        counts = [row.i.stop - row.i.start for row in rows]
        b = [row.n + self.call.coords.b for row in rows]
        q = [
            self.first[row.n] + i for row, count in zip(rows, counts, strict=True)
            for i in range(count)
        ]  # fmt: skip
        per_query = [n for n, count in zip(b, counts, strict=True) for _ in range(count)]
        lengths = [self.kv_first + row.length for row in rows]
        found = key_ranges(self.mask, self.of_mask, per_query, q, counts, lengths)
        if not self.kv_first:
            return found
        moved = lambda x: Ranges(max(0, x.start - self.kv_first), x.stop - self.kv_first, x.exact)
        return [[y for y in map(moved, own) if y.start < y.stop] for own in found]

    def _positions(self, part: Part, heads: Tensor, keys: slice) -> Positions:
        """Of (rows, key heads, heads of a group, queries, keys)."""
        first = [self.first[row.n] for row in part.rows]
        q_idx = torch.arange(part.count, device="cpu")[:, None]
        b = torch.arange(part.of.start, part.of.stop, device="cpu") + self.call.coords.b
        start = torch.tensor(first, device="cpu")
        if len(first) == 1:
            b = b[0]
        else:
            b = b.view(-1, 1, 1, 1, 1)
            start = start.view(b.shape) if len(set(first)) > 1 else start[0]
        kv_idx = torch.arange(keys.start + self.kv_first, keys.stop + self.kv_first, device="cpu")
        return Positions(b, heads, q_idx + start, kv_idx)

    @cached_property
    def heads(self) -> Tensor:
        """The query heads, (key heads, heads of a group, 1, 1)."""
        first, count = self.call.coords.h, self.hk * self.g
        return torch.arange(first, first + count, device="cpu").view(self.hk, self.g, 1, 1)

    def _kept(self, part: Part, positions: Positions | None, keys: slice) -> Tensor:
        """bool, broadcasting to (rows, key heads, heads of a group, queries, keys)."""
        by_row = lambda ns: torch.tensor(ns, device="cpu").view(-1, 1, 1, 1, 1)
        at = torch.arange(keys.start, keys.stop, device="cpu")
        if all(len(own) <= 1 and (not own or own[0].exact) for own in part.own):
            starts, stops = zip(*[own[0][:2] if own else (0, 0) for own in part.own], strict=True)
            kept = at < by_row(stops)
            return kept if max(starts) <= keys.start else kept & (at >= by_row(starts))
        assert self.mask is not None
        if positions is None:
            positions = self._positions(part, self.heads, keys)
        kept = mask_at(self.mask, self.bound_mask, positions)
        if part.ragged:
            kept = kept & (at < by_row([row.length for row in part.rows]))
        return kept

    def _blocks(self, part: Part) -> Iterator[_Block]:
        """What to visit. Of the same heads, one block after the other."""
        rows, copied = len(part.rows), self.keys.copied
        width = rows * max(self.call.k.shape[3], self.call.v.shape[3], 1)
        for heads, g, stretches in self._stretches(part):
            longest = max((x.stop - x.start for x in stretches), default=0)
            at_once = g.stop - g.start
            if not longest:
                yield _Block(heads, g, slice(0, 0), True)
                continue
            many = heads.stop - heads.start
            if copied:  # as few heads at a time as give long stretches of keys
                many = min(many, max(1, _NUMBERS // (width * longest)))
            keys = max(128, _PAIRS // (rows * many * at_once * part.count))
            if copied:
                keys = min(keys, max(128, _NUMBERS // (width * many)))
            page = self.call.k.shape[2] if self.keys.paged else 1
            keys = max(page, keys - keys % page)
            for h in range(heads.start, heads.stop, many):
                some = slice(h, min(h + many, heads.stop))
                for x in stretches:
                    start = x.start
                    while start < x.stop:
                        stop = min((start // page) * page + keys, x.stop)
                        yield _Block(some, g, slice(start, stop), x.exact)
                        start = stop

    def _stretches(self, part: Part) -> Iterator[tuple[slice, slice, list[Ranges]]]:
        """Heads that see the same keys, and those."""
        hk, g, spec = self.hk, self.g, self.spec
        if spec.tiles is None or self.call.tiles is None:
            yield slice(0, hk), slice(0, g), part.ranges
            return
        mask_b, mask_h, tile_q, tile_kv = spec.tiles
        row, first = part.rows[0], self.first[part.rows[0].n]
        of_b = row.n if mask_b > 1 else 0
        capacity = self.call.kv.capacity(self.call.k) if self.call.kv is not None else 0
        for h in range(mask_h):
            segments = segments_of_row(
                spec, self.call.tiles, (tile_q, tile_kv), of_b * mask_h + h, mask_b * mask_h,
                slice(max(first, 0), first + part.count), capacity,
            )  # fmt: skip
            found = [
                Ranges(s.start, min(s.stop, row.length), s.full)
                for s in segments if s.start < row.length
            ]  # fmt: skip
            if mask_h == 1:
                yield slice(0, hk), slice(0, g), found
            else:
                yield slice(h // g, h // g + 1), slice(h % g, h % g + 1), found

    # -- the ways to compute a part ----------------------------------------------------------------

    def _together(self, part: Part) -> tuple | None:
        """out, lse, and the two maxima (None where they are not asked for) of a part of one row or
        more. None where its rows have to be looked at one by one, and there are several."""
        found = None
        if self.softmax_alone:
            small = self.keys.paged and self._small(len(part.rows) * (part.stop - part.start))
            found = self._by_flash(part) if small or not self.keys.paged else None
        several = len(part.rows) > 1
        if found is None and several and self.fits_flash:
            return None
        if found is None:
            try:
                found = self._by_blocks(part)
            except CapturedIndexError:  # maybe where a row has no keys any more
                if several:
                    return None
                raise
            if several and part.ragged and not _finite(found[0]):
                return None  # something that is no key of a row may show
        return found

    @cached_property
    def softmax_alone(self) -> bool:
        """Whether there is nothing between the products but a softmax, in a dtype that PyTorch's
        flash kernel computes in."""
        spec, call = self.spec, self.call
        dtype = call.q.dtype
        known = dtype == self.acc or (in_half(dtype) and spec.out_dtype(dtype) == dtype)
        return (
            self.score is None
            and spec.tiles is None
            and not (spec.max_logit or spec.row_max)
            and known
            and call.k.dtype == dtype
            and call.q.shape[3] == call.v.shape[3] > 0
            and call.k.stride(3) == call.v.stride(3) == call.q.stride(3) == 1
            and (self.kv is None or (self.kv.k_scale is None and self.kv.v_scale is None))
        )

    def _small(self, keys: int) -> bool:
        """Whether so many keys of all heads, with their values, fit into the caches."""
        return keys * self.hk * (self.call.k.shape[3] + self.call.v.shape[3]) <= 2 * _NUMBERS

    @cached_property
    def fits_flash(self) -> bool:
        """Whether that kernel takes keys and values as they lie, row by row."""
        return self.softmax_alone and not self.keys.paged

    def _by_pages(self, rows: list[Row], ranges: list[list[Ranges]]) -> tuple | None:
        """All rows by pages; None where that cannot be, or is no gain."""
        call, kv = self.call, self.kv
        if kv is None or kv.page_table is None or kv.cu_q is not None or not self.softmax_alone:
            return None
        if any(len(own) > 1 or (own and not own[0].exact) for own in ranges):
            return None
        if self._small(sum(own[0].stop - own[0].start for own in ranges if own)):
            return None
        q = call.q.unflatten(1, (self.hk, self.g)).flatten(2, 3)
        seen = [own[0] if own else None for own in ranges]
        found = by_pages(q, call.k, call.v, kv.page_table, seen, self.spec.scale)
        if found is None:
            return None
        return self._with_sink(found[0].reshape(call.q.shape), found[1].reshape(call.q.shape[:3]))

    def _with_sink(self, out: Tensor, lse: Tensor) -> tuple:
        if self.call.sink is not None:
            whole = torch.logaddexp(lse, self.call.sink.to(self.acc)[:, None])
            base = whole.masked_fill(whole == -math.inf, 0)
            out, lse = out * (lse - base).exp_()[..., None], whole
        return out, lse, None, None

    def _by_flash(self, part: Part) -> tuple | None:
        """By PyTorch's flash kernel; None where that cannot do it, or a row may be NaN."""
        call, rows, start, stop = self.call, len(part.rows), part.start, part.stop
        if start == stop:
            return None
        kept = None
        if len(part.ranges) != 1 or not part.ranges[0].exact:
            kept = self._added(part)
            if kept is None:
                return None
        given, keys = call.q[part.at], slice(start, stop)
        q = given.reshape(rows, self.hk, self.g * part.count, given.shape[3])
        heads = slice(0, self.hk)
        k, v = (self.keys.as_it_is(x, part.of, heads, keys) for x in (call.k, call.v))
        bias = None
        if kept is not None:
            bias = torch.zeros(kept.shape, dtype=q.dtype, device="cpu")
            bias.masked_fill_(~kept, -math.inf)
        out, lse = _forward(q, k, v, 0.0, False, attn_mask=bias, scale=self.spec.scale)
        if kept is not None and not math.isfinite(out.sum(dtype=self.acc) + lse.sum()):
            return None  # a mask that is added lets NaN and inf through
        if _some_zero(lse):
            if kept is not None:  # of a row that sees nothing
                lse = lse.masked_fill(~kept.any(-1), -math.inf)
            if _some_zero(lse) and not (_finite(q) and _finite(k)):
                return None
        out, lse = out.reshape(given.shape), lse.reshape(given.shape[:3])
        return self._with_sink(out, lse)

    def _added(self, part: Part) -> Tensor | None:
        """Which pairs are kept, as a mask that broadcasts to (rows, key heads, queries of a
        group, keys); None where it would be large, or cost more than it is worth."""
        start, stop = part.start, part.stop
        size = (stop - start) * len(part.rows) * part.count
        if self.mask is not None and self.mask.uses("h"):
            size *= self.hk * self.g
        if size > _BIAS or 2 * sum(x.stop - x.start for x in part.ranges) < stop - start:
            return None
        keys = slice(start, stop)
        try:
            kept = self._kept(part, None, keys)
        except CapturedIndexError:
            return None
        kept = kept.view((1,) * (5 - kept.dim()) + kept.shape)
        if kept.shape[1:4] == (1, 1, 1):
            return kept[:, :, 0]
        rows, heads = kept.shape[:2]
        return kept.expand(rows, heads, self.g, part.count, stop - start).flatten(2, 3)

    def _by_blocks(self, part: Part) -> tuple:
        """By blocks of torch ops, each with a softmax of its own, which are merged."""
        call, acc, hk, g = self.call, self.acc, self.hk, self.g
        of_heads, count, dv = (len(part.rows), hk, g), part.count, call.v.shape[3]
        q = call.q[part.at].to(acc).reshape(*of_heads, count, call.q.shape[3])
        blocks = [x for x in self._blocks(part) if x.keys.start < x.keys.stop]
        if len(blocks) == 1 and (blocks[0].heads, blocks[0].g) == (slice(0, hk), slice(0, g)):
            m, total, out, largest = self._block(part, q, blocks[0])
        else:
            new = lambda value, *shape: torch.full(
                (*of_heads, *shape), value, dtype=acc, device="cpu"
            )
            out, total = new(0.0, count, dv), new(0.0, count, 1)
            m, largest = new(-math.inf, count, 1), new(-math.inf)
            for block in blocks:
                at = slice(None), block.heads, block.g
                own, its_total, its_out, its_largest = self._block(part, q[at], block)
                before, now = m[at], torch.maximum(m[at], own)
                base = now.masked_fill(now == -math.inf, 0)
                old, new_one = (before - base).exp_(), (own - base).exp_()
                m[at] = now
                total[at] = total[at] * old + its_total * new_one
                out[at] = (out[at] * old).addcmul_(its_out, new_one)
                if its_largest is not None:
                    largest[at] = torch.maximum(largest[at], its_largest)
        row_max = m
        if call.sink is not None:
            sink = call.sink.to(acc).view(hk, g, 1, 1)
            now = torch.maximum(m, sink)
            base = now.masked_fill(now == -math.inf, 0)
            rescale = (m - base).exp_()
            total, out, m = total * rescale + (sink - base).exp_(), out * rescale, now
        lse = (m + total.log())[..., 0].flatten(1, 2)
        out = (out / total.masked_fill(total == 0, 1)).flatten(1, 2)
        return (
            out, lse, largest.flatten(1, 2) if self.spec.max_logit else None,
            row_max[..., 0].flatten(1, 2) if self.spec.row_max else None,
        )  # fmt: skip

    def _block(self, part: Part, q: Tensor, block: _Block) -> tuple:
        """Of q `(rows, key heads, heads of a group, queries, d)` over some keys: the largest score
        of every query and, relative to it, the sum of exponentials and the values times them; and
        the largest logit of every head, where it is asked for."""
        spec, acc = self.spec, self.acc
        keys = block.keys.stop - block.keys.start
        shape = *q.shape[:4], keys
        k = self.keys.k(part.of, block.heads, block.keys)
        s = self.keys.scratch("s", shape, acc)
        of_q = q.flatten(2, 3).flatten(0, 1)
        flat = s.view(*of_q.shape[:2], keys)
        torch.baddbmm(flat, of_q, k.mT, beta=0, alpha=spec.scale, out=flat)
        positions, kept, t, largest = None, None, s, None
        if self.score is not None or (self.mask is not None and not block.full):
            heads = self.heads[block.heads, block.g]
            positions = self._positions(part, heads, block.keys)
        if not block.full:
            kept = self._kept(part, positions, block.keys)
        if self.score is not None:
            given = s.clone() if spec.max_logit else s
            (t,), _ = score_at(self.score, self.bound_score, positions, given, kept)  # type: ignore[arg-type]
            t = torch.as_tensor(t, dtype=acc, device="cpu").expand(shape)
        if kept is not None:
            t = t.masked_fill(~kept, -math.inf)
        if spec.max_logit:
            logits = t if self.score is None else s.masked_fill(t == -math.inf, -math.inf)
            largest = logits.amax((3, 4))
        m = t.amax(-1, keepdim=True)
        base = m.masked_fill(m == -math.inf, 0)
        p = _exp(torch.sub(t, base, out=self.keys.scratch("p", shape, acc)))
        total = p.sum(-1, keepdim=True)
        v = self.keys.v(part.of, block.heads, block.keys)
        out = torch.bmm(p.view(flat.shape), v).view(*q.shape[:4], v.shape[2])
        return m, total, out, largest

    def _by_itself(self, row: Row) -> tuple:
        """A row of many queries: the call of training, at their positions."""
        from . import forward  # it stands above this module

        call, kv = self.call, self.kv
        assert kv is not None
        at = slice(row.n, row.n + 1), slice(0, self.hk), slice(0, row.length)
        plain = kv.page_table is None and call.k.dtype == call.q.dtype
        k = call.k[at] if plain and kv.k_scale is None else self.keys.k(*at)[None].clone()
        v = call.v[at] if plain and kv.v_scale is None else self.keys.v(*at)[None].clone()
        one = call.replace(
            q=in_dtype(call.q[row.of : row.of + 1, :, row.i], k.dtype), k=k, v=in_dtype(v, k.dtype),
            tiles=None, kv=None,
            coords=call.coords._replace(b=call.coords.b + row.n, q=row.first),
        )  # fmt: skip
        out, lse, max_logit, row_max = forward(self.spec.replace(tiles=None), one)
        return (
            out[0], lse[0], max_logit[0] if self.spec.max_logit else None,
            row_max[0] if self.spec.row_max else None,
        )  # fmt: skip


def _joins(*caches: Tensor) -> bool:
    """Whether rows and heads are one dimension of memory, so that a product takes several rows."""
    return all(x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in caches)
