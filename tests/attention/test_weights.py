"""The weights of attention, to look at."""

import math

import pytest
import torch

import headway as hw
import oracle
from cases import BY_NAME, problem
from headway.errors import ArgumentError, CapturedIndexError, UnknownKeyword

NAMES = [
    "heads_8_2", "heads_6_3_score", "mask_by_head_sink", "mask_causal_late", "mask_nothing_sink",
    "score_holes", "score_walls", "score_outside", "score_by_batch_masked", "scale_-0.5_score",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_as_defined(name, dtype):
    given = problem(BY_NAME[name], dtype)
    got = hw.attention_weights(
        given.q, given.k, given.score(), given.mask(), scale=given.case.scale, sink=given.sink
    )
    assert got.dtype == dtype
    assert not got.requires_grad
    plain = given.copy(torch.float64)
    t = oracle.scores(plain.q, plain.k, plain.score(True), plain.mask(True), given.case.scale).t
    want = oracle.softmax(t, plain.sink)[0]
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    out = hw.attention(
        given.q, given.k, given.v, given.score(), given.mask(),
        scale=given.case.scale, sink=given.sink,
    )  # fmt: skip
    torch.testing.assert_close(got @ oracle.to_heads(given.v, given.case.hq), out)


def test_a_part_is_that_part_of_the_whole():
    q, k = torch.randn(2, 6, 50, 8), torch.randn(2, 3, 60, 8)
    by_row = hw.causal(5) & (lambda b, h, i, j: (i + j) % (b + 2) > 0)
    options = {"score": hw.alibi(torch.rand(6)), "mask": by_row, "sink": torch.randn(6)}
    whole = hw.attention_weights(q, k, **options)
    part = hw.attention_weights(q, k, **options, heads=[5, 0], queries=range(40, 50))
    torch.testing.assert_close(part, whole[:, [5, 0], 40:50])
    part = hw.attention_weights(q, k, **options, heads=(-1,), queries=torch.tensor([7, -2]))
    torch.testing.assert_close(part, whole[:, -1:, [7, 48]])
    assert hw.attention_weights(q, k, heads=[]).shape == (2, 0, 50, 60)


def test_block_masks():
    q, k = torch.randn(2, 1, 2, 96, 8)
    mask = hw.causal() & hw.sliding_window(20)
    blocks = hw.block_mask(mask, 1, 1, 96, 96, tile=32)
    want = hw.attention_weights(q, k, mask=mask)
    torch.testing.assert_close(hw.attention_weights(q, k, mask=blocks), want)
    assert ((want > 0).sum(-1)[0, 0] == torch.arange(1, 97).clamp(max=20)).all()


def test_half_precision_is_float32_and_large_scores_are_no_matter():
    q, k = (torch.randn(1, 2, 9, 8).bfloat16() for _ in range(2))
    got = hw.attention_weights(q, k, lambda s, b, h, i, j: s - 1e9)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, hw.attention_weights(q.float(), k.float()))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"limit": 1000}, ArgumentError, ["20000 numbers", "limit=1000", "heads=[0]"]),
        ({"limit": "all"}, ArgumentError, ["limit='all'"]),
        ({"heads": [2]}, ArgumentError, ["heads: 2", "from -2 to 1"]),
        ({"heads": 0}, ArgumentError, ["heads=0", "range(4)"]),
        ({"queries": [1.5]}, ArgumentError, ["queries: 1.5"]),
        ({"mask": hw.alibi(2)}, ArgumentError, ["score"]),
        ({"dropout": 0.1}, UnknownKeyword, ["dropout"]),
        ({"score": lambda s, b, h, i, j: s + _few[j]}, CapturedIndexError, ["_few[j]"]),
    ],
    ids=["numbers", "limit", "no such head", "heads", "queries", "mask", "keyword", "index"],
)
def test_mistakes(options, error, words):
    with pytest.raises(error) as caught:
        hw.attention_weights(*torch.randn(2, 1, 2, 100, 8), **options)
    for word in words:
        assert word in str(caught.value)


_few = torch.randn(50)


def test_the_largest_square_is_refused_by_default():
    q = torch.empty(1, 1, 1, 1).expand(1, 2, 8192, 1)
    with pytest.raises(ArgumentError, match="134217728 numbers, more than limit=67108864"):
        hw.attention_weights(q, q)


def test_not_compiled():
    q, k = torch.randn(2, 1, 2, 20, 8)
    call = torch.compile(lambda q, k: hw.attention_weights(q, k) + 1, backend="eager")
    torch.testing.assert_close(call(q, k), hw.attention_weights(q, k) + 1)


def test_uniform_where_scores_are_equal():
    got = hw.attention_weights(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), mask=hw.causal())
    want = torch.tensor([[1 / (i + 1) if j <= i else 0.0 for j in range(4)] for i in range(4)])
    torch.testing.assert_close(got[0, 0], want)
    sink = torch.tensor([math.log(4.0)])
    got = hw.attention_weights(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), sink=sink)
    torch.testing.assert_close(got, torch.full((1, 1, 4, 4), 0.125))
