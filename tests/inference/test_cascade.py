"""`cascade` over random levels against the definition, dense and in float64."""

import math
from itertools import pairwise

import pytest
import torch

import headway as hw
from headway import inference
from headway.errors import ArgumentError
from headway.inference import Level

HQ, HK, D, PAGE = 4, 2, 8, 2
NONE = torch.tensor(-math.inf, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


class Draw:
    """Random numbers of one seed."""

    def __init__(self, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)

    def int(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.g))

    def ints(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high + 1, shape, generator=self.g, dtype=torch.int32)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.g)

    def one_of(self, *items):
        return items[self.int(0, len(items) - 1)]


def a_level(draw: Draw, b: int, shared: bool, dtype: torch.dtype) -> tuple[Level, list]:
    """A level, and the keys and values that every row reads of it."""
    groups, capacity = draw.int(1, 3) if shared else b, draw.int(1, 6) * PAGE
    k, v = (draw.normal(groups, HK, capacity, D).to(dtype) for _ in range(2))
    lengths = draw.ints(capacity, groups)
    rows = draw.ints(groups, b) - 1 if shared else None  # -1: no keys of this level
    scales = [
        draw.one_of(None, *[draw.normal(*shape).exp() for shape in ((), (HK,), (groups, HK))])
        for _ in range(2)
    ]
    of_rows = []
    for row in range(b):
        group = int(rows[row]) if shared else row
        length = int(lengths[group]) if group >= 0 else 0
        of_rows.append([
            x[group, :, :length].double()
            * (1 if scale is None else scale.double().expand(groups, HK)[group][:, None, None])
            for x, scale in zip((k, v), scales, strict=True)
        ])  # fmt: skip
    table = None
    if draw.int(0, 1):
        k, v = (x.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1) for x in (k, v))
        table = torch.arange(len(k), dtype=torch.int32).view(groups, -1)
    return Level(k, v, lengths, table, rows, *scales), of_rows


