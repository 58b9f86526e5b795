"""Few queries over many keys: decoding, with a cache or without.

The time goes into reading keys and values, so they are read once, and no more of them than there
are: the queries of all heads of a group are the rows of one product, every row of the batch has its
own keys, and of those the stretches that the mask's formula allows (`key_ranges`). Blocks of keys
are as large as the caches hold: pages are gathered, and numbers of 8 or 16 bits widened, a block at
a time. Where a row needs nothing but a softmax, PyTorch's flash kernel does it in one pass.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...mods.pointwise import Positions, bind, mask_at, score_at
from ...types import Forward, Spec, acc_dtype, in_dtype
from ..base import Call, graphs, split
from ..cache_rows import Row, rows_of
from .flash import MOST, _finite, _forward, _some_zero
from .key_ranges import Ranges, key_ranges
from .tile_plan import segments_of_row
from .tiled import _exp

_PAIRS = 1 << 20  # of a block: 4 MB of float32, the caches of two cores
_NUMBERS = 1 << 19  # of a block of keys that is copied


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
    """Some keys of a row and the heads that see them."""

    heads: slice  # key heads
    g: slice  # query heads of each
    keys: slice
    full: bool  # every pair is kept


class _Rows:
    """A call, row by row."""

    def __init__(
        self, spec: Spec, call: Call, rows: list[Row], firsts: list[int], kv_first: int
    ) -> None:
        self.spec, self.call, self.rows, self.kv = spec, call, rows, call.kv
        self.firsts, self.kv_first = firsts, kv_first
        self.score, self.mask = graphs(spec)
        of_score, of_mask = split(spec, call.captured)
        self.bound_score = {} if self.score is None else bind(self.score, of_score)
        self.bound_mask = {} if self.mask is None else bind(self.mask, of_mask)
        self.acc = acc_dtype(call.q.dtype)
        self.hk, self.g = call.k.shape[1], call.q.shape[1] // call.k.shape[1]

    def run(self) -> Forward:
        """The results of all rows."""
        spec, call, acc = self.spec, self.call, self.acc
        (b, hq, q_len, _), dv = call.q.shape, call.v.shape[3]
        count = b if self.kv is None else self.kv.lengths.shape[0]
        empty = lambda *shape: torch.empty(shape, dtype=acc, device="cpu")
        out = torch.empty(b, hq, q_len, dv, dtype=spec.out_dtype(call.q.dtype), device="cpu")
        lse = empty(b, hq, q_len)
        row_max = empty(b, hq, q_len) if spec.row_max else empty(0)
        max_logit = empty(count, hq).fill_(-math.inf) if spec.max_logit else empty(0)
        if self.kv is not None and (self.kv.cu_q is not None or not self.rows):
            out.zero_()  # tokens of nobody
            lse.fill_(-math.inf)
            if call.sink is not None:
                lse.copy_(call.sink.to(acc)[:, None])
            row_max.fill_(-math.inf)
        few = [row for row in self.rows if row.i.stop - row.i.start <= MOST]
        ranges = self._ranges(few)
        done = self._at_once(few, ranges, out, lse)
        for n, row in enumerate(self.rows):
            if done:
                break
            at = row.of, slice(None), row.i
            if row.i.stop - row.i.start > MOST:
                o, l, m, r = self._by_itself(row)
            else:
                first = self.firsts[n]
                result = self._plain(row, ranges[row.n]) or self._row(row, first, ranges[row.n])
                o, l, m, r = result
            out[at], lse[at] = o, l
            if spec.max_logit:
                max_logit[row.n] = m
            if spec.row_max:
                row_max[at] = r
        return Forward(out, lse, max_logit, row_max)

    # -- which keys --------------------------------------------------------------------------------

    def _ranges(self, rows: list[Row]) -> dict[int, list[Ranges]]:
        """The stretches of keys, by number of the row."""
        if self.mask is None or not rows or self.spec.tiles is not None:
            return {row.n: [Ranges(0, row.length, self.mask is None)] for row in rows}
        counts = [row.i.stop - row.i.start for row in rows]
        firsts = dict(zip((row.n for row in self.rows), self.firsts, strict=True))
        b = [row.n + self.call.coords.b for row in rows]
        q = [
            firsts[row.n] + i for row, count in zip(rows, counts, strict=True) for i in range(count)
        ]
        per_query = [n for n, count in zip(b, counts, strict=True) for _ in range(count)]
        tensor = lambda x: torch.tensor(x, dtype=torch.int64, device="cpu")
        found = key_ranges(
            self.mask, self.bound_mask, tensor(per_query), tensor(q), counts,
            [self.kv_first + row.length for row in rows],
        )  # fmt: skip
        moved = lambda x: Ranges(max(0, x.start - self.kv_first), x.stop - self.kv_first, x.exact)
        return {
            row.n: [y for y in map(moved, own) if y.start < y.stop]
            for row, own in zip(rows, found, strict=True)
        }

    def _blocks(self, row: Row, first: int, ranges: list[Ranges]) -> Iterator[_Block]:
        """What to visit. Of the same heads, one block after the other."""
        count = row.i.stop - row.i.start
        copied = self.kv is not None and self.kv.page_table is not None
        copied = copied or self.call.k.dtype != self.acc
        width = max(self.call.k.shape[3], self.call.v.shape[3], 1)
        for heads, g, stretches in self._stretches(row, first, ranges):
            longest = max((x.stop - x.start for x in stretches), default=0)
            at_once = g.stop - g.start
            if not longest:
                yield _Block(heads, g, slice(0, 0), True)
                continue
            many = heads.stop - heads.start
            if copied:  # as few heads at a time as give long stretches of keys
                many = min(many, max(1, _NUMBERS // (width * longest)))
            keys = max(128, _PAIRS // (many * at_once * count))
            if copied:
                keys = min(keys, max(128, _NUMBERS // (width * many)))
            page = (
                self.call.k.shape[2]
                if self.kv is not None and self.kv.page_table is not None
                else 1
            )
            keys = max(page, keys - keys % page)
            for h in range(heads.start, heads.stop, many):
                some = slice(h, min(h + many, heads.stop))
                for x in stretches:
                    start = x.start
                    while start < x.stop:
                        stop = min((start // page) * page + keys, x.stop)
                        yield _Block(some, g, slice(start, stop), x.exact)
                        start = stop

    def _stretches(
        self, row: Row, first: int, ranges: list[Ranges]
    ) -> Iterator[tuple[slice, slice, list[Ranges]]]:
        """Heads that see the same keys, and those."""
        hk, g, spec = self.hk, self.g, self.spec
        if spec.tiles is None or self.call.tiles is None:
            yield slice(0, hk), slice(0, g), ranges
            return
        mask_b, mask_h, tile_q, tile_kv = spec.tiles
        count = row.i.stop - row.i.start
        of_b = row.n if mask_b > 1 else 0
        capacity = self.call.kv.capacity(self.call.k) if self.call.kv is not None else 0
        for h in range(mask_h):
            segments = segments_of_row(
                spec, self.call.tiles, (tile_q, tile_kv), of_b * mask_h + h, mask_b * mask_h,
                slice(max(first, 0), first + count), capacity,
            )  # fmt: skip
            found = [
                Ranges(s.start, min(s.stop, row.length), s.full)
                for s in segments if s.start < row.length
            ]  # fmt: skip
            if mask_h == 1:
                yield slice(0, hk), slice(0, g), found
            else:
                yield slice(h // g, h // g + 1), slice(h % g, h % g + 1), found

    # -- keys and values ---------------------------------------------------------------------------

    def _read(self, x: Tensor, scale: Tensor | None, row: Row, heads: slice, keys: slice) -> Tensor:
        """Keys or values of a row, (heads, keys, width), in the accumulation dtype."""
        kv = self.kv
        if kv is None or kv.page_table is None:
            own = x[row.n, heads, keys]
        else:
            page = x.shape[2]
            start, stop = keys.start // page, -(-keys.stop // page)
            at = kv.page_table[row.n, start:stop]
            own = _gathered(x[:, heads], at)
            own = own[:, keys.start - start * page : keys.stop - start * page]
        own = in_dtype(own, self.acc)
        if scale is None:
            return own
        return own * scale[row.n, heads, None, None].to(self.acc)

    # -- the ways to compute a row -----------------------------------------------------------------

    def _at_once(
        self, rows: list[Row], ranges: dict[int, list[Ranges]], out: Tensor, lse: Tensor
    ) -> bool:
        """All rows by one call of PyTorch's flash kernel, where all see the same keys and nothing
        has to be copied; whether that was done."""
        call = self.call
        if not (len(rows) == len(self.rows) > 1 and self._fits_flash()):
            return False
        if self.kv is not None and self.kv.cu_q is not None:
            return False
        first = ranges[rows[0].n]
        if any(ranges[row.n] != first for row in rows) or len(first) != 1 or not first[0].exact:
            return False
        if len(rows) != call.q.shape[0]:
            return False
        keys = slice(first[0].start, first[0].stop)
        q = call.q.reshape(len(rows), self.hk, -1, call.q.shape[3])
        found = self._flash(q, call.k[:, :, keys], call.v[:, :, keys])
        if found is None:
            return False
        o, l = (x.reshape(y.shape) for x, y in zip(found, (out, lse), strict=True))
        o, l = self._with_sink(o, l, call.sink, (1, -1, 1))
        out.copy_(o)
        lse.copy_(l)
        return True

    def _fits_flash(self) -> bool:
        spec, call = self.spec, self.call
        contiguous = call.k.stride(3) == call.v.stride(3) == call.q.stride(3) == 1
        return (
            self.score is None
            and spec.tiles is None
            and not (spec.max_logit or spec.row_max)
            and call.k.dtype == self.acc
            and call.q.shape[3] == call.v.shape[3] > 0
            and contiguous
            and (self.kv is None or (
                self.kv.page_table is None and self.kv.k_scale is None and self.kv.v_scale is None))
        )  # fmt: skip

    def _flash(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """out and lse of packed queries; None where a row may be NaN."""
        if not k.shape[2]:
            return None
        out, lse = _forward(q, k, v, 0.0, False, scale=self.spec.scale)
        if _some_zero(lse) and not (_finite(q) and _finite(k)):
            return None
        return out, lse

    def _plain(self, row: Row, ranges: list[Ranges]) -> tuple | None:
        """A row by the flash kernel, where there is nothing between its products but a softmax."""
        if not (self._fits_flash() and len(ranges) == 1 and ranges[0].exact):
            return None
        call, keys = self.call, slice(ranges[0].start, ranges[0].stop)
        q = call.q[row.of, :, row.i]
        found = self._flash(
            q.reshape(1, self.hk, -1, q.shape[2]), call.k[row.n : row.n + 1, :, keys],
            call.v[row.n : row.n + 1, :, keys],
        )  # fmt: skip
        if found is None:
            return None
        out, lse = found[0].reshape(*q.shape[:2], -1), found[1].reshape(q.shape[:2])
        return *self._with_sink(out, lse, call.sink, (-1, 1)), None, None

    def _with_sink(
        self, out: Tensor, lse: Tensor, sink: Tensor | None, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        if sink is None:
            return out, lse
        whole = torch.logaddexp(lse, sink.to(self.acc).view(shape))
        return out * (lse - whole).exp_()[..., None], whole

    def _row(self, row: Row, first: int, ranges: list[Ranges]) -> tuple:
        """A row by blocks of torch ops, its softmax online."""
        spec, call, acc, hk, g = self.spec, self.call, self.acc, self.hk, self.g
        count, dv = row.i.stop - row.i.start, call.v.shape[3]
        q = call.q[row.of, :, row.i].to(acc).reshape(hk, g, count, -1)
        new = lambda value, *shape: torch.full(shape, value, dtype=acc, device="cpu")
        out, total = new(0.0, hk, g, count, dv), new(0.0, hk, g, count, 1)
        m, largest = new(-math.inf, hk, g, count, 1), new(-math.inf, hk, g)
        k_scale, v_scale = (None, None) if self.kv is None else (self.kv.k_scale, self.kv.v_scale)
        q_idx = torch.arange(first, first + count, device="cpu")[:, None]
        b = torch.full((), row.n + call.coords.b, dtype=torch.int64, device="cpu")
        heads = torch.arange(call.coords.h, call.coords.h + hk * g, device="cpu").view(hk, g, 1, 1)
        for block in self._blocks(row, first, ranges):
            at = block.heads, block.g
            shape = (*(x.stop - x.start for x in at), count, block.keys.stop - block.keys.start)
            if not shape[3]:
                continue
            of_q = q[at].reshape(shape[0], shape[1] * count, -1)
            k = self._read(call.k, k_scale, row, block.heads, block.keys)
            s = torch.empty(shape, dtype=acc, device="cpu")
            flat = s.view(shape[0], -1, shape[3])
            torch.baddbmm(flat, of_q, k.mT, beta=0, alpha=spec.scale, out=flat)
            positions, kept, t = None, None, s
            if self.score is not None or (self.mask is not None and not block.full):
                kv_idx = torch.arange(
                    block.keys.start + self.kv_first, block.keys.stop + self.kv_first, device="cpu"
                )
                positions = Positions(b, heads[at], q_idx, kv_idx)
            if self.mask is not None and not block.full:
                kept = mask_at(self.mask, self.bound_mask, positions)  # type: ignore[arg-type]
            if self.score is not None:
                given = s.clone() if spec.max_logit else s
                (t,), _ = score_at(self.score, self.bound_score, positions, given, kept)  # type: ignore[arg-type]
                t = torch.as_tensor(t, dtype=acc, device="cpu").expand(shape)
            if kept is not None:
                t = t.masked_fill(~kept, -math.inf)
            if spec.max_logit:
                logits = t if self.score is None else s.masked_fill(t == -math.inf, -math.inf)
                largest[at] = torch.maximum(largest[at], logits.amax((2, 3)))
            before = m[at]
            now = torch.maximum(before, t.amax(-1, keepdim=True))
            base = now.masked_fill(now == -math.inf, 0)
            p = _exp(t - base)
            rescale = (before - base).exp_()
            m[at] = now
            total[at] = total[at] * rescale + p.sum(-1, keepdim=True)
            v = self._read(call.v, v_scale, row, block.heads, block.keys)
            o = (out[at] * rescale).view(shape[0], -1, dv)
            out[at] = torch.baddbmm(o, p.view(shape[0], -1, shape[3]), v).view(out[at].shape)
        row_max = m
        if call.sink is not None:
            sink = call.sink.to(acc).view(hk, g, 1, 1)
            now = torch.maximum(m, sink)
            base = now.masked_fill(now == -math.inf, 0)
            rescale = (m - base).exp_()
            total, out, m = total * rescale + (sink - base).exp_(), out * rescale, now
        lse = (m + total.log())[..., 0]
        out = out / total.masked_fill(total == 0, 1)
        of_heads = lambda x: x.reshape(hk * g, *x.shape[2:])
        return of_heads(out), of_heads(lse), largest.view(-1), of_heads(row_max[..., 0])

    def _by_itself(self, row: Row) -> tuple:
        """A row of many queries: the call of training, at their positions."""
        from . import forward  # it stands above this module

        call, kv = self.call, self.kv
        assert kv is not None
        whole, keys = slice(0, self.hk), slice(0, row.length)
        plain = kv.page_table is None and call.k.dtype == call.q.dtype
        read = lambda x, scale: (
            x[row.n : row.n + 1, :, keys] if plain and scale is None
            else self._read(x, scale, row, whole, keys)[None]
        )  # fmt: skip
        k, v = read(call.k, kv.k_scale), read(call.v, kv.v_scale)
        one = call.replace(
            q=in_dtype(call.q[row.of : row.of + 1, :, row.i], k.dtype), k=k, v=in_dtype(v, k.dtype),
            tiles=None, kv=None,
            coords=call.coords._replace(b=call.coords.b + row.n, q=row.first),
        )  # fmt: skip
        out, lse, max_logit, row_max = forward(replace(self.spec, tiles=None), one)
        return (
            out[0], lse[0], max_logit[0] if self.spec.max_logit else None,
            row_max[0] if self.spec.row_max else None,
        )  # fmt: skip


def _gathered(x: Tensor, pages: Tensor) -> Tensor:
    """(heads, keys, width) of some pages (pages, heads, page, width), copied once where a page lies
    in one piece."""
    if x.dtype == torch.float8_e4m3fn:  # PyTorch selects none
        return _gathered(x.view(torch.uint8), pages).contiguous().view(x.dtype)
    by_key = x.transpose(1, 2)  # (pages, page, heads, width)
    if by_key.is_contiguous() and not x.is_contiguous():
        return by_key.index_select(0, pages).flatten(0, 1).transpose(0, 1)
    return x.index_select(0, pages).transpose(0, 1).flatten(1, 2)
