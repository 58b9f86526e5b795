"""The pair of functions over ranks, as `headway::cp_forward` and `headway::cp_backward` run it."""

from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...backends.base import Call
from ...blocks import check_tiles
from ...caches import LRUCache
from ...errors import ArgumentError
from ...operators import as_promised, call_of, grads_like, results_like
from ...types import REPLICATED_KV, ExchangeSpec, Spec, in_dtype
from ..groups import check_place, resolve_group
from .comm_plan import SequenceShards, Transport, sequence_shards
from .consistency import ConsistencyCheck
from .fields import ATTENTION, PLAN_FIELDS, fields_of
from .nodes import NodeGroups, local_node
from .plan_inputs import Plan, plan_inputs
from .plans import make_plan
from .pull import transport_of
from .resharding import digest_of

# The plan of a call, the shards of its queries and keys, and its tiles: tiles are compared by
# identity, so they have to live as long as their key.
_plans: LRUCache[tuple[Plan, tuple[SequenceShards, SequenceShards], Any]] = LRUCache(64)


class RankCall(NamedTuple):
    """One call of this rank, as the operators receive it.

    - `spec`: without its exchange, as backends take it.
    - `tables`: the pieces of the queries and of the keys, by rank.
    - `group`, `nodes`: the process groups that `exchange` names.
    """

    spec: Spec
    exchange: ExchangeSpec
    call: Call
    tables: tuple[Tensor, Tensor]
    group: Any
    nodes: NodeGroups | None

    @staticmethod
    def parse(spec_text: str, inputs: tuple) -> "RankCall":
        """Read the operators' inputs; `inputs` begin with q."""
        spec = Spec.parse(spec_text)
        exchange = spec.exchange
        if exchange is None:
            raise ArgumentError("the spec of a call over ranks has no exchange; use layout=")
        nodes = None
        if exchange.node_size:
            intra_node = resolve_group(exchange.intra_node)
            inter_node = resolve_group(exchange.inter_node)
            nodes = NodeGroups(exchange.node_size, intra_node, inter_node)
        call = call_of(*[*inputs[:10], None, None])
        group = resolve_group(exchange.group)
        return RankCall(spec.replace(exchange=None), exchange, call, inputs[10:12], group, nodes)

    @property
    def replicates_kv(self) -> bool:
        """Return whether every rank has all keys and values."""
        return self.exchange.plan == REPLICATED_KV

    @property
    def plan_request(self) -> tuple[str, str, int]:
        """Return plan, transport and node size, which have to be equal on all ranks."""
        return self.exchange.plan, self.exchange.transport, self.exchange.node_size

    def fields(self) -> list:
        """Return the numbers that all ranks compare."""
        q_table, kv_table = self.tables
        ranks = self.group.size()
        q_digest = kv_digest = digest_of(q_table, ranks)
        if self.replicates_kv:
            kv_digest = self.call.k.shape[2]
        elif kv_table is not q_table:
            kv_digest = digest_of(kv_table, ranks)
        exchange, call = self.exchange, self.call
        if exchange.draws_seed:
            call = call.replace(seed=None)
        return fields_of(self.spec, call, (q_digest, kv_digest), self.plan_request, exchange)

    def plan(self, fields: list) -> Plan:
        """Return the plan of this call. Layers and steps with equal fields share one plan."""
        call, exchange, group = self.call, self.exchange, self.group
        tile_ids = None if call.tiles is None else tuple(id(t) for t in call.tiles.flatten())
        # The group itself, not its name: a new group of the same name may have other ranks.
        place = self.plan_request, group, self.nodes, call.q.device, call.coords.b, call.coords.h
        key = (self.spec, tile_ids, place, *[fields[n] for n in PLAN_FIELDS])
        rank, ranks = check_place(group, exchange.rank, exchange.ranks)
        cached = _plans.get(key)
        if cached is not None:
            plan, shards, _ = cached
            _check_local_lengths(call, rank, *shards)
            return plan
        q_table, kv_table = self.tables
        shards = sequence_shards(
            q_table, None if self.replicates_kv else kv_table, call, rank, ranks
        )
        _check_local_lengths(call, rank, *shards)
        inputs = plan_inputs(self.spec, call, *shards, group, rank, exchange.own_tiles)
        node = None
        if self.nodes is not None and not self.replicates_kv:
            node = local_node(self.spec, call, inputs, self.nodes, exchange.own_tiles)
        plan = make_plan(exchange.plan, inputs, node)
        _plans.put(key, (plan, shards, call.tiles))
        return plan

    def with_shared_seed(self) -> Call:
        """Return the call with the first rank's seed, where every rank has drawn its own."""
        if not self.exchange.draws_seed or self.call.seed is None:
            return self.call
        seed = self.call.seed.clone()
        dist.broadcast(seed, group=self.group, group_src=0)
        return self.call.replace(seed=seed)