def dense(q, k, v, score, mask, sink, row: int):
    """out, lse and the largest logits of a row by the definition."""
    q, (k, v) = q.double(), (x.repeat_interleave(HQ // HK, 0) for x in (k, v))
    s = q @ k.mT / math.sqrt(D)
    j, h, b = torch.arange(k.shape[1]), torch.arange(HQ)[:, None, None], torch.tensor(row)
    i = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    t = s if score is None else score(s, b, h, i, j)
    keep = (torch.tensor(True) if mask is None else mask(b, h, i, j)).expand_as(t) & (t != NONE)
    t = torch.where(keep, t, NONE)
    with_sink = torch.cat((t, sink.double()[:, None, None].expand(-1, q.shape[1], 1)), -1)
    lse = with_sink.logsumexp(-1)
    p = (t - torch.where(lse == NONE, 0, lse)[..., None]).exp()
    return p @ v, lse, torch.cat((torch.where(keep, s, NONE).flatten(1), NONE.expand(HQ, 1)), 1)


def user_score(s, b, h, i, j):
    return torch.where((i + j + b) % 5 == 0, -math.inf, s * 0.5 + (i - j) * 0.01 * (h + 1))


@pytest.mark.parametrize("seed", range(24))
def test_a_cascade_is_attention_over_all_levels(seed):
    draw = Draw(seed)
    b, packed, dtype = (
        draw.int(1, 4),
        seed % 2,
        draw.one_of(torch.float32, torch.float8_e4m3fn, torch.float8_e5m2),
    )
    shared = [bool(draw.int(0, 1)) for _ in range(draw.int(0, 2))]
    levels, of_levels = zip(*(a_level(draw, b, x, dtype) for x in (*shared, False)), strict=True)
    score = draw.one_of(None, user_score, hw.alibi(HQ), hw.softcap(3.0))
    mask = draw.one_of(None, hw.causal(), hw.causal() & hw.sliding_window(5))
    sink = draw.one_of(None, draw.normal(HQ))
    counts = draw.ints(3, b).tolist() if packed else [draw.int(1, 3)] * b
    ends = [sum(counts[:n]) for n in range(b + 1)]
    options = {"sink": sink, "backend": draw.one_of("auto", "reference")}
    if packed:
        q = draw.normal(1, HQ, ends[-1] + 2, D)  # two tokens of no row
        options |= {"cu_q": torch.tensor(ends, dtype=torch.int32), "max_q": 3}
    else:
        q = draw.normal(b, HQ, counts[0], D)
    out = inference.cascade(q, levels, score, mask, **options)
    stats = inference.cascade_with_stats(q, levels, score, mask, **options)
    torch.testing.assert_close(stats.out, out, atol=1e-6, rtol=1e-5)
    no_sink = torch.full((HQ,), -math.inf)
    for row, (first, last) in enumerate(pairwise(ends)):
        of_row = lambda x, row=row, rows=slice(first, last): x[0][:, rows] if packed else x[row]
        keys, values = (
            torch.cat([of_level[row][n] for of_level in of_levels], 1) for n in range(2)
        )
        sink_of_row = no_sink if sink is None else sink
        wanted = dense(of_row(q), keys, values, score, mask, sink_of_row, row)
        found = of_row(stats.out), of_row(stats.lse), stats.max_logit[row]
        for x, right in zip(found, (*wanted[:2], wanted[2].amax(1)), strict=True):
            torch.testing.assert_close(x.double(), right, atol=2e-5, rtol=2e-5)
    if packed:
        assert not stats.out[:, :, ends[-1] :].any()
        alone = (no_sink if sink is None else sink)[None, :, None].expand(1, HQ, 2)
        torch.testing.assert_close(stats.lse[:, :, ends[-1] :], alone)


def _adds_in_place(score, b, h, i, j):
    score += 100.0
    return score


@pytest.mark.parametrize("score", [_adds_in_place, lambda *args: 1.0], ids=["in place", "a number"])
def test_the_largest_logits_are_those_before_the_score(score):
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8)
    lengths = torch.tensor([9], dtype=torch.int32)
    largest = inference.cascade_with_stats(q, [(k, k, lengths)], score).max_logit
    torch.testing.assert_close(largest, (q @ k.mT / 8**0.5).amax((2, 3)))


def test_what_does_not_go_together_is_refused():
    draw = Draw(0)
    level, _ = a_level(draw, 2, False, torch.float32)
    q, cu_q = draw.normal(1, HQ, 3, D), torch.tensor([0, 1, 3], dtype=torch.int32)
    for options, words in (
        ({"cu_q": cu_q}, "cu_q needs max_q"),
        ({"max_q": 2}, "max_q=2 goes with cu_q"),
        ({"cu_q": cu_q[:2], "max_q": 2}, r"cu_q must be int32 \(rows \+ 1,\) = \(3,\)"),
        ({"cu_q": cu_q.float(), "max_q": 2}, "cu_q must be int32"),
    ):
        with pytest.raises(ArgumentError, match=words):
            inference.cascade(q, [level], **options)
    for rows, words in (
        ([0, 2], "its 2 groups, or -1 for none, got 0 to 2"),
        ([-2, 0], "got -2 to 0"),
    ):
        shared = level._replace(rows=torch.tensor(rows, dtype=torch.int32))
        with pytest.raises(ArgumentError, match=words):
            inference.cascade(draw.normal(2, HQ, 1, D), [shared, level])
    for cascade in (inference.cascade, inference.cascade_with_stats):
        with pytest.raises(ArgumentError, match="k_scale must be a float tensor"):
            cascade(draw.normal(2, HQ, 1, D), [level._replace(k_scale=torch.ones(7))])
        with pytest.raises(TypeError, match="write scale="):
            cascade(q, [level], sm_scale=1.0)
    queries = draw.normal(2, HQ, 1, D)
    for levels, words in (
        (None, "levels must be a list of Level, .* got NoneType"),
        ([], "levels must be a list of Level"), ([level[:2]], "levels must be a list of Level"),
        ([level, level._replace(lengths=[2, 2])], r"lengths of levels\[1\] must be a tensor, got list"),
        ([level._replace(rows=[0, 0]), level], r"rows of levels\[0\] must be a tensor, got list"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=words):
            inference.cascade(queries, levels)
    with pytest.raises(ArgumentError, match=r"causal\(1\): .* global positions"):
        inference.cascade(queries, [level], mask=hw.causal(1) & hw.sliding_window(3))
