"""The waist's `tangent`: out, lse and how they move, on the cases of the table, by definition."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import headway as hw
import oracle
from cases import BY_NAME, CASES, Case, Problem, problem
from headway import backends
from headway.backends.cpu import tangent_blocks
from headway.resolve import prepare
from headway.types import Coords, Dual, Tangents
from long import long_unless
from tangents import compare, dense, directions, moved_alike, rounded, run, too_far

# Of a backend; "triton" runs in the interpreter (`tools/interpret_tangents.py`).
PRECISION = {
    "cpu": (torch.float64, 1e-11), "reference": (torch.float64, 1e-11),
    "triton": (torch.float32, 3e-5),
}  # fmt: skip
BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])
HALF = [case for case in CASES if "half" in case.tags]
# The tiles of a mask are those of a call, which `test_table` has of every mask.
MASKS = [c for c in CASES if c.name.startswith("long_") and "mask" in c.tags and c not in HALF]
FLOAT64 = {*CASES} - {*MASKS} | {*MASKS[::4]}


@pytest.mark.parametrize("case", long_unless(FLOAT64, CASES), ids=str)
def test_float64(case):
    case = replace(case, entropy=True)
    given = problem(case, torch.float64)
    along = directions(given)
    exact = dense(given.copy(), along)
    for backend in ("cpu", "reference") if "half" in case.tags else ("cpu",):
        dual = run(given, along, backend, max_logit=True, row_max=True)
        compare(dual, exact, 1e-11)
        spec, call = prepare(given.q, given.k, given.v, backend=backend)
        assert dual.out.dtype == dual.out_tangent.dtype == spec.result_dtype(call.q.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("case", HALF[::3], ids=str)
def test_half(case, dtype):
    """At most 1.5 times the error of the dense formulas in that dtype, all elements together."""
    given = problem(case, dtype)
    along = directions(given)
    dual = run(given, along, "cpu")
    assert dual.out_tangent.dtype == dtype
    assert too_far(dual, given, along) == []


# Which inputs move: the products of the others are left out.
MOVING = ["", "q", "k", "v", "sink", "q k", "q v", "k v", "slopes"]


@BACKENDS
@pytest.mark.parametrize("names", MOVING, ids=lambda names: names or "nothing")
def test_what_moves(names, backend):
    given = problem(Case("moving", score="alibi_learned", mask="causal", sink=True), torch.float64)
    names = [*given.learned()] if names == "slopes" else names.split()
    along = directions(given, tuple(names))
    assert set(along) == set(names)
    compare(run(given, along, backend), dense(given.copy(), along), 1e-11)


@BACKENDS
@pytest.mark.parametrize("name", ["mask_padding_sink", "score_relative_masked", "dropout_0.1_all"])
def test_parts_over_disjoint_keys_merge(name, backend):
    dtype, tolerance = PRECISION[backend]
    given = problem(BY_NAME[name], dtype)
    along = directions(given)
    case, parts = given.case, []
    for keys in (slice(0, 13), slice(13, case.kv_len)):
        cut = lambda x, keys=keys: x[:, :, keys]
        part = given.copy()
        part = Problem(
            case, part.q, cut(part.k), cut(part.v), part.sink if keys.start else None,
            given.captured, part.dout, part.dlse, part.seed,
        )  # fmt: skip
        moves = {n: cut(t) if n in ("k", "v") else t for n, t in along.items()}
        moves = {n: t for n, t in moves.items() if n != "sink" or keys.start}
        parts.append(run(part, moves, backend, partial=True, keys=Coords(kv=keys.start)))
    merged = torch.func.jvp(
        lambda *x: hw.merge(x[:2], x[2:]),
        tuple(x for part in parts for x in (part.out, part.lse)),
        tuple(x for part in parts for x in (part.out_tangent, part.lse_tangent)),
    )
    whole = Dual(*merged[0], None, None, None, *merged[1], None)
    compare(whole, dense(given.copy(), along), tolerance)


def test_by_the_oracle_itself():
    """The double backward that the others are compared with is PyTorch's own forward mode."""
    for name in ("mask_padding_sink", "std_5_softcap", "heads_6_2"):
        given = problem(BY_NAME[name], torch.float64).copy()
        along = directions(given)
        names = [*along]

        def call(*tensors, given=given, names=names):
            leaves = dict(zip(names, tensors, strict=True))
            case = given.case
            return oracle.attention(
                *[leaves[n] for n in "qkv"], given.score(plain=True), given.mask(plain=True),
                scale=case.scale, sink=leaves.get("sink"),
            )[:2]  # fmt: skip

        primal = tuple(given.leaves()[n].detach() for n in names)
        made, moved = torch.func.jvp(call, primal, tuple(along.values()))
        for ours, right in zip(dense(given, along), (*made, *moved), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


# -- numbers that are far apart, or none ------------------------------------------------------------


def test_a_mean_subtracted_at_the_end_is_found(monkeypatch):
    """Where all keys move alike, their mean is most of every T'. Carried through the softmax, it is
    not rounded: subtracted at the end, its roundings are all that is left."""
    inputs, along = moved_alike(1000.0, torch.bfloat16)
    exact = rounded(inputs, along, factors=None)
    near = rounded(inputs, along, factors=torch.bfloat16)

    def error(tangent: Tensor) -> float:
        return ((tangent.double() - exact).abs().max() / exact.abs().max()).item()

    def add(sums, t, t_tangent, observed):
        """Of published kernels: P T' goes into its product with the mean of T' in it."""
        p, _ = plain(sums, t, torch.zeros_like(t_tangent), observed)
        weights = p * t_tangent
        mean = getattr(sums, "sum", 0.0)
        sums.sum = mean + weights.sum(-1, keepdim=True)
        sums.mean = sums.sum / sums.total
        return p, weights.to(torch.bfloat16).float()

    plain = tangent_blocks._RowSums.add
    spec, call = prepare(*inputs.values(), backend="cpu")
    moves = Tangents(*along.values(), None, ())
    assert error(tangent_blocks.tangent(spec, call, moves).out_tangent) <= 1.5 * error(near)
    monkeypatch.setattr(tangent_blocks._RowSums, "add", add)
    wrong = tangent_blocks.tangent(spec, call, moves)
    at_the_end = wrong.out_tangent.double() - wrong.lse_tangent[..., None] * wrong.out.double()
    assert error(at_the_end) > 20 * error(near)


@BACKENDS
def test_a_pair_that_is_not_kept_counts_nothing(backend):
    """Whatever its tangent is, or the derivative of its score."""
    dtype, tolerance = PRECISION[backend]
    q, k, v, a, b = (torch.randn(1, 2, 9, 4, dtype=dtype) for _ in range(5))
    b[:, :, 5] = math.nan  # key 5, which nobody sees
    score = lambda s, b, h, i, j: torch.where(j == 6, -math.inf, (s * (j - 7)).abs().sqrt())
    mask = lambda b, h, i, j: (j != 5) & (j != 7)
    dual = hw.attention_jvp_with_stats(
        q, k, v, score, mask, tangents={"q": a, "k": b}, backend=backend
    )
    keys = [0, 1, 2, 3, 4, 8]
    kept = torch.tensor(keys)
    fewer = lambda s, b, h, i, j: (s * (kept[j] - 7)).abs().sqrt()
    right = hw.attention_jvp_with_stats(
        q, k[:, :, keys], v[:, :, keys], fewer, tangents={"q": a, "k": b[:, :, keys]},
        backend=backend,
    )  # fmt: skip
    for got, expected in zip(dual, right, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@BACKENDS
def test_rows_keep_their_own_nan(backend):
    q, k, v, a, b = (torch.randn(1, 2, 300, 4) for _ in range(5))
    a[:, :, 7] = math.nan
    for score, mask in ((None, None), (hw.softcap(2.0), hw.causal()), (None, hw.causal())):
        dual = hw.attention_jvp_with_stats(
            q, k, v, score, mask, tangents={"q": a, "v": b}, backend=backend
        )
        rows = dual.out_tangent.isnan().any(-1)[0, 0].nonzero().flatten().tolist()
        assert rows == dual.lse_tangent.isnan()[0, 0].nonzero().flatten().tolist() == [7]
        assert dual.out.isfinite().all()


@BACKENDS
def test_rows_that_see_nothing_do_not_move(backend):
    q, k, v, a, b = (torch.randn(2, 2, 6, 4) for _ in range(5))
    sink, moved = torch.randn(2), torch.randn(2)
    mask = lambda b, h, i, j: (i > 2) & (b == 0)
    moves = {"q": a, "k": b, "v": b}
    dual = hw.attention_jvp_with_stats(q, k, v, None, mask, tangents=moves, backend=backend)
    assert (dual.out_tangent[:, :, :3] == 0).all()
    assert (dual.lse_tangent[1] == 0).all()
    dual = hw.attention_jvp_with_stats(
        q, k, v, None, mask, tangents=moves | {"sink": moved}, sink=sink, backend=backend
    )
    assert (dual.out_tangent[1] == 0).all()
    torch.testing.assert_close(dual.lse_tangent[1], moved[:, None].expand(2, 6))


@pytest.mark.parametrize("level", [-1e9, 1e9])
def test_scores_that_are_all_large(level):
    """lse, one number, cannot hold them: P has to come from the same pass."""
    inputs, along = moved_alike(1.0, torch.float32)
    score = lambda s, b, h, i, j: torch.where(j % 2 == 0, s * 0 + level, s - 2 * abs(level))
    dual = hw.attention_jvp(*inputs.values(), score, tangents=along)
    v, moved = inputs["v"][:, :, ::2], along["v"][:, :, ::2]
    torch.testing.assert_close(dual[0], v.mean(2, keepdim=True).expand_as(dual[0]))
    torch.testing.assert_close(dual[1], moved.mean(2, keepdim=True).expand_as(dual[1]))


@BACKENDS
def test_empty_shapes(backend):
    for b, q_len, kv_len in ((0, 3, 4), (1, 0, 4), (1, 3, 0)):
        q, k = torch.randn(b, 2, q_len, 4), torch.randn(b, 2, kv_len, 4)
        out, tangent = hw.attention_jvp(q, k, k, tangents={"q": q, "k": k, "v": k}, backend=backend)
        assert out.shape == tangent.shape == q.shape
        assert (tangent == 0).all()


def test_memory_grows_with_length_only():
    """No square of pairs is held."""
    q, k, v, a, b, c = (torch.randn(1, 1, 4096, 16) for _ in range(6))
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                sizes.append(result.numel())
            return result

    spec, call = prepare(q, k, v, mask=hw.sliding_window(700), backend="cpu")
    with Sizes():
        backends.get("cpu").tangent(spec, call, Tangents(a, b, c, None, ()))
    assert max(sizes) <= 1 << 20
