"""The plan "ulysses": all tokens and some heads on every rank, by all-to-all (arXiv 2309.14509).

It runs among all ranks or inside of a node. Every rank has as many pairs, whatever the layout; on
four H100s causal 32k with 64/8 heads took 8.1 ms forward, and 6.85 by "heads"
(docs/lab/ranks.md). It is for work that no layout makes even.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...backends.base import Call, delta_of
from ...types import Forward, Grads, Spec, acc_dtype
from . import collective
from .comm_plan import SequenceShards, Transport
from .global_mask import join_ranges
from .nodes import LocalNode, select_heads
from .plan_inputs import Plan, PlanInputs, sum_captured_grads


class HeadShard(NamedTuple):
    """Heads of this rank that are computed together.

    - `q`, `kv`: among this rank's heads; `heads`: query heads among those of the call.
    - `plan`: what runs between the all-to-alls.
    """

    q: slice
    kv: slice
    heads: slice
    plan: Plan

    def call(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Call:
        """Return the call of these heads, from the tensors after the all-to-all."""
        sink = None if call.sink is None else call.sink[self.heads]
        return call.replace(q=q[:, self.q], k=k[:, self.kv], v=v[:, self.kv], sink=sink)


class Ulysses(Plan):
    """An all-to-all to all tokens of some heads, a plan for these heads, and an all-to-all back.

    - `q_heads`, `kv_heads`: heads of every rank of the node.
    - `q`, `kv`: the order of tokens.
    """

    runs_ahead = False  # all-to-alls are collectives

    def __init__(
        self, name: str, node: LocalNode, inner_plan: Callable[[PlanInputs], Plan]
    ) -> None:
        inputs, ranks = node.inputs, node.q.ranks
        self.name, self.node_group, self.rank = name, node.group, node.rank
        self.group = inputs.group
        hq, hk = inputs.sizes.hq, inputs.sizes.hk
        group_size = hq // hk
        cuts = [hq * n // ranks for n in range(ranks + 1)]
        self.q_heads = [range(*cuts[n : n + 2]) for n in range(ranks)]
        self.kv_heads = [
            range(heads.start // group_size, -(-heads.stop // group_size)) if heads else range(0)
            for heads in self.q_heads
        ]
        self.q = self.kv = TokenOrder(node.q, inputs.device)
        if node.kv is not node.q:
            self.kv = TokenOrder(node.kv, inputs.device)
        q_heads, kv_heads = self.q_heads[self.rank], self.kv_heads[self.rank]
        self.shards = []
        for heads in _whole_groups(q_heads, group_size):
            kv = range(heads.start // group_size, -(-heads.stop // group_size))
            q_slice, kv_slice = _relative(heads, q_heads.start), _relative(kv, kv_heads.start)
            plan = inner_plan(select_heads(inputs, heads, kv))
            self.shards.append(HeadShard(q_slice, kv_slice, _relative(heads, 0), plan))
        self.received = self._received_elements(inputs)

    def _received_elements(self, inputs: PlanInputs) -> int:
        sizes = inputs.sizes
        q_heads, kv_heads = len(self.q_heads[self.rank]), len(self.kv_heads[self.rank])
        local = self.q.sizes[self.rank]
        remote_q, remote_kv = self.q.length - local, self.kv.length - self.kv.sizes[self.rank]
        inputs_received = remote_q * q_heads * sizes.d + remote_kv * kv_heads * (sizes.d + sizes.dv)
        results_received = (sizes.hq - q_heads) * local * (sizes.dv + 1)  # out and lse
        return sizes.b * (inputs_received + results_received) + sum(
            shard.plan.received for shard in self.shards
        )

    def forward(self, spec: Spec, call: Call, transport: Transport) -> Forward:
        """See `Plan`."""
        q, k, v = self._to_heads(call)
        b, hq, acc = q.shape[0], q.shape[1], acc_dtype(q.dtype)
        length = self.q.length
        out = q.new_empty((b, hq, length, v.shape[3]), dtype=spec.out_dtype(q.dtype))
        lse = q.new_empty((b, hq, length), dtype=acc)
        no_maxima = (b, call.q.shape[1] if spec.max_logit else 0)
        max_logit = q.new_full(no_maxima, -torch.inf, dtype=acc)
        row_max = torch.empty_like(lse) if spec.row_max else None
        for shard in self.shards:
            results = shard.plan.forward(spec, shard.call(call, q, k, v), transport)
            out[:, shard.q], lse[:, shard.q] = results.out, results.lse
            if spec.max_logit:
                max_logit[:, shard.heads] = results.max_logit
            if row_max is not None:
                row_max[:, shard.q] = results.row_max
        return Forward(
            self._to_tokens(out),
            self._to_tokens(lse[..., None])[..., 0],
            max_logit if spec.max_logit else lse.new_empty(0),
            lse.new_empty(0) if row_max is None else self._to_tokens(row_max[..., None])[..., 0],
            lse.new_empty(0),
        )

    def backward(self, spec, call, transport, out, lse, dout, dlse, needs):
        acc, (q_dtype, kv_dtype) = acc_dtype(call.q.dtype), spec.grad_dtypes(call.q.dtype)
        spec = spec.replace(exact_kv=True)
        # The owner of a row knows its delta = rowsum(dout∘out) − dlse. With an out of 0, whose
        # product is 0, the gradient of lse that gives it is −delta. So out is not sent.
        delta = delta_of(out, dout, dlse, acc)
        row_stats = self._all_to_all_heads(torch.stack([lse, delta], -1), self.q, self.q_heads)
        q, k, v = self._to_heads(call)
        dout = self._all_to_all_heads(dout, self.q, self.q_heads)
        zero_out = dout.new_zeros(()).expand(dout.shape)
        dtypes = (q, q_dtype), (k, acc), (v, acc)
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x, dtype in dtypes)
        dsink = None if call.sink is None else torch.zeros_like(call.sink, dtype=acc)
        dcaptured: list[list[Tensor | None]] = []
        for shard in self.shards:
            stats = row_stats[:, shard.q]
            grads = shard.plan.backward(
                spec, shard.call(call, q, k, v), transport, zero_out[:, shard.q],
                stats[..., 0].contiguous(), dout[:, shard.q], -stats[..., 1], needs,
            )  # fmt: skip
            dq[:, shard.q] = grads.q
            dk[:, shard.kv] += grads.k
            dv[:, shard.kv] += grads.v
            if dsink is not None and grads.sink is not None:
                dsink[shard.heads] = grads.sink
            dcaptured.append(grads.captured)
        zeros = [
            torch.zeros(t.shape, dtype=acc, device=t.device) if need else None
            for t, need in zip(call.captured.tensors, needs, strict=False)
        ]
        return Grads(
            self._to_tokens(dq), self._reduce_kv(dk, call.k).to(kv_dtype),
            self._reduce_kv(dv, call.v).to(kv_dtype), dsink,
            sum_captured_grads([zeros, *dcaptured]),
        )  # fmt: skip

    def _to_heads(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of all tokens and this rank's heads."""
        kv = torch.cat([call.k, call.v], -1)
        q = self._all_to_all_heads(call.q, self.q, self.q_heads)
        kv = self._all_to_all_heads(kv, self.kv, self.kv_heads)
        return q, kv[..., : call.k.shape[3]], kv[..., call.k.shape[3] :]

    def _all_to_all_heads(self, x: Tensor, tokens: "TokenOrder", heads: list[range]) -> Tensor:
        """Exchange (b, all heads, local, ...) for (b, this rank's heads, all tokens, ...)."""
        sent = [x[:, of_rank.start : of_rank.stop] for of_rank in heads]
        b, _, _, width = x.shape
        shapes = [(b, len(heads[self.rank]), size, width) for size in tokens.sizes]
        received = self._all_to_all(sent, shapes, x)
        return torch.cat(received, 2).index_select(2, tokens.to_sequence)

    def _to_tokens(self, x: Tensor) -> Tensor:
        """Exchange (b, this rank's heads, all queries, width) for (b, all heads, local, width)."""
        return torch.cat(self._by_heads(x, self.q, self.q_heads), 1)

    def _reduce_kv(self, x: Tensor, like: Tensor) -> Tensor:
        """Return the gradients of this rank's keys. Several ranks may have computed a head: their
        contributions are added rank after rank."""
        total = torch.zeros(like.shape, dtype=x.dtype, device=x.device)
        received = self._by_heads(x, self.kv, self.kv_heads)
        for heads, contribution in zip(self.kv_heads, received, strict=True):
            total[:, heads.start : heads.stop] += contribution
        return total

    def _by_heads(self, x: Tensor, tokens: "TokenOrder", heads: list[range]) -> list[Tensor]:
        """Send every rank its tokens; return this rank's tokens for every rank's heads."""
        sent = x.index_select(2, tokens.to_ranks).split(tokens.sizes, 2)
        local, width = tokens.sizes[self.rank], x.shape[3]
        shapes = [(x.shape[0], len(of_rank), local, width) for of_rank in heads]
        return self._all_to_all(sent, shapes, x)

    def _all_to_all(self, sent, shapes: list[tuple], like: Tensor) -> list[Tensor]:
        """Send one tensor to each rank, and receive one of each of these shapes."""
        flat = torch.cat([x.flatten() for x in sent])
        receive_sizes = [int(np.prod(shape)) for shape in shapes]
        send_sizes = [x.numel() for x in sent]
        received = like.new_empty(sum(receive_sizes))
        collective.all_to_all(received, flat, receive_sizes, send_sizes, self.node_group)()
        pairs = zip(received.split(receive_sizes), shapes, strict=True)
        return [x.view(shape) for x, shape in pairs]


