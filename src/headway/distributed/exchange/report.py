"""What a layout does to a call, for people to read: `headway.explain(..., layout=)`."""

import numpy as np

from ...backends.base import Call
from ...types import Spec
from ..layout import Layout
from .cost import costs
from .move import resolved
from .nodes import Nodes, node_of
from .plans import name_of
from .pull import told
from .routes import pieces_of
from .setting import setting_of
from .steps import away


def report(spec: Spec, call: Call, q: Layout, kv: Layout | None, own_tiles: bool) -> list[str]:
    """Balance, bytes, and what every plan would take. Nothing is sent."""
    pieces = pieces_of(q.table, None if kv is None else kv.table, call, q.rank, q.ranks)
    setting = setting_of(spec, call, *pieces, None, q.rank, own_tiles)
    ranks, needed, work = q.ranks, setting.needed, setting.work
    if kv is None:
        return [
            _balance(q, work),
            f"keys: every rank has all {call.k.shape[2]:,}; nothing is sent, and their gradients "
            "are each rank's share",
        ]
    node = node_of(spec, call, setting, Nodes(q.node, None, None), own_tiles) if q.node else None
    found = costs(setting, node)
    name = name_of(q.plan, setting, node, own_tiles)
    sent = away(needed, pieces[1].sizes)
    lines = [
        _balance(q, work),
        f"keys: a rank is sent those of at most {sent:,} tokens of others "
        f"({sent / max(1, kv.length):.1%})",
        f"plan: {name}, {'the cheapest' if q.plan == 'auto' else 'as named'}; the forward sends "
        f"the busiest rank {_size(found[name].received)}",
    ]
    if node is not None:
        of_nodes = node.setting.work
        over = away(node.setting.needed, node.setting.kv.sizes)
        lines.append(
            f"nodes: {ranks // q.node} of {q.node} ranks; one is sent keys of at most {over:,} "
            f"tokens of others ({over / max(1, kv.length):.1%}), every rank those of some heads; "
            f"the busiest has {of_nodes.max() / max(float(of_nodes.mean()), 1e-30):.2f} of the "
            "mean work"
        )
    lines.append(f"transport: {_transport(name, q, call)}")
    for other, cost in found.items():
        if other != name:
            times = cost.seconds / max(found[name].seconds, 1e-30)
            lines.append(f"  not {other}: {_size(cost.received)}, about {times:.1f} of the time")
    return lines


def _balance(q: Layout, work: np.ndarray) -> str:
    mean = max(float(work.mean()), 1e-30)
    pieces = int((q.table[:, 0] == q.rank).sum())
    return (
        f"layout: {q.length:,} tokens over {q.ranks} ranks; rank {q.rank} holds {q.local:,} in "
        f"{pieces} pieces; the busiest rank has {work.max() / mean:.2f} of the mean work"
    )


def _transport(name: str, q: Layout, call: Call) -> str:
    if name == "ulysses":
        return "collectives"
    nodes = name == "ulysses*heads"
    group = q.between_name if nodes else q.group_name
    way = told(q.transport, resolved(group) if group else None, call.q.device)
    return f"collectives inside of a node; between nodes {way}" if nodes else way


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.3g} GB"
