"""The pair of pure functions: shards are coordinates, and what they return adds up.

Cases are cut along batch, heads, queries and keys at once. Each shard's forward gets its part of
the tensors and says where it stands; the parts over disjoint keys merge to the whole. Each shard's
backward, given the merged out and lse, returns its share of the exact gradients.
"""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import headway as hw
import oracle
from cases import BY_NAME, Problem, problem
from checks import compare, poisoned
from headway import backends
from headway.api import prepare
from headway.backends.base import Call
from headway.types import Coords, Spec

CASES = """length_65 length_129_causal lengths_127_301_end mask_padding_sink mask_prefix_lm
    mask_causal_late mask_no_row mask_nothing mask_by_batch mask_causal_document mask_dense
    score_by_batch score_relative_masked score_twice_masked score_bias_all score_outside
    score_undefined score_holes score_buckets dropout_0.5 dropout_0.1_all dropout_long
    long_513_513_end long_score_alibi_softcap long_by_head long_checker""".split()


class Shard(NamedTuple):
    b: slice
    hk: slice
    i: slice
    j: slice
    group: int

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """Batch, query heads, queries."""
        return self.b, slice(self.hk.start * self.group, self.hk.stop * self.group), self.i

    def call(self, given: Problem, backend: str, **asked: bool) -> tuple[Spec, Call]:
        case, (b, h, i) = given.case, self.rows
        q, k, v = (x.detach() for x in (given.q, given.k, given.v))
        # A sink is like one more key: it belongs to one of the shards along the keys.
        sink = given.sink.detach()[h] if case.sink and self.j.start == 0 else None
        return prepare(
            q[b, h, i], k[b, self.hk, self.j], v[b, self.hk, self.j], given.score(), given.mask(),
            scale=case.scale, sink=sink, dropout=case.dropout,
            seed=given.seed if case.dropout else None, backend=backend, partial=True,
            coords=Coords(b.start, h.start, i.start, self.j.start), **asked,
        )  # fmt: skip


