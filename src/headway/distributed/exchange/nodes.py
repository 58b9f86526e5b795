"""Ranks grouped into nodes: the shards of one node, and the nodes as ranks of a smaller exchange.

A node holds what its ranks hold. An all-to-all inside of it gives every rank all tokens of the node
and some heads (`ulysses.py`). The ranks with the same place in their nodes then exchange keys as
the ranks of any layout do: the shards are those of nodes, the heads those of the rank, the mask
that of a node's queries.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ...backends.base import Call
from ...types import Spec
from ..shard_table import merge_pieces
from .comm_plan import SequenceShards
from .plan_inputs import PlanInputs, plan_inputs


class NodeGroups(NamedTuple):
    """The process groups of nodes of `size` ranks: rank r is number r % size of node r // size.

    - `intra_node`: of this node's ranks; `inter_node`: of the ranks with this rank's place in every
      node.
    """

    size: int
    intra_node: Any
    inter_node: Any


class LocalNode(NamedTuple):
    """The node of this rank.

    - `group`, `rank`: of the node's ranks, and this rank's place among them.
    - `q`, `kv`: the shards of the node's ranks.
    - `inputs`: of the exchange between nodes, whose ranks are nodes.
    """

    group: Any
    rank: int
    q: SequenceShards
    kv: SequenceShards
    inputs: PlanInputs


def local_node(
    spec: Spec, call: Call, inputs: PlanInputs, groups: NodeGroups, own_tiles: bool
) -> LocalNode:
    """Return the node of this rank from the inputs of all ranks; builds the block mask of nodes.

    **Raises:** `ArgumentError` as `plan_inputs` does.
    """
    node, place = divmod(inputs.rank, groups.size)

    def of_both(shards_of: Callable[[SequenceShards], SequenceShards]) -> list[SequenceShards]:
        q = shards_of(inputs.q)
        return [q, q if inputs.kv is inputs.q else shards_of(inputs.kv)]

    q, kv = of_both(lambda shards: _shards_of_nodes(shards, groups.size))
    between = plan_inputs(spec, call, q, kv, groups.inter_node, node, own_tiles)
    q, kv = of_both(lambda shards: _shards_in_node(shards, groups.size, node))
    return LocalNode(groups.intra_node, place, q, kv, between)


def select_heads(inputs: PlanInputs, q_heads: range, kv_heads: range) -> PlanInputs:
    """Return the inputs of some query heads and the key/value heads that they read."""
    mask, (b, h) = inputs.mask, inputs.offsets
    if mask is not None and mask.h > 1:
        mask = mask._replace(tiles=mask.select(q_heads, None, None), h=len(q_heads))
    sizes = inputs.sizes._replace(hq=len(q_heads), hk=len(kv_heads))
    return replace(inputs, sizes=sizes, mask=mask, offsets=(b, h + q_heads.start))


def _shards_of_nodes(shards: SequenceShards, size: int) -> SequenceShards:
    """Return the shards with nodes in place of ranks."""
    return _with_ranks(shards.rank // size, shards, shards.ranks // size)


def _shards_in_node(shards: SequenceShards, size: int, node: int) -> SequenceShards:
    """Return the shards of one node's ranks, which need not cover the sequence."""
    return _with_ranks(shards.rank - node * size, shards, size)


def _with_ranks(rank: np.ndarray, shards: SequenceShards, ranks: int) -> SequenceShards:
    table = np.stack([rank, shards.start, shards.stop], 1)
    table = table[(rank >= 0) & (rank < ranks)]
    return SequenceShards(merge_pieces(torch.from_numpy(table)), ranks)
