"""The plan of all tokens and some heads."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...backends import get
from ...backends.base import Call, delta_of
from ...types import Coords, Forward, Grads, Spec, acc_dtype
from . import collective
from .routes import Pieces, Transport
from .setting import Plan, Setting, added


class Ulysses(Plan):
    """All tokens and some heads."""

    name = "ulysses"

    def __init__(self, setting: Setting) -> None:
        s, self.group, ranks = setting, setting.group, setting.q.ranks
        hq, hk = s.sizes.hq, s.sizes.hk
        self.size, self.rank, self.offsets = hq // hk, s.rank, s.offsets
        cuts = [hq * n // ranks for n in range(ranks + 1)]
        self.q_heads = [range(*cuts[n : n + 2]) for n in range(ranks)]
        self.kv_heads = [
            range(of.start // self.size, -(-of.stop // self.size)) if len(of) else range(0)
            for of in self.q_heads
        ]
        self.q, self.kv = _Rows(s.q, s.device), _Rows(s.kv, s.device)
        self.calls = []  # heads of q here, of k here, the block mask's tiles
        mine = self.q_heads[s.rank]
        for heads in _same_groups(mine, self.size):
            first = heads.start // self.size - self.kv_heads[s.rank].start
            tiles = known = None
            if s.whole is not None and s.whole.in_order:
                tiles = s.whole.of(heads, None, None)
                known = (s.whole.b, len(heads) if s.whole.h > 1 else 1, *s.whole.tile)
            here = slice(heads.start - mine.start, heads.stop - mine.start)
            of_kv = slice(first, first + -(-len(heads) // self.size))
            self.calls.append((here, of_kv, tiles, known, heads.start))
        away_q = s.q.length - int(s.q.sizes[s.rank])
        away_kv = s.kv.length - int(s.kv.sizes[s.rank])
        d, dv = s.sizes.d, s.sizes.dv
        back = (hq - len(mine)) * int(s.q.sizes[s.rank]) * dv
        self.received = s.sizes.b * (
            away_q * len(mine) * d + away_kv * len(self.kv_heads[s.rank]) * (d + dv) + back
        )

    def forward(self, spec: Spec, call: Call, transport: Transport) -> Forward:
        """See `Plan`."""
        q, k, v = self._here(call)
        b, hq, acc = q.shape[0], q.shape[1], acc_dtype(q.dtype)
        length = self.q.length
        out = q.new_empty((b, hq, length, v.shape[3]), dtype=spec.out_dtype(q.dtype))
        lse = q.new_empty((b, hq, length), dtype=acc)
        top = q.new_full((b, call.q.shape[1] if spec.max_logit else 0), -torch.inf, dtype=acc)
        row_max = torch.empty_like(lse) if spec.row_max else None
        mine = self.q_heads[self.rank]
        for here, of_kv, tiles, known, first in self.calls:
            spec_, part = self._part(spec, call, q, k, v, here, of_kv, tiles, known, first)
            found = get(spec.backend).forward(spec_, part)
            out[:, here], lse[:, here] = found.out, found.lse
            if spec.max_logit:
                top[:, mine.start + here.start : mine.start + here.stop] = found.max_logit
            if row_max is not None:
                row_max[:, here] = found.row_max
        return Forward(
            self._home(out),
            self._home(lse[..., None])[..., 0],
            top if spec.max_logit else lse.new_empty(0),
            lse.new_empty(0) if row_max is None else self._home(row_max[..., None])[..., 0],
        )

    def backward(self, spec, call, transport, out, lse, dout, dlse, needs):
        acc = acc_dtype(call.q.dtype)
        spec = replace(spec, exact_kv=True)
        # The owner of a row knows its delta = rowsum(dout∘out) − dlse: with an out of 0, whose
        # product is 0, the gradient of lse that gives it is −delta. So out is not sent.
        rows = torch.stack([lse, delta_of(out, dout, dlse, acc)], -1)
        q, k, v = self._here(call)
        do = self._over(dout, self.q, self.q_heads)
        rows = self._over(rows, self.q, self.q_heads)
        nothing = do.new_zeros(()).expand(do.shape)
        dq, dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (q, k, v))
        dsink = None if call.sink is None else torch.zeros_like(call.sink, dtype=acc)
        captured: list[list[Tensor | None]] = []
        mine = self.q_heads[self.rank]
        for here, of_kv, tiles, known, first in self.calls:
            spec_, part = self._part(spec, call, q, k, v, here, of_kv, tiles, known, first)
            grads = get(spec.backend).backward(
                spec_, part, nothing[:, here], rows[:, here, :, 0].contiguous(),
                do[:, here], -rows[:, here, :, 1], needs,
            )  # fmt: skip
            dq[:, here] = grads.q.to(acc)
            dk[:, of_kv] += grads.k
            dv[:, of_kv] += grads.v
            if dsink is not None and grads.sink is not None:
                dsink[mine.start + here.start : mine.start + here.stop] = grads.sink
            captured.append(grads.captured)
        learned = [
            torch.zeros(t.shape, dtype=acc, device=t.device) if need else None
            for t, need in zip(call.captured.tensors, needs, strict=False)
        ]
        return Grads(
            self._home(dq), self._home_keys(dk, call.k), self._home_keys(dv, call.v), dsink,
            added([learned, *captured]),
        )  # fmt: skip

    def _here(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        kv = torch.cat([call.k, call.v], -1)
        q, kv = self._over(call.q, self.q, self.q_heads), self._over(kv, self.kv, self.kv_heads)
        return q, kv[..., : call.k.shape[3]], kv[..., call.k.shape[3] :]

    def _part(self, spec, call, q, k, v, here, of_kv, tiles, known, first):
        sink = None
        if call.sink is not None:
            sink = call.sink[first : first + here.stop - here.start]
        coords = Coords(self.offsets[0], self.offsets[1] + first)
        part = call.replace(
            q=q[:, here], k=k[:, of_kv], v=v[:, of_kv], sink=sink, coords=coords, tiles=tiles
        )
        return replace(spec, tiles=known), part

    def _over(self, x: Tensor, rows: "_Rows", heads: list[range]) -> Tensor:
        """(b, all heads, local, ...) to (b, heads of this rank, all tokens, ...)."""
        given = [x[:, of.start : of.stop] for of in heads]
        mine, (b, _, _, width) = len(heads[self.rank]), x.shape
        shapes = [(b, mine, int(n), width) for n in rows.sizes]
        found = self._exchange(given, shapes, x)
        return torch.cat(found, 2).index_select(2, rows.order)

    def _home(self, x: Tensor) -> Tensor:
        """(b, heads of this rank, all queries, width) to (b, all heads, local, width)."""
        given = x.index_select(2, self.q.back).split(self.q.sizes, 2)
        local, width = self.q.sizes[self.rank], x.shape[3]
        shapes = [(x.shape[0], len(of), local, width) for of in self.q_heads]
        return torch.cat(self._exchange(given, shapes, x), 1)

    def _home_keys(self, x: Tensor, like: Tensor) -> Tensor:
        """Gradients of keys, of which several ranks may have had a head, added rank after rank."""
        given = x.index_select(2, self.kv.back).split(self.kv.sizes, 2)
        local, width = self.kv.sizes[self.rank], x.shape[3]
        shapes = [(x.shape[0], len(of), local, width) for of in self.kv_heads]
        total = torch.zeros(like.shape, dtype=x.dtype, device=x.device)
        for of, part in zip(self.kv_heads, self._exchange(given, shapes, x), strict=True):
            total[:, of.start : of.stop] += part
        return total

    def _exchange(self, given: Any, shapes: list[tuple], like: Tensor) -> list[Tensor]:
        send = torch.cat([x.flatten() for x in given])
        sizes = [int(np.prod(shape)) for shape in shapes]
        out = like.new_empty(sum(sizes))
        collective.all_to_all(out, send, sizes, [x.numel() for x in given], self.group).wait()
        return [x.view(shape) for x, shape in zip(out.split(sizes), shapes, strict=True)]


class _Rows:
    """Tokens in the order of ranks, and in that of the sequence."""

    def __init__(self, pieces: Pieces, device: torch.device) -> None:
        self.sizes, self.length = [int(n) for n in pieces.sizes], pieces.length
        before = pieces.sizes.cumsum() - pieces.sizes
        where = places(before[pieces.rank] + pieces.at, pieces.stop - pieces.start)
        self.order = torch.from_numpy(where).to(device)
        self.back = torch.from_numpy(where.argsort()).to(device)


def _same_groups(heads: range, size: int) -> list[range]:
    """Query heads in parts of which each reads whole groups, or a part of one group."""
    first, last = -(-heads.start // size) * size, heads.stop // size * size
    if first > last or not len(heads):
        return [heads] if len(heads) else []
    parts = range(heads.start, first), range(first, last), range(last, heads.stop)
    return [part for part in parts if len(part)]


def places(start: np.ndarray, size: np.ndarray) -> np.ndarray:
    """start[0], start[0] + 1, ... for size[0] places, then those of the next."""
    total = int(size.sum())
    before = size.cumsum() - size
    return np.arange(total) + np.repeat(start - before, size)
