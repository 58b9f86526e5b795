"""The pair of functions over ranks, for a call of plain tensors: what the operators do."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...backends.base import Call
from ...blocks import check_tiles
from ...caches import LRUCache
from ...errors import ArgumentError
from ...operators import call_of
from ...types import Spec, acc_dtype, in_dtype
from .agreement import ATTENTION, PLANNED, Agreement, fields_of
from .move import check_place, digest_of, resolved
from .nodes import Nodes, node_of
from .plans import plan_of
from .pull import transport_of
from .routes import Pieces, Transport, pieces_of
from .setting import Plan, setting_of
from .settle import settle


class Wire(NamedTuple):
    """What an operator is told of the exchange."""

    plan: str
    transport: str
    own_tiles: bool
    trains: bool
    drawn: bool  # the seed, by every rank
    fixed: tuple[bool, ...]  # of captured tensors: they do not learn
    rank: int  # of the layout
    ranks: int
    group: Any
    nodes: Nodes | None

    @staticmethod
    def parse(text: str) -> "Wire":
        """From the text that crosses the operator's boundary."""
        *start, group, node, inside, between = text.split("|")
        plan, transport, own_tiles, trains, drawn, fixed, rank, ranks = start
        nodes = Nodes(int(node), resolved(inside), resolved(between)) if int(node) else None
        return Wire(
            plan, transport, own_tiles == "1", trains == "1", drawn == "1",
            tuple([x == "1" for x in fixed]), int(rank), int(ranks), resolved(group), nodes,
        )  # fmt: skip

    @property
    def way(self) -> tuple[str, str, int]:
        """What ranks agree on."""
        return self.plan, self.transport, self.nodes.size if self.nodes else 0


# Of the plans; tiles that are known by identity are kept with them.
_plans: LRUCache[tuple[Plan, tuple[Pieces, Pieces], Any]] = LRUCache(64)


def _begun(
    spec: Spec, call: Call, wire: Wire, tables: tuple[Tensor, Tensor], of: int
) -> tuple[Plan, Agreement]:
    """The plan of a call that all ranks make alike, and the agreement that they do. A rank on which
    it fails, for whatever reason, tells the others so, before it raises.

    - `of`: in a backward, the number of the call; else 0.
    """
    does, group, device = ATTENTION, wire.group, call.q.device
    try:
        if call.tiles is not None and not of:
            check_tiles(call.tiles)
        fields = _fields(spec, call, wire, tables)
        plan = _planned(spec, call, wire, tables, fields)
    except Exception:
        with suppress(ArgumentError):
            settle(Agreement(does, None, group, device, of))
        raise
    return plan, Agreement(does, fields, group, device, of)


@contextmanager
def _agreed(
    spec: Spec, call: Call, wire: Wire, tables: tuple[Tensor, Tensor], of: int = 0
) -> Iterator[tuple[Plan, Transport, int]]:
    """The plan of a call, what rows travel by, and the call's number. Where ranks turn out to
    differ, whatever was made inside is let go of. (A backward in which nothing travels waits for
    nobody.)"""
    if of and wire.plan == "local" and not wire.drawn:
        fields = _fields(spec, call, wire, tables)
        yield _planned(spec, call, wire, tables, fields), Transport(), of
        return
    plan, agreement = _begun(spec, call, wire, tables, of)
    try:
        if wire.drawn or not plan.runs_ahead:
            agreement.wait()
        transport = transport_of(wire.transport, plan.group, call.q.device, agreement)
        yield plan, transport, agreement.number
    finally:
        settle(agreement)


def _fields(spec: Spec, call: Call, wire: Wire, tables: tuple[Tensor, Tensor]) -> list:
    of_q, of_kv = tables
    ranks = wire.group.size()
    queries = keys = digest_of(of_q, ranks)
    if wire.plan == "local":
        keys = call.k.shape[2]
    elif of_kv is not of_q:
        keys = digest_of(of_kv, ranks)
    if wire.drawn:
        call = call.replace(seed=None)
    digests = queries, keys
    return fields_of(spec, call, digests, wire.way, wire.trains, wire.own_tiles, wire.fixed)


