"""The report on a layout that `headway.explain(..., layout=)` prints."""

import numpy as np

from ..backends.base import Call
from ..types import Spec
from .exchange.comm_plan import sequence_shards
from .exchange.cost import costs, most_received
from .exchange.nodes import LocalNode, NodeGroups, local_node
from .exchange.plan_inputs import plan_inputs
from .exchange.plans import plan_name
from .exchange.pull import describe_transport
from .groups import resolve_group
from .layout import Layout


def report(
    spec: Spec, call: Call, q_layout: Layout, kv_layout: Layout | None, own_tiles: bool
) -> list[str]:
    """Return lines on balance, bytes, and the estimated cost of every plan. Nothing is sent."""
    rank, ranks = q_layout.rank, q_layout.ranks
    kv_table = None if kv_layout is None else kv_layout.table
    q_shards, kv_shards = sequence_shards(q_layout.table, kv_table, call, rank, ranks)
    inputs = plan_inputs(spec, call, q_shards, kv_shards, None, rank, own_tiles)
    if kv_layout is None:
        return [
            _balance(q_layout, inputs.rank_pairs),
            f"keys: every rank has all {call.k.shape[2]:,}; nothing is sent, and their gradients "
            "are each rank's share",
        ]
    node = None
    if q_layout.node:
        node = local_node(spec, call, inputs, NodeGroups(q_layout.node, None, None), own_tiles)
    by_plan = costs(inputs, node)
    name = plan_name(q_layout.plan, inputs, node)
    received = most_received(inputs.kv_tokens_read, kv_shards.sizes)
    lines = [
        _balance(q_layout, inputs.rank_pairs),
        f"keys: a rank is sent those of at most {received:,} tokens of others "
        f"({received / max(1, kv_layout.length):.1%})",
        f"plan: {name}, {'the cheapest' if q_layout.plan == 'auto' else 'as named'}; the forward "
        f"sends the busiest rank {_size(by_plan[name].received)}",
    ]
    if node is not None:
        lines.append(_nodes(node, q_layout, kv_layout))
    lines.append(f"transport: {_transport(name, q_layout, call)}")
    for other, cost in by_plan.items():
        if other != name:
            times = cost.seconds / max(by_plan[name].seconds, 1e-30)
            lines.append(f"  not {other}: {_size(cost.received)}, about {times:.1f} of the time")
    return lines


def _balance(layout: Layout, rank_pairs: np.ndarray) -> str:
    pieces = int((layout.table[:, 0] == layout.rank).sum())
    return (
        f"layout: {layout.length:,} tokens over {layout.ranks} ranks; rank {layout.rank} holds "
        f"{layout.local:,} in {pieces} pieces; the busiest rank has {_busiest(rank_pairs):.2f} of "
        "the mean work"
    )


def _nodes(node: LocalNode, q_layout: Layout, kv_layout: Layout) -> str:
    received = most_received(node.inputs.kv_tokens_read, node.inputs.kv.sizes)
    return (
        f"nodes: {q_layout.ranks // q_layout.node} of {q_layout.node} ranks; one is sent keys of "
        f"at most {received:,} tokens of others ({received / max(1, kv_layout.length):.1%}), every "
        "rank those of some heads; the busiest has "
        f"{_busiest(node.inputs.rank_pairs):.2f} of the mean work"
    )


def _busiest(pairs: np.ndarray) -> float:
    """Return the largest share of work over the mean."""
    return pairs.max() / max(float(pairs.mean()), 1e-30)


def _transport(name: str, layout: Layout, call: Call) -> str:
    if name == "ulysses":
        return "collectives"
    over_nodes = name == "ulysses*heads"
    group = layout.between_name if over_nodes else layout.group_name
    transport = describe_transport(
        layout.transport, resolve_group(group) if group else None, call.q.device
    )
    if over_nodes:
        return f"collectives inside of a node; between nodes {transport}"
    return transport


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