class TokenOrder:
    """Permutations of tokens between the order of ranks and that of the sequence.

    - `to_sequence`, `to_ranks`: indices that permute into that order.
    """

    def __init__(self, shards: SequenceShards, device: torch.device) -> None:
        self.sizes, self.length = [int(size) for size in shards.sizes], shards.length
        rank_start = shards.sizes.cumsum() - shards.sizes
        in_ranks, size = rank_start[shards.rank] + shards.local_start, shards.stop - shards.start
        in_sequence, by_rank = size.cumsum() - size, in_ranks.argsort()
        orders = join_ranges(in_ranks, size), join_ranges(in_sequence[by_rank], size[by_rank])
        self.to_sequence, self.to_ranks = (torch.from_numpy(x).to(device) for x in orders)


def _whole_groups(heads: range, group_size: int) -> list[range]:
    """Cut query heads into ranges that each read whole groups, or a part of one group."""
    first = -(-heads.start // group_size) * group_size
    last = heads.stop // group_size * group_size
    if first > last or not len(heads):
        return [heads] if len(heads) else []
    cut = range(heads.start, first), range(first, last), range(last, heads.stop)
    return [part for part in cut if len(part)]


def _relative(heads: range, first: int) -> slice:
    return slice(heads.start - first, heads.stop - first)
