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
from headway import autograd, backends
from headway.backends.base import Call
from headway.errors import ArgumentError
from headway.resolve import prepare
from headway.types import Coords, Spec
from positions import scattered

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
            keys=Coords(b.start, h.start, i.start, self.j.start), **asked,
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
def test_positions_may_be_given(name, backend, per_batch):
    """Queries and keys in any order, and another one in every row of the batch."""
    made = scattered(BY_NAME[name], torch.float64, backend, per_batch)
    assert compare(BY_NAME[name], torch.float64, made, stats=True) == []


def _given(name: str, n: int, b: int = 2) -> Tensor:
    return torch.arange(n) if name == "one" else torch.arange(n).expand(b, -1)


@pytest.mark.parametrize("given", ["none", "one", "per_batch"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_shard_may_be_empty(backend, q_len, kv_len, given):
    """Wherever it stands: no query, or queries that see no key."""
    q, k, v = (torch.randn(2, 2, n, 8, requires_grad=True) for n in (q_len, kv_len, kv_len))
    at = {} if given == "none" else {"q_pos": _given(given, q_len), "kv_pos": _given(given, kv_len)}
    slopes = torch.rand(2, requires_grad=True)
    masks = hw.causal(), hw.document(torch.arange(9) // 3), lambda b, h, i, j: (i * j) % 3 == 0
    for mask in (None, *masks):
        for score in (None, hw.alibi(slopes)):
            spec, call = prepare(
                q, k, v, score, mask, backend=backend, max_logit=True, keys=Coords(**at)
            )
            out, lse, max_logit, *_ = autograd.attention(spec, call)
            assert out.shape == (2, 2, q_len, 8)
            assert (out == 0).all()
            assert lse.shape == (2, 2, q_len)
            assert (lse == -math.inf).all()
            assert (max_logit == -math.inf).all()
            of = [q, k, v] if score is None else [q, k, v, slopes]
            assert all((g == 0).all() for g in torch.autograd.grad([out.sum()], of))


def _cut(n: int) -> Tensor:
    return torch.arange(n)


WRONG = {
    "too short": ({"q_pos": _cut(4)}, r"q_pos .* \(5,\) or \(2, 5\), one for every query, got \(4,\)"),
    "too long": ({"kv_pos": _cut(8)}, r"kv_pos .* \(7,\) or \(2, 7\), one for every key, got \(8,\)"),
    "of the other side": ({"kv_pos": _cut(5)}, "kv_pos"),
    "another batch": ({"q_pos": _cut(5).expand(3, -1)}, r"got \(3, 5\)"),
    "one row": ({"q_pos": _cut(5)[None]}, r"got \(1, 5\)"),
    "a head's": ({"q_pos": _cut(5).expand(2, 2, -1)}, r"got \(2, 2, 5\)"),
    "a number": ({"q_pos": torch.tensor(5)}, "q_pos"),
    "floats": ({"kv_pos": _cut(7).float()}, "got .* float32"),
    "booleans": ({"kv_pos": _cut(7) > 2}, "got .* bool"),
    "a list": ({"q_pos": list(range(5))}, "q_pos"),
    "elsewhere": ({"q_pos": _cut(5).to("meta")}, "q_pos is on meta, q on cpu"),
    "no integer": ({"q": 1.5}, "q=1.5 must be an integer"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_positions_are_checked(what):
    """A kernel reads as many as there are queries and keys."""
    at, said = WRONG[what]
    q, k, v = (torch.randn(2, 2, n, 8) for n in (5, 7, 7))
    with pytest.raises(ArgumentError, match=said):
        prepare(q, k, v, None, hw.causal(), keys=Coords(**at))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_positions_of_any_whole_number(backend, dtype):
    q, k, v = (torch.randn(2, 2, n, 8) for n in (5, 7, 7))
    made = []
    for of in (torch.int64, dtype):
        at = Coords(q_pos=torch.arange(3, 8).to(of), kv_pos=torch.arange(7).to(of))
        call = prepare(q, k, v, None, hw.causal(), backend=backend, keys=at)
        made.append(autograd.attention(*call).out)
    assert torch.equal(*made)


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


def test_merge_takes_what_attention_returns():
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    parts = [hw.attention_with_stats(q, k[:, :, at], v[:, :, at]) for at in (slice(4), slice(4, 9))]
    pairs = [(part.out, part.lse) for part in parts]
    assert all(map(torch.equal, hw.merge(parts[0], pairs[1]), hw.merge(*pairs)))
    compiled = torch.compile(hw.merge, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(*parts), hw.merge(*pairs)))


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
    for wrong in (out, (out, lse, lse)):
        with pytest.raises(ValueError, match=r"partial 0 is of type \w+; each must be a result of"):
            hw.merge(wrong)
