"""The plan of all tokens and some heads, among all ranks or inside of a node."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...backends.base import Call, delta_of
from ...types import Forward, Grads, Spec, acc_dtype
from . import collective
from .nodes import Node, only
from .routes import Pieces, Transport
from .setting import Plan, Setting, added


class Part(NamedTuple):
    """Heads that are computed together.

    - `q`, `kv`: where they are among the heads of this rank; `heads`: among those of the call.
    - `plan`: of what happens between the all-to-alls.
    """

    q: slice
    kv: slice
    heads: slice
    plan: Plan


class Ulysses(Plan):
    """All tokens of a node and some heads: an all-to-all, a plan for them, and an all-to-all back.

    - `middle`: that plan, for a setting of some heads.
    """

    runs_ahead = False  # all-to-alls are collectives

    def __init__(self, name: str, node: Node, middle: Callable[[Setting], Plan]) -> None:
        s, ranks = node.setting, node.q.ranks
        self.name, self.inside, self.rank, self.group = name, node.group, node.rank, s.group
        hq, hk = s.sizes.hq, s.sizes.hk
        size = hq // hk
        cuts = [hq * n // ranks for n in range(ranks + 1)]
        self.q_heads = [range(*cuts[n : n + 2]) for n in range(ranks)]
        self.kv_heads = [
            range(of.start // size, -(-of.stop // size)) if len(of) else range(0)
            for of in self.q_heads
        ]
        self.q, self.kv = _Rows(node.q, s.device), _Rows(node.kv, s.device)
        mine, mine_kv = self.q_heads[self.rank], self.kv_heads[self.rank]
        self.parts = []
        for heads in _same_groups(mine, size):
            kv = range(heads.start // size, -(-heads.stop // size))
            where = _slice(heads, mine.start), _slice(kv, mine_kv.start), _slice(heads, 0)
            self.parts.append(Part(*where, middle(only(s, heads, kv))))
        local, (b, _, _, d, dv, _) = self.q.sizes[self.rank], s.sizes
        away_q, away_kv = self.q.length - local, self.kv.length - self.kv.sizes[self.rank]
        back = (hq - len(mine)) * local * (dv + 1)  # out and lse
        self.received = b * (away_q * len(mine) * d + away_kv * len(mine_kv) * (d + dv) + back)
        self.received += sum(part.plan.received for part in self.parts)

    def forward(self, spec: Spec, call: Call, transport: Transport) -> Forward:
        """See `Plan`."""
        q, k, v = self._here(call)
        b, hq, acc = q.shape[0], q.shape[1], acc_dtype(q.dtype)
        length = self.q.length
        out = q.new_empty((b, hq, length, v.shape[3]), dtype=spec.out_dtype(q.dtype))
        lse = q.new_empty((b, hq, length), dtype=acc)
        top = q.new_full((b, call.q.shape[1] if spec.max_logit else 0), -torch.inf, dtype=acc)
        row_max = torch.empty_like(lse) if spec.row_max else None
        for part in self.parts:
            found = part.plan.forward(spec, _of_part(part, call, q, k, v), transport)
            out[:, part.q], lse[:, part.q] = found.out, found.lse
            if spec.max_logit:
                top[:, part.heads] = found.max_logit
            if row_max is not None:
                row_max[:, part.q] = found.row_max
        return Forward(
            self._home(out),
            self._home(lse[..., None])[..., 0],
            top if spec.max_logit else lse.new_empty(0),
            lse.new_empty(0) if row_max is None else self._home(row_max[..., None])[..., 0],
        )

    def backward(self, spec, call, transport, out, lse, dout, dlse, needs):
        acc = acc_dtype(call.q.dtype)
        spec = spec.replace(exact_kv=True)
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
        for part in self.parts:
            grads = part.plan.backward(
                spec, _of_part(part, call, q, k, v), transport, nothing[:, part.q],
                rows[:, part.q, :, 0].contiguous(), do[:, part.q], -rows[:, part.q, :, 1], needs,
            )  # fmt: skip
            dq[:, part.q] = grads.q.to(acc)
            dk[:, part.kv] += grads.k
            dv[:, part.kv] += grads.v
            if dsink is not None and grads.sink is not None:
                dsink[part.heads] = grads.sink
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

    def _over(self, x: Tensor, rows: "_Rows", heads: list[range]) -> Tensor:
        """(b, all heads, local, ...) to (b, heads of this rank, all tokens of the node, ...)."""
        given = [x[:, of.start : of.stop] for of in heads]
        mine, (b, _, _, width) = len(heads[self.rank]), x.shape
        shapes = [(b, mine, int(n), width) for n in rows.sizes]
        found = self._exchange(given, shapes, x)
        return torch.cat(found, 2).index_select(2, rows.order)

    def _home(self, x: Tensor) -> Tensor:
        """(b, heads of this rank, queries of the node, width) to (b, all heads, local, width)."""
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
        collective.all_to_all(out, send, sizes, [x.numel() for x in given], self.inside).wait()
        return [x.view(shape) for x, shape in zip(out.split(sizes), shapes, strict=True)]


def _of_part(part: Part, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Call:
    sink = None if call.sink is None else call.sink[part.heads]
    return call.replace(q=q[:, part.q], k=k[:, part.kv], v=v[:, part.kv], sink=sink)


def _slice(heads: range, first: int) -> slice:
    return slice(heads.start - first, heads.stop - first)


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