def _check_local_lengths(
    call: Call, rank: int, q_shards: SequenceShards, kv_shards: SequenceShards
) -> None:
    for name, tensor, shards in (("q", call.q, q_shards), ("k", call.k, kv_shards)):
        if tensor.shape[2] != shards.sizes[rank]:
            raise ArgumentError(
                f"{name} {tuple(tensor.shape)} has {tensor.shape[2]} tokens, but rank {rank} holds "
                f"{shards.sizes[rank]} of {shards.length} by the layout; cut tensors with "
                "layout.shard(x, dim), or make a layout of this length"
            )


def _agree(rank_call: RankCall, check: ConsistencyCheck) -> tuple[Plan, Transport]:
    """Return the plan of a call and its transport. The check has begun, and may still be in flight:
    the transport waits for it where it has to."""
    call, exchange = rank_call.call, rank_call.exchange
    if call.tiles is not None and not check.forward_number:
        check_tiles(call.tiles)
    fields = rank_call.fields()
    plan = rank_call.plan(fields)
    check.begin(fields)
    if exchange.draws_seed or not plan.runs_ahead:
        check.wait()
    return plan, transport_of(exchange.transport, plan.group, call.q.device, check)


def tell_refusal(group_name: str, device: torch.device, waits: bool) -> None:
    """Tell the other ranks that this one refuses a call; wait for them for a while."""
    with suppress(ArgumentError), ConsistencyCheck(ATTENTION, resolve_group(group_name), device):
        if waits:
            raise ArgumentError("the call was refused before its check")


def forward(spec_text: str, *inputs: Any) -> tuple[Tensor, ...]:
    """Run `headway::cp_forward`."""
    rank_call = RankCall.parse(spec_text, inputs)
    spec, call, group = rank_call.spec, rank_call.call, rank_call.group
    with ConsistencyCheck(ATTENTION, group, call.q.device) as check:
        plan, transport = _agree(rank_call, check)
        if not call.q.shape[0]:  # no rows: nothing to exchange
            results = results_like(spec.text, call.q, call.v, 0)
        else:
            results = plan.forward(spec, rank_call.with_shared_seed(), transport)
        if spec.max_logit:
            dist.all_reduce(results.max_logit, dist.ReduceOp.MAX, group=group)
    out = in_dtype(results.out, spec.out_dtype(call.q.dtype))
    tensors = as_promised(call.q, out, *results[1:])
    return *tensors, torch.tensor(check.number, dtype=torch.int64, device="cpu")


def backward(spec_text: str, *inputs: Any) -> list[Tensor]:
    """Run `headway::cp_backward`. One that exchanges nothing waits for nobody."""
    rank_call = RankCall.parse(spec_text, inputs)
    spec, call = rank_call.spec, rank_call.call
    q, k, v, sink, _, tensors = inputs[:6]
    number, out, lse, dout, dlse, needs = inputs[12:]
    results = out, lse, dout, dlse, tuple(needs)
    if rank_call.replicates_kv and not rank_call.exchange.draws_seed:
        plan = rank_call.plan(rank_call.fields())
        grads = plan.backward(spec, call, Transport(), *results)
    else:
        with ConsistencyCheck(ATTENTION, rank_call.group, call.q.device, int(number)) as check:
            plan, transport = _agree(rank_call, check)
            if not call.q.shape[0]:
                return [x.zero_() for x in grads_like(spec_text, q, k, v, sink, tensors, needs)]
            call = rank_call.with_shared_seed()
            grads = plan.backward(spec, call, transport, *results)
    return [x.contiguous() for x in (*grads[:4], *grads.captured) if x is not None]
