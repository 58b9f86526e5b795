"""What a function traced to a graph computes is what the function computes."""

import math

import pytest
import torch

import headway as hw
import oracle
from cases import BY_NAME, Case, problem
from headway.mods import lower_mod
from headway.mods.evaluation.derivative import differentiable_gathers, joint
from headway.mods.evaluation.evaluate import evaluate
from headway.mods.evaluation.pointwise import Positions, mask_at, score_at
from headway.mods.graph import parse
from headway.mods.tracing import trace
from variants import MASKS, SCORES

CASE = Case("trace", q_len=48, kv_len=48)
AT = oracle.grid(CASE.b, CASE.hq, CASE.q_len, CASE.kv_len)
SHAPE = (CASE.b, CASE.hq, CASE.q_len, CASE.kv_len)
table = torch.randn(CASE.hq, 9, dtype=torch.float64)
bucket = torch.randint(0, 9, (97,), dtype=torch.int32)
flags = torch.rand(48) < 0.5
number = torch.tensor(0.7, dtype=torch.float64)


def _score(fn, s: torch.Tensor) -> torch.Tensor:
    graph, captured = lower_mod("score", fn, torch.float64)
    (t,), _ = score_at(graph, captured, Positions(*AT), s, None)
    return torch.as_tensor(t, dtype=s.dtype).expand(SHAPE)


def _plain(fn, s: torch.Tensor) -> torch.Tensor:
    """Once per pair, on numbers."""
    pairs = torch.ones(SHAPE, dtype=torch.bool).nonzero(as_tuple=True)
    with oracle.IndexNumbers():
        t = torch.vmap(lambda *pair: torch.as_tensor(fn(*pair)))(s[pairs], *pairs)
    return t.to(s.dtype).view(SHAPE)