def _planned(
    spec: Spec, call: Call, wire: Wire, tables: tuple[Tensor, Tensor], fields: list
) -> Plan:
    """The plan of a call, made once for all of its kind, layers and steps alike."""
    group, device = wire.group, call.q.device
    own = None if call.tiles is None else tuple(id(t) for t in call.tiles.flatten())
    # By the group itself: one that is made anew has the old one's name, and maybe other ranks.
    where = wire.way, group, wire.nodes, device, call.coords[:2]
    key = (spec, own, where, *[fields[n] for n in PLANNED])
    rank, ranks = check_place(group, wire.rank, wire.ranks)
    found = _plans.get(key)
    kv = None if wire.plan == "local" else tables[1]
    pieces = pieces_of(tables[0], kv, call, rank, ranks) if found is None else found[1]
    _check_local(call, rank, *pieces)
    if found is None:
        given = pieces[0], pieces[1], group, rank, wire.own_tiles
        setting = setting_of(spec, call, *given)
        node = None
        if wire.nodes is not None and wire.plan != "local":
            node = node_of(spec, call, setting, wire.nodes, given[-1])
        plan = plan_of(wire.plan, setting, node, wire.own_tiles)
        found = _plans.put(key, (plan, pieces, call.tiles))
    return found[0]


def _check_local(call: Call, rank: int, q: Pieces, kv: Pieces) -> None:
    for name, x, pieces in (("q", call.q, q), ("k", call.k, kv)):
        if x.shape[2] != pieces.sizes[rank]:
            raise ArgumentError(
                f"{name} {tuple(x.shape)} has {x.shape[2]} tokens, but rank {rank} holds "
                f"{pieces.sizes[rank]} of {pieces.length} by the layout; cut tensors with "
                "layout.shard(x, dim), or make a layout of this length"
            )


def _call_of(inputs: tuple) -> Call:
    return call_of(*[*inputs[:10], None, None])


def _of_one_seed(call: Call, wire: Wire) -> Call:
    """The call with the first rank's seed, where every rank has drawn one."""
    if not wire.drawn or call.seed is None:
        return call
    seed = call.seed.clone()
    dist.broadcast(seed, group=wire.group, group_src=0)
    return call.replace(seed=seed)


def forward(spec: str, wire: str, *inputs: Any) -> tuple[Tensor, ...]:
    """What `headway::cp_forward` does."""
    parsed, told, call = Spec.parse(spec), Wire.parse(wire), _call_of(inputs)
    with _agreed(parsed, call, told, inputs[10:12]) as (plan, transport, number):
        found = plan.forward(parsed, _of_one_seed(call, told), transport)
    out = in_dtype(found.out, parsed.out_dtype(call.q.dtype))
    if parsed.max_logit:
        dist.all_reduce(found.max_logit, dist.ReduceOp.MAX, group=told.group)
    stats = [x.contiguous() for x in (out, *found[1:])]
    return *stats, torch.tensor(number, dtype=torch.int64, device="cpu")


def backward(spec: str, wire: str, *inputs: Any) -> list[Tensor]:
    """What `headway::cp_backward` does."""
    parsed, told, call = Spec.parse(spec), Wire.parse(wire), _call_of(inputs)
    number, out, lse, dout, dlse, needs = inputs[12:]
    with _agreed(parsed, call, told, inputs[10:12], int(number)) as (plan, transport, _):
        call = _of_one_seed(call, told)
        grads = plan.backward(parsed, call, transport, out, lse, dout, dlse, tuple(needs))
    dtype = acc_dtype(call.q.dtype) if parsed.partial else call.q.dtype
    found = [in_dtype(g, dtype) for g in grads[:3]]
    found += [g for g in (grads.sink, *grads.captured) if g is not None]
    return [g.contiguous() for g in found]
