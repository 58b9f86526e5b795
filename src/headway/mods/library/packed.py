"""Scores and masks of packed sequences, in which a batch is one row, sequence after sequence."""

import math

import torch
from torch import Tensor

from ..base import Mask, MaskFn, Score, ScoreFn, show, value
from ..graph import Arg, Builder, Graph
from ..ops import COMPARISONS


@value
class PackedMask(Mask):
    """`mask` of packed tokens: it sees the sequence as b and positions in it, and no query sees
    another sequence.

    `ids` and `kv_ids` are the sequence of every query and key, int32, with -1 and -2 for tokens of
    no sequence. `pos` and `kv_pos` are their positions in it; without `kv_pos` the keys are packed
    as the queries are. A second row of `pos` has the places of the queries among all keys: what a
    position is behind the sequence's first key, its place is behind the row's.
    """

    ids: Tensor  # (q_len,)
    kv_ids: Tensor  # (kv_len,)
    pos: Tensor  # (q_len,) or (2, q_len)
    kv_pos: Tensor | None  # (kv_len,)
    mask: MaskFn | None

    def check_sizes(self, b, h, q_len, kv_len):
        """Accept the sizes of the packed row: `mask` is checked for the sequences."""

    def __call__(self, b, h, q_idx, kv_idx):
        same = self.ids[q_idx] == self.kv_ids[kv_idx]
        if self.mask is None:
            return same
        return same & self.mask(self.ids[q_idx].long(), h, *_positions(self, q_idx, kv_idx))

    def simplified(self, graph):
        return _by_distance(graph, self)

    def __repr__(self) -> str:
        return f"packed({'' if self.mask is None else show(self.mask)})"


@value
class PackedScore(Score):
    """`score` of packed tokens; see `PackedMask`."""

    ids: Tensor  # (q_len,)
    kv_ids: Tensor  # (kv_len,)
    pos: Tensor  # (q_len,) or (2, q_len)
    kv_pos: Tensor | None  # (kv_len,)
    score: ScoreFn

    def check_sizes(self, b, h, q_len, kv_len):
        """Accept the sizes of the packed row: `score` is checked for the sequences."""

    def __call__(self, score, b, h, q_idx, kv_idx):
        b = self.ids[q_idx].long()
        return self.score(score, b, h, *_positions(self, q_idx, kv_idx))

    def simplified(self, graph):
        return _by_distance(graph, self)

    def __repr__(self) -> str:
        return f"packed({show(self.score)})"


@value
class KeptLogit(Score):
    """The logit where `score` keeps the pair, else -inf."""

    score: ScoreFn

    def __call__(self, score, b, h, q_idx, kv_idx):
        new_score = self.score(score.clone(), b, h, q_idx, kv_idx)  # it may write in place
        if not isinstance(new_score, Tensor):
            return score if new_score != -math.inf else new_score
        return torch.where(new_score == -math.inf, -math.inf, score)


def _positions(packed: PackedMask | PackedScore, q_idx: Tensor, kv_idx: Tensor) -> list[Tensor]:
    """Return the positions of a query and a key in their sequences, int64."""
    pos = packed.pos[q_idx] if packed.pos.dim() == 1 else packed.pos[0, q_idx]
    kv_pos = packed.pos if packed.kv_pos is None else packed.kv_pos
    return [pos.long(), kv_pos[kv_idx].long()]


_POS, _KV_POS = "t2", "t3"  # the graph's inputs for `pos` and `kv_pos`, where there is one


def _by_distance(graph: Graph, packed: PackedMask | PackedScore) -> Graph:
    """Return the graph with places in the row in place of positions in a sequence.

    Both have the same differences. A graph that depends on anything else of them is returned as it
    is. Backends know `causal()` best by its plain positions.
    """
    alike = packed.kv_pos is None
    if not alike and packed.pos.dim() == 1:
        return graph
    tables = {_POS} if alike else {_POS, _KV_POS}
    builder = Builder()
    new_names: dict[Arg, Arg] = {}
    shifts: dict[Arg, int] = {}  # by how much a value grows if both positions grow by 1
    for n, node in enumerate(graph.nodes):
        args = tuple(new_names.get(a, a) for a in node.args)
        shift = {shifts.get(a, 0) for a in node.args}
        if node.op == "gather" and node.args[0] in tables:
            place = args[-1]
            if not alike and node.args[0] == _POS:
                place = builder.emit("gather", (_POS, 1, place), node.dtype, node.line)
                place = builder.emit("to", (place,), "i64", node.line)
            new_names[f"%{n}"], shifts[f"%{n}"] = place, 1
            continue
        if node.op == "to" and node.dtype == "i64" and shift != {0}:
            new_names[f"%{n}"], shifts[f"%{n}"] = args[-1], shift.pop()
            continue
        if node.op in ("add", "sub", "neg") and node.dtype == "i64":
            first, *second = (shifts.get(a, 0) for a in node.args)
            signs = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}[node.op]
            shifts[f"%{n}"] = sum(s * x for s, x in zip(signs, (first, *second), strict=True))
        elif shift != {0} and not (node.op in COMPARISONS and len(shift) == 1):
            return graph
        new_names[f"%{n}"] = builder.emit(node.op, args, node.dtype, node.line)
    if any(shifts.get(a, 0) for a in graph.outputs):
        return graph
    outputs = tuple(new_names.get(a, a) for a in graph.outputs)
    return builder.finish(graph.kind, graph.inputs, outputs)
