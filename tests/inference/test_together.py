"""Rows that are computed together on the CPU are what each is by itself, whatever lies around it."""

import random

import pytest
import torch

import headway as hw
from headway import inference

from .gather import by_rows, caches


def masks(b: int, hq: int, capacity: int) -> list:
    """Ranges of keys, and what is none; of rows, heads and queries."""
    starts, stops = torch.randint(0, capacity, (2, b))
    return [
        None, hw.causal(), hw.causal() & hw.sliding_window(7), hw.padding(stops),
        lambda b, h, q_idx, kv_idx: kv_idx >= starts[b],
        lambda b, h, q_idx, kv_idx: (kv_idx + b + q_idx) % 3 > 0,
        lambda b, h, q_idx, kv_idx: (h % 2 == 0) | (kv_idx < q_idx - 2),
        hw.dense(torch.rand(b, 1, 1, capacity) > 0.3), hw.dense(torch.rand(b, hq, 1, capacity) > 0.3),
        hw.prefix(3) | (hw.causal() & hw.sliding_window(5)),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_rows_together(seed):
    """What is no key of a row is NaN, in memory that is read with it."""
    draw = random.Random(seed)
    b, hk, group = draw.choice([2, 3, 8]), draw.choice([1, 3]), draw.choice([1, 2, 5])
    longest, spread = draw.randint(3, 40), draw.choice([0, 2, 40])
    lengths = [max(3, longest - draw.randint(0, spread)) for _ in range(b)]
    q_len, dv, hq = draw.choice([1, 1, 3]), draw.choice([16, 16, 12]), hk * group
    c = caches(lengths, hq, hk, q_len=q_len, dv=dv, seed=seed)
    capacity = c.page_table.shape[1] * c.k.shape[2]
    factors = torch.rand(b) + 0.5
    score = draw.choice([None, None, hw.softcap(5.0), lambda s, b, h, i, j: s * factors[b]])
    sink = draw.choice([None, torch.randn(hq)])
    contiguous = c.contiguous()
    heads_last = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in contiguous]
    for mask in masks(b, hq, capacity):
        wanted = by_rows(c, score, mask, sink=sink)
        for k, v, options in (
            (c.k, c.v, c.options),
            (*contiguous, {"lengths": c.lengths}),
            (*heads_last, {"lengths": c.lengths}),
        ):
            with torch.inference_mode():
                out = inference.attention(c.q, k, v, score, mask, sink=sink, **options)
                stats = inference.attention_with_stats(c.q, k, v, score, mask, sink=sink, **options)
            for x, y in zip((out, *stats), (wanted[0], *wanted), strict=True):
                torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)
