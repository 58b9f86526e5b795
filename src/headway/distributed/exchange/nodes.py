"""Ranks that form nodes: what the ranks of one share, and nodes as ranks.

A node holds what its ranks hold. Inside of it an all-to-all gives every rank all of that, of some
heads (`ulysses.py`); then the ranks with the same place in their nodes are as many ranks of a
layout whose pieces are those of nodes, and any plan may run among them: of these heads, with the
block mask of a node's queries.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ...backends.base import Call
from ...types import Spec
from ..layout import merged
from .routes import Pieces
from .setting import Setting, setting_of


class Nodes(NamedTuple):
    """Nodes of `size` ranks; the groups of this node's ranks and of those with this rank's place in
    theirs. Rank r is number r % size of node r // size."""

    size: int
    inside: Any
    between: Any


class Node(NamedTuple):
    """The node of this rank.

    - `group`, `rank`: of its ranks, and the place of this one among them; `q`, `kv`: their pieces.
    - `setting`: of this rank's place in all nodes: its ranks are nodes.
    """

    group: Any
    rank: int
    q: Pieces
    kv: Pieces
    setting: Setting


def node_of(spec: Spec, call: Call, whole: Setting, nodes: Nodes, own_tiles: bool) -> Node:
    """The node of a rank, of the setting of all ranks; the mask is decided for nodes.

    **Raises:** `ArgumentError` as `setting_of` does.
    """
    number, place = divmod(whole.rank, nodes.size)
    q, kv = _as_ranks(whole.q, nodes.size), _as_ranks(whole.kv, nodes.size)
    setting = setting_of(spec, call, q, kv, nodes.between, number, own_tiles)
    shared = lambda pieces: _inside(pieces, nodes.size, number)
    return Node(nodes.inside, place, shared(whole.q), shared(whole.kv), setting)


def only(whole: Setting, heads: range, kv_heads: range) -> Setting:
    """The setting of some query heads and the key/value heads that they read."""
    mask, (b, h) = whole.whole, whole.offsets
    if mask is not None and mask.h > 1:
        mask = mask._replace(tiles=mask.of(heads, None, None), h=len(heads))
    sizes = whole.sizes._replace(hq=len(heads), hk=len(kv_heads))
    return replace(whole, sizes=sizes, whole=mask, offsets=(b, h + heads.start))


def _as_ranks(pieces: Pieces, size: int) -> Pieces:
    """The pieces of nodes."""
    return _made(pieces.rank // size, pieces, pieces.ranks // size)


def _inside(pieces: Pieces, size: int, node: int) -> Pieces:
    """Those of one node's ranks; together they need not cover the sequence."""
    return _made(pieces.rank - node * size, pieces, size)


def _made(rank: np.ndarray, pieces: Pieces, ranks: int) -> Pieces:
    table = np.stack([rank, pieces.start, pieces.stop], 1)
    table = table[(rank >= 0) & (rank < ranks)]
    return Pieces(merged(torch.from_numpy(table)), ranks)
