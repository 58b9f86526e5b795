"""The functions generated for scores and masks, as text: golden files, widths, what is summed."""

import dataclasses
from importlib.util import find_spec

import pytest
import torch

import headway as hw
from headway.errors import ModError
from headway.mods import lower_mod
from headway.mods.evaluation.derivative import differentiable_gathers
from headway.mods.graph import parse

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from headway.backends.gpu.codegen import emit
from headway.backends.gpu.codegen.dependence import dependence_of

SLOPES = torch.rand(4)
TABLE = torch.randn(4, 9)
IDS = torch.zeros(2, 32, dtype=torch.int64)
LENGTHS = torch.zeros(2, dtype=torch.int64)


def buckets(s, b, h, q_idx, kv_idx):
    distance = (q_idx - kv_idx).clamp(min=0)
    return s + TABLE[h, torch.minimum(distance // 4, torch.tensor(8))]


def steps(b, h, q_idx, kv_idx):
    return (q_idx // 64 == kv_idx // 64) | (kv_idx % 7 == 0)


def far_product(b, h, q_idx, kv_idx):
    return (q_idx * kv_idx) % 1000 < 500


CHOSEN = torch.zeros(8, 3, dtype=torch.int64)


def special(s, b, h, q_idx, kv_idx):
    angle = torch.atan2(s, TABLE[h, 0]) + torch.asinh(s) - torch.hypot(s, TABLE[h, 1])
    return angle * torch.copysign(torch.erfc(s), q_idx - kv_idx) + torch.lgamma(s.abs() + 1)


def short_vectors(s, b, h, q_idx, kv_idx):
    nearest = TABLE.mT[:3, h].amax()
    return s + nearest + torch.stack([s, TABLE[h, q_idx % 9]]).sum()


def chosen(b, h, q_idx, kv_idx):
    return (CHOSEN[q_idx // 64] == (kv_idx // 64).unsqueeze(-1)).any(-1)


GOLDEN = {
    "alibi_softcap": (hw.alibi(SLOPES) >> hw.softcap(30.0), hw.causal()),
    "relative_bias": (hw.relative_bias(TABLE), hw.causal() & hw.sliding_window(1024)),
    "buckets": (buckets, hw.causal() & hw.document(IDS)),
    "far_product": (None, far_product),
    "steps": (None, steps),
    "special": (special, hw.causal()),
    "short_vectors": (short_vectors, chosen),
}


def codegen_spec_of(score, mask, learn: bool = True, narrow: bool = True) -> emit.CodegenSpec:
    graphs = [
        None if mod is None else lower_mod(kind, mod, torch.float32)[0]
        for kind, mod in (("score", score), ("mask", mask))
    ]
    count = sum(len(g.tensors) for g in graphs if g is not None)
    wanted = ()
    if learn and graphs[0] is not None:
        wanted = differentiable_gathers(graphs[0], range(len(graphs[0].tensors)))
    texts = [None if g is None else g.text for g in graphs]
    return emit.CodegenSpec(*texts, wanted, narrow=narrow, wide_offsets=(False,) * count)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name, golden):
    golden(f"triton/{name}.py", emit.source(codegen_spec_of(*GOLDEN[name])))


def test_golden_of_a_hoisted_mask(golden):
    mask = hw.causal() & hw.sliding_window(1024) & hw.document(IDS) | hw.prefix(LENGTHS)
    codegen_spec = dataclasses.replace(codegen_spec_of(None, mask), affine=True, hoist=True)
    golden("triton/hoisted_mask.py", emit.source(codegen_spec))


@pytest.mark.parametrize("name", GOLDEN)
def test_functions_are_found_by_name(name):
    codegen_spec = codegen_spec_of(*GOLDEN[name])
    module = emit.load_module(codegen_spec)
    assert emit.load_module(codegen_spec) is module
    assert hasattr(module, "score") == (GOLDEN[name][0] is not None)
    assert hasattr(module, "mask")


def test_longer_vectors_are_refused_by_name():
    few, many = (lambda s, b, h, *_, n=n: s + TABLE.flatten()[:n].sum() for n in (16, 17))
    assert emit.source(codegen_spec_of(few, None, False)).count("tl.load") == 16 * 2
    with pytest.raises(
        ModError, match="reduces 17 numbers per pair; GPU kernels unroll at most 16"
    ):
        emit.source(codegen_spec_of(many, None, False))


def test_products_of_positions_are_wide():
    narrow = emit.source(codegen_spec_of(*GOLDEN["far_product"]))
    assert "tl.cast(q_idx, tl.int64) * kv_idx" in narrow
    assert "int64" not in emit.source(codegen_spec_of(*GOLDEN["steps"]))


KINDS = {
    "one": lambda s, b, h, i, j: s * SLOPES[h],
    "rows": lambda s, b, h, i, j: s + TABLE[h, i % 9],
    "cols": lambda s, b, h, i, j: s + TABLE[h, (j // 3).clamp(0, 8)],
    "diagonals": lambda s, b, h, i, j: s + TABLE[h, (2 * j - 3 - (i + i)).clamp(-4, 4) + 4],
    "pairs": lambda s, b, h, i, j: s + TABLE[h, (2 * j - i) % 9],
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_summed_first(kind):
    graph = parse(codegen_spec_of(KINDS[kind], None).score)
    ((_, gather),) = graph.gathers
    assert dependence_of(graph, gather.args[1:]) == kind


def test_an_index_made_of_the_score_varies_by_pair():
    graph = parse(
        codegen_spec_of(lambda s, b, h, i, j: s + TABLE[h, s.long().clamp(0, 8)], None).score
    )
    ((_, gather),) = graph.gathers
    assert dependence_of(graph, gather.args[1:]) == "pairs"


def test_one_number_divides_all_pairs_as_its_reciprocal():
    text = emit.source(
        codegen_spec_of(lambda s, b, h, i, j: s / 30.0 / SLOPES[h] / (i + 1), None, False)
    )
    assert "score * (1 / 30.0)" in text
    assert "* (1 / v1)" in text
    assert "v5 = v2 / v4" in text
    assert "/ 0.0" in emit.source(codegen_spec_of(lambda s, b, h, i, j: s / 0.0, None, False))


DISTANCES = {
    "abs(q_idx - kv_idx)": (lambda i, j: (i - j).abs(), True),
    "below a bound": (lambda i, j: (j - i).clamp(-100, 100), True),
    "a product that is rounded once": (lambda i, j: i * j, True),
    "a sum of what is rounded": (lambda i, j: (i - j) + 1, False),
    "per query": (lambda i, j: i + 1, False),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_are_computed_in_float32_where_that_is_the_same(name):
    distance, same = DISTANCES[name]
    score = emit.source(codegen_spec_of(lambda s, b, h, i, j: s * distance(i, j), None, False))
    assert ("tl.cast(q_idx, tl.float32)" in score.split("def derivative")[0]) == same


def test_the_rough_tanh_costs_less_than_bfloat16():
    """Wrong by 2^-11 of its value; bfloat16 rounds P, and plain PyTorch the logits too, to 2^-9."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 512, 64, dtype=torch.bfloat16) for _ in range(3))

    def attend(dtype, error=0.0):
        s = 3 * (q.to(dtype) @ k.to(dtype).mT) / 8
        t = torch.tanh(s / 20)
        t = 20 * t * (1 + error * torch.randn(t.shape).sign())
        return t.softmax(-1).to(dtype) @ v.to(dtype)

    exact = attend(torch.float64)
    off = lambda x: ((x.double() - exact).norm() / exact.norm()).item()
    assert off(attend(torch.float64, 2**-11)) < 0.5 * off(attend(torch.bfloat16))
    rough = dataclasses.replace(codegen_spec_of(*GOLDEN["alibi_softcap"]), approx_tanh=True)
    assert "maths.approx_tanh" in emit.source(rough)


def test_diagonals_are_read_once_where_the_kernel_has_tiles():
    codegen_spec = dataclasses.replace(codegen_spec_of(*GOLDEN["relative_bias"]), per_diagonal=True)
    source = emit.source(codegen_spec)
    assert source.count("tl.load") == 1  # in bias0; where gradients go, nothing is read
    assert source.count("diagonals.expand(bias0, ") == 2  # score and derivative
    nested = lambda s, b, h, i, j: s + TABLE[h, IDS[0, (i - j).clamp(0, 31)]]
    assert emit.source(codegen_spec_of(nested, None, False)).count("tl.load") == 4
    # The bucket is read along the diagonal as well.
    banded = emit.source(
        dataclasses.replace(codegen_spec_of(nested, None, False), per_diagonal=True)
    )
    assert banded.split("def score")[1].count("tl.load") == 0