OPS = {
    "arithmetic": lambda s, b, h, i, j: (s + 1) * 2 - s / 3 + (-s) + 1 / (s * s + 1),
    "right-hand": lambda s, b, h, i, j: 2 - s + 3 / (s.abs() + 1) + 2 ** (s * 0.1),
    "floor of ints": lambda s, b, h, i, j: s + (i - j) // 7 + (j - i) // -5,
    "remainder of ints": lambda s, b, h, i, j: s + (i - j) % 7 + (j - i) % -5 + torch.remainder(i, 3),
    "floor of floats": lambda s, b, h, i, j: s // 0.3 + s % 0.7 + torch.fmod(s, 0.4),
    "division of ints": lambda s, b, h, i, j: s + (i - j) / 4 + torch.div(i - j, 3, rounding_mode="trunc"),
    "powers": lambda s, b, h, i, j: s**2 + s**3 + (s.abs() + 1) ** 0.5 + (s.abs() + 1) ** -1,
    "exponentials": lambda s, b, h, i, j: s.exp() + torch.exp2(s) + s.expm1() + s.sigmoid(),
    "logarithms": lambda s, b, h, i, j: (s.abs() + 1).log() + s.abs().log1p() + (s * s + 1).log2(),
    "roots": lambda s, b, h, i, j: (s * s + 1).sqrt() + torch.rsqrt(s * s + 1) + (s + 9).reciprocal(),
    "waves": lambda s, b, h, i, j: s.sin() + torch.cos(s) + s.tanh() + torch.erf(s),
    "rounding": lambda s, b, h, i, j: s.floor() + s.ceil() + s.round() + s.trunc() + s.sign(),
    "limits": lambda s, b, h, i, j: s.clamp(-1, 1) + s.clamp(min=0.5) + torch.clip(s, max=0.2) + s.relu(),
    "extremes": lambda s, b, h, i, j: torch.maximum(s, -s) + torch.minimum(s, torch.sin(s)),
    "where": lambda s, b, h, i, j: torch.where(s > 0, s, 0.0) + torch.where((i > j) & (h != 1), 1, s),
    "casts": lambda s, b, h, i, j: s + (i - j).float() + (i > j).to(s.dtype) + i.double() * 0.1 + s.int(),
    "booleans": lambda s, b, h, i, j: s + ((i > j) | ~(i == 3)) * 1.0 + ((i >= 5) ^ (j < 5)) * s,
    "logic": lambda s, b, h, i, j: s * torch.logical_and(i > 2, j) + torch.logical_not(j > 4) * 1,
    "bits": lambda s, b, h, i, j: s + ((i & 3) | (j ^ 5)) + (i << 1) + (j >> 2) + ~i,
    "comparisons": lambda s, b, h, i, j: s * (i <= j) + (s >= 0.1) + (s != s) + (i == j) * (s < 1),
    "alpha": lambda s, b, h, i, j: torch.add(s, s, alpha=0.5) + torch.sub(s, 1, alpha=2),
    "addcmul": lambda s, b, h, i, j: torch.addcmul(s, s, s, value=0.1) + torch.lerp(s, -s, 0.3),
    "activations": lambda s, b, h, i, j: torch.nn.functional.softplus(s)
    + torch.nn.functional.leaky_relu(s) + torch.nn.functional.silu(s) + torch.nn.functional.gelu(s),
    "constants": lambda s, b, h, i, j: s + torch.tensor(2.0) + math.pi + torch.zeros_like(s) + 1e-3,
    "python numbers": lambda s, b, h, i, j: s * True + int(3.7) + max(2, 3),
    "gather": lambda s, b, h, i, j: s + table[h, (i + j) % 9] + table[-1, 2] + table[h][0],
    "gather of a gather": lambda s, b, h, i, j: s + table[h, bucket[i - j + 48]],
    "negative index": lambda s, b, h, i, j: s + table[h, -1 - (i + j) % 9],
    "gather of flags": lambda s, b, h, i, j: torch.where(flags[i] & ~flags[j], s, -s),
    "number": lambda s, b, h, i, j: s * number + number.exp() * number,
    "constant": lambda s, b, h, i, j: 0.5,
    "index as score": lambda s, b, h, i, j: i - j,
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_operations(name):
    s = torch.randn(SHAPE, dtype=torch.float64) * 2
    torch.testing.assert_close(_score(OPS[name], s), _plain(OPS[name], s), rtol=1e-13, atol=1e-13)


def _in_place_score(s, b, h, i, j):
    s += 1
    s *= table[h, 0]
    t = s
    t.sub_(i)
    return s


def _in_place_index(s, b, h, i, j):
    d = i - j
    d.abs_()
    d += 2
    d //= 3
    return s + d


def _in_place_then_old(s, b, h, i, j):
    old = s + 0
    s.exp_()
    return s - old


def _branch_on_numbers(s, b, h, i, j):
    for n in range(3):
        s = s + table[h, n] if n % 2 else s * 0.9
    return s


@pytest.mark.parametrize(
    "fn", [_in_place_score, _in_place_index, _in_place_then_old, _branch_on_numbers]
)
def test_statements(fn):
    s = torch.randn(SHAPE, dtype=torch.float64)
    kept = s.clone()
    torch.testing.assert_close(_score(fn, s), _plain(fn, s.clone()), rtol=1e-13, atol=1e-13)
    assert torch.equal(s, kept)


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_the_table(name):
    """Values; the text form; and the derivatives by S and by everything that is gathered."""
    mask = {"outside": "causal_window", "negative": "causal_window", "undefined": "causal"}.get(
        name
    )
    case = Case(f"trace_{name}", q_len=37, kv_len=37, score=name, mask=mask)
    given = problem(case, torch.float64)
    at = oracle.grid(case.b, case.hq, case.q_len, case.kv_len)
    s = torch.randn(case.b, case.hq, case.q_len, case.kv_len, dtype=torch.float64)
    kept = torch.ones_like(s, dtype=torch.bool)
    if mask:
        kept &= given.mask(plain=True)(*at)
    graph, captured = lower_mod("score", given.score(), torch.float64)
    assert parse(graph.text) == graph
    assert parse(graph.text).text == graph.text

    leaf = s.clone().requires_grad_()
    exact, kept = oracle.through(given.score(plain=True), leaf, kept)
    (t,), _ = score_at(graph, captured, Positions(*at), s, kept)
    t = torch.as_tensor(t, dtype=s.dtype).expand_as(s)
    torch.testing.assert_close(t[kept], exact[kept], rtol=1e-12, atol=1e-12)

    wanted = differentiable_gathers(graph, range(len(captured.tensors)))
    derivative = joint(graph.text, wanted)
    assert parse(derivative.text) == derivative
    (again, by_s, *_), _ = score_at(derivative, captured, Positions(*at), s, kept)
    again, by_s = (torch.as_tensor(x, dtype=s.dtype).expand_as(s) for x in (again, by_s))
    torch.testing.assert_close(again[kept], exact[kept], rtol=1e-12, atol=1e-12)
    slope = torch.zeros_like(s)
    if exact.requires_grad:
        (got,) = torch.autograd.grad(exact[kept].sum(), leaf, allow_unused=True)
        slope = slope if got is None else got
    torch.testing.assert_close(by_s[kept], slope[kept], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_the_table(name):
    n = 48 if name == "tiled" else 37
    case = Case(f"trace_{name}", q_len=n, kv_len=n, mask=name)
    given = problem(case, torch.float64)
    at = oracle.grid(case.b, case.hq, case.q_len, case.kv_len)
    graph, captured = lower_mod("mask", given.mask(), torch.float32)
    assert parse(graph.text) == graph
    shape = (case.b, case.hq, case.q_len, case.kv_len)
    kept = mask_at(graph, captured, Positions(*at)).expand(shape)
    assert kept.dtype == torch.bool
    assert torch.equal(kept, given.mask(plain=True)(*at).expand(shape))


# -- the text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCORES)
def test_a_score_that_adds_is_s_and_what_it_is_at_0(name):
    case = Case(f"trace_{name}", q_len=37, kv_len=37, score=name)
    graph, captured = lower_mod("score", problem(case, torch.float64).score(), torch.float64)
    if name in ("alibi", "relative", "bias", "softcap"):
        assert graph.adds == (name != "softcap")
    if graph.adds:
        at = oracle.grid(case.b, case.hq, case.q_len, case.kv_len)
        s = torch.randn(case.b, case.hq, case.q_len, case.kv_len, dtype=torch.float64)
        (t,), _ = score_at(graph, captured, Positions(*at), s, s < -math.inf)
        (addend,), _ = score_at(graph, captured, Positions(*at), 0 * s, s < -math.inf)
        torch.testing.assert_close(t, s + addend, equal_nan=True)


def test_which_scores_add():
    add = [
        lambda s, b, h, i, j: (1.5 + table[h, j % 9] - i) + s,
        lambda s, b, h, i, j: s - torch.where(flags[j], number, i * j),
    ]
    more = [
        lambda s, b, h, i, j: (s + 1e30) - 1e30,
        lambda s, b, h, i, j: i - s,
        lambda s, b, h, i, j: s + s,
        lambda s, b, h, i, j: s + torch.tanh(s),
        lambda s, b, h, i, j: -s,
        lambda s, b, h, i, j: 2 * s,
        lambda s, b, h, i, j: torch.where(flags[j], s, s - 1),
        lambda s, b, h, i, j: s.half().float() + i,
        lambda s, b, h, i, j: table[h, j % 9],
        hw.alibi(4) >> hw.softcap(30.0),
    ]
    for fn in add + more:
        assert lower_mod("score", fn, torch.float64)[0].adds == (fn in add)


def test_text_of_a_score():
    slopes = torch.rand(4)

    def score(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    assert lower_mod("score", score, torch.float32)[0].text.split("\n") == [
        "score(score f32, b i64, h i64, q_idx i64, kv_idx i64, t0 f32[1])",
        "  %0 f32 = gather(t0, h)                    # return score + slopes[h] * (kv_idx - q_idx)",
        "  %1 i64 = sub(kv_idx, q_idx)",
        "  %2 f32 = to(%1)",
        "  %3 f32 = mul(%0, %2)",
        "  %4 f32 = add(score, %3)",
        "  return %4",
    ]


def test_text_of_a_mask_is_the_same_for_every_number():
    texts = {
        lower_mod("mask", hw.causal(n) & hw.sliding_window(n + 1), torch.float32)[0].text
        for n in (0, 1, 7)
    }
    assert len(texts) == 1
    assert "n0 i64, n1 i64" in texts.pop()


def test_what_is_computed_twice_is_computed_once():
    def score(s, b, h, i, j):
        return s + table[h, i - j] * table[h, i - j] + (i - j) * (i - j)

    graph, captured = lower_mod("score", score, torch.float64)
    ops = [node.op for node in graph.nodes]
    assert ops.count("gather") == ops.count("sub") == 1
    assert [t is table for t in captured.tensors] == [True]


def test_constants_fold():
    graph, _ = lower_mod("score", lambda s, b, h, i, j: s * (2.0 * 3) + 0 * 1, torch.float32)
    assert [(n.op, n.args) for n in graph.nodes] == [("mul", ("score", 6.0))]
    graph, _ = lower_mod("mask", lambda b, h, i, j: (i >= j) & True, torch.float32)
    assert len(graph.nodes) == 1


def test_what_is_not_used_is_not_captured():
    unused = torch.randn(3)
    graph, captured = lower_mod(
        "score", lambda s, b, h, i, j: (s, table[h, 0] + unused[0])[0], torch.float64
    )
    assert graph.nodes == ()
    assert captured.tensors == []
    assert not graph.uses("h")


def test_the_dtype_of_the_score_is_the_accumulation_dtype():
    seen = []

    def score(s, b, h, i, j):
        seen.append((s.dtype, h.dtype, s.shape, i.shape))
        return s

    for dtype in (torch.float32, torch.float64):
        trace.trace("score", score, dtype)
        assert seen.pop() == (dtype, torch.int64, (), ())


def test_evaluate_reuses_its_buffers():
    """A long score on tiles: intermediates share memory, and the result is the same."""
    given = problem(BY_NAME["score_all_sorts"], torch.float64)
    graph, captured = lower_mod("score", given.score(), torch.float64)
    case = given.case
    at = oracle.grid(case.b, case.hq, case.q_len, case.kv_len)
    s = torch.randn(case.b, case.hq, case.q_len, case.kv_len, dtype=torch.float64)
    made = []

    def scratch(dtype):
        made.append(torch.full(s.shape, math.nan).to(dtype))
        return made[-1]

    with torch.no_grad():
        (plain,), _ = score_at(graph, captured, Positions(*at), s, None)
        (t,), _ = score_at(graph, captured, Positions(*at), s.clone(), None, scratch, True)
    assert torch.equal(t, plain)
    big = [n for n in graph.nodes if n.dtype == "f64"]
    assert len(made) < len(big)


def test_evaluate_is_what_parse_reads():
    graph, _ = lower_mod("mask", hw.causal() & ~hw.sliding_window(3), torch.float32)
    values = dict(zip(("b", "h", "q_idx", "kv_idx"), AT, strict=True))
    values |= {"n0": torch.tensor(0), "n1": torch.tensor(3)}
    gather = lambda n, t, at: t[at]
    (one,) = evaluate(graph, values, gather)
    (other,) = evaluate(parse(graph.text), values, gather)
    assert torch.equal(one, other)