def _cuts(length: int, parts: int) -> list[slice]:
    """Uneven ranges that cover the length, none of them empty."""
    edges = {1: [], 2: [length // 3], 3: [length // 3, length // 3 + 1]}[min(parts, length)]
    edges = sorted({0, *edges, length})
    return [slice(*pair) for pair in itertools.pairwise(edges)]


def _shards(case, parts: tuple[int, int, int, int]) -> list[Shard]:
    lengths = case.b, case.hk, case.q_len, case.kv_len
    cuts = [
        [c for c in _cuts(n, p) if c.start < c.stop] for n, p in zip(lengths, parts, strict=True)
    ]
    return [Shard(*at, case.hq // case.hk) for at in itertools.product(*cuts)]


def _together(given: Problem, backend: str, shards: list[Shard]) -> dict[str, Tensor]:
    """The results of the whole, from those of the shards."""
    case, pair = given.case, backends.get(backend)
    acc = torch.float64 if given.q.dtype == torch.float64 else torch.float32
    out = torch.empty(case.b, case.hq, case.q_len, case.dv, dtype=acc)
    lse = torch.empty(out.shape[:3], dtype=acc)
    row_max = torch.full(out.shape[:3], -math.inf, dtype=acc)
    max_logit = torch.full(out.shape[:2], -math.inf, dtype=acc)
    for _, group in itertools.groupby(shards, lambda shard: shard.rows):
        parts = []
        for shard in group:
            parts.append(pair.forward(*shard.call(given, backend, max_logit=True, row_max=True)))
            for whole, part in ((row_max[shard.rows], parts[-1].row_max),
                                (max_logit[shard.rows[:2]], parts[-1].max_logit)):  # fmt: skip
                whole.copy_(torch.maximum(whole, part))
        out[shard.rows], lse[shard.rows] = hw.merge(*(part[:2] for part in parts))

    grads = {name: torch.zeros(t.shape, dtype=acc) for name, t in given.leaves().items()}
    for shard in shards:
        at, keys = shard.rows, (shard.b, shard.hk, shard.j)
        spec, call = shard.call(given, backend)
        tensors = call.captured.tensors[: spec.score_tensors]
        part = pair.backward(
            spec, call, out[at], lse[at], given.dout[at], given.dlse[at],
            tuple(t.requires_grad for t in tensors),
        )  # fmt: skip
        grads["q"][at] += part.q
        grads["k"][keys] += part.k
        grads["v"][keys] += part.v
        if call.sink is not None:
            grads["sink"][at[1]] += part.sink
        for tensor, grad in zip(tensors, part.captured, strict=True):
            if grad is not None:
                (name,) = (n for n, t in given.captured.items() if t is tensor)
                grads[name] += grad
    made = {"out": out.to(given.q.dtype), "lse": lse, "max_logit": max_logit, "row_max": row_max}
    return made | {f"grad {name}": grad for name, grad in grads.items()}


@pytest.mark.parametrize("parts", [(1, 1, 1, 3), (2, 2, 2, 2)], ids=["keys", "everything"])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("reference", torch.float64), ("cpu", torch.float64), ("cpu", torch.float32)],
    ids=["reference-f64", "cpu-f64", "cpu-f32"],
)
@pytest.mark.parametrize("name", CASES)
def test_shards_add_up(name, backend, dtype, parts):
    case = BY_NAME[name]
    given = problem(case, dtype)
    with poisoned(), torch.no_grad():
        made = _together(given, backend, _shards(case, parts))
    assert compare(case, dtype, made, stats=True) == []
    wide = given.copy(torch.float64)
    with torch.no_grad():
        t = oracle.scores(
            wide.q, wide.k, wide.score(plain=True), wide.mask(plain=True), case.scale
        ).t
    torch.testing.assert_close(
        made["row_max"].double(), t.amax(-1), rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-5
    )


@pytest.mark.parametrize("per_batch", [False, True], ids=["one_order", "order_per_batch"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "name", ["mask_causal", "score_relative_masked", "dropout_0.1_all", "long_causal_document"]
)
@torch.no_grad()
def test_positions_may_be_given(name, backend, per_batch):
    """Queries and keys in any order, and another one in every row of the batch."""
    case = BY_NAME[name]
    given = problem(case, torch.float64)
    q_pos, kv_pos = (
        torch.stack([torch.randperm(n) for _ in range(case.b if per_batch else 1)])
        for n in (case.q_len, case.kv_len)
    )

    def shuffled(x: Tensor, pos: Tensor) -> Tensor:
        pos = pos.expand(case.b, -1).view(case.b, 1, -1, *[1] * (x.dim() - 3))
        return x.detach().take_along_dim(pos, 2)

    spec, call = prepare(
        shuffled(given.q, q_pos), shuffled(given.k, kv_pos), shuffled(given.v, kv_pos),
        given.score(), given.mask(), scale=case.scale, sink=given.sink, dropout=case.dropout,
        seed=given.seed if case.dropout else None, backend=backend, max_logit=True,
        coords=Coords(q_pos=q_pos if per_batch else q_pos[0], kv_pos=kv_pos.squeeze(0)),
    )  # fmt: skip
    pair = backends.get(backend)
    out, lse, max_logit, _ = pair.forward(spec, call)
    dout, dlse = shuffled(given.dout, q_pos), shuffled(given.dlse, q_pos)
    grads = pair.backward(spec, call, out, lse, dout, dlse, (True,) * spec.score_tensors)
    back, kv_back = q_pos.argsort(-1), kv_pos.argsort(-1)
    made = {"out": shuffled(out, back), "lse": shuffled(lse, back), "max_logit": max_logit}
    made |= {"grad q": shuffled(grads.q, back), "grad sink": grads.sink}
    made |= {"grad k": shuffled(grads.k, kv_back), "grad v": shuffled(grads.v, kv_back)}
    if grads.captured:
        made["grad table"] = grads.captured[0]
    assert compare(case, torch.float64, made, stats=True) == []


# -- merge ----------------------------------------------------------------------------------------


def _partials(n: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Partial results; some rows are seen by one partial, by two, by none."""
    parts = []
    for at in range(n):
        out = torch.randn(2, 3, 7, 5, dtype=torch.float64)
        lse = 3 * torch.randn(2, 3, 7, dtype=torch.float64)
        lse[:, :, :at] = -math.inf
        lse[:, 1, 4] = -math.inf
        out[lse == -math.inf] = 0
        parts.append((out.requires_grad_(), lse.requires_grad_()))
    return parts


def test_merge_is_the_weighted_mean():
    parts = _partials()
    out, lse = hw.merge(*parts)
    lses = torch.stack([lse for _, lse in parts])
    weights = torch.softmax(lses, 0).nan_to_num(0)
    exact = (weights[..., None] * torch.stack([out for out, _ in parts])).sum(0)
    torch.testing.assert_close(out, exact, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, torch.logsumexp(lses, 0), rtol=1e-13, atol=1e-13)
    assert (out[:, 1, 4] == 0).all()
    assert (lse[:, 1, 4] == -math.inf).all()


def test_merge_of_one_is_itself():
    ((out, lse),) = _partials(1)
    merged = hw.merge((out, lse))
    assert torch.equal(merged[0], out)
    assert torch.equal(merged[1], lse)


def test_gradients_of_merge():
    parts = _partials()
    seen = [lse.detach() > -math.inf for _, lse in parts]
    flat = [x for part in parts for x in part]

    def finite(*flat: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = hw.merge(*zip(flat[::2], flat[1::2], strict=True))
        return out, lse.masked_fill(lse == -math.inf, 0)

    made = finite(*flat)
    sent = [torch.randn_like(x) for x in made]
    grads = torch.autograd.grad(made, flat, sent)
    assert all(g.isfinite().all() for g in grads)
    # Plain autograd on the rows that every partial has seen.
    every = torch.stack(seen).all(0)
    lses = torch.stack([lse for _, lse in parts])[:, every]
    outs = torch.stack([out for out, _ in parts])[:, every]
    plain = (torch.softmax(lses, 0)[..., None] * outs).sum(0), torch.logsumexp(lses, 0)
    exact = torch.autograd.grad(plain, flat, [x[every] for x in sent])
    for n, (got, right) in enumerate(zip(grads, exact, strict=True)):
        torch.testing.assert_close(got[every], right[every], rtol=1e-12, atol=1e-12)
        assert (got[~seen[n // 2]] == 0).all()


def test_training_through_merge():
    """Attention over two halves of the keys, merged: the gradients of attention over all."""
    q, k, v = (torch.randn(2, 4, 50, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    parts = [hw.attention_with_stats(q, k[:, :, at], v[:, :, at])[:2]
             for at in (slice(0, 20), slice(20, None))]  # fmt: skip
    whole = hw.attention_with_stats(q, k, v)[:2]
    sent = [torch.randn_like(x) for x in whole]
    for got, right in zip(
        torch.autograd.grad(hw.merge(*parts), (q, k, v), sent),
        torch.autograd.grad(whole, (q, k, v), sent),
        strict=True,
    ):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-11)


def test_merge_has_the_dtype_of_out():
    parts = [(out.detach().bfloat16(), lse.detach().float()) for out, lse in _partials()]
    out, lse = hw.merge(*parts)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_merge_says_what_does_not_fit():
    (out, lse), other = _partials(2)
    with pytest.raises(ValueError, match=r"partial 1: out \(2, 3, 6, 5\) and lse \(2, 3, 6\)"):
        hw.merge((out, lse), (other[0][:, :, 1:], other[1][:, :, 1:]))
    with pytest.raises(ValueError, match=r"at least one \(out, lse\)"):
        hw.merge()
