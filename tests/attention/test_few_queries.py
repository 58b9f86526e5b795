"""Few queries on the CPU: masks that no formula bounds, and captured tensors read at any index.

The truth is dense float64; what no query of the batch sees is NaN.
"""

import math
import random

import pytest
import torch
from torch import Tensor

import headway as hw


def documents(pick: random.Random, b: int, n: int) -> Tensor:
    """Return ids that rise along a row, or that come in any order."""
    ids = (torch.rand(b, n) < pick.choice([0.02, 0.2])).cumsum(1)
    return ids if pick.random() < 0.6 else ids[:, torch.randperm(n)]


def attend(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, biases: Tensor, slopes: Tensor, with_score: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the truth, and which keys some query sees, (b, keys)."""
    first = k.shape[2] - q.shape[2]
    mask = lambda b, h, i, j: (ids[b, i + first] == ids[b, j]) & (j <= i + first)
    # slopes[h - hq] counts from the end; biases[i - j] is out of range where the mask keeps nothing.
    score = lambda s, b, h, i, j: s + slopes[h - len(slopes)] * biases[i + first - j]
    with torch.no_grad():
        out = hw.attention(q, k, v, score if with_score else None, mask=mask)
    i, j = torch.arange(first, k.shape[2]), torch.arange(k.shape[2])
    keep = (ids[:, i, None] == ids[:, None]) & (j <= i[:, None])
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().nan_to_num(0).repeat_interleave(group, 1) for x in (k, v))
    t = q.double() @ k.mT / math.sqrt(q.shape[3])
    if with_score:
        distance = (i[:, None] - j).clamp(0, len(biases) - 1)
        t = t + slopes.view(-1, 1, 1) * biases[distance]
    t = t.masked_fill(~keep[:, None], -math.inf)
    return out, t.softmax(-1) @ v, keep.any(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_score", [False, True])
def test_documents_are_read_alone(dtype, with_score, seed):
    pick = random.Random(seed)
    for _ in range(12):
        b, hk, group, q_len = (pick.choice(x) for x in ([1, 2, 4], [1, 2], [1, 3], [1, 1, 2, 5]))
        n = pick.choice([17, 60, 300, 1200])
        ids = documents(pick, b, n)
        q = torch.randn(b, hk * group, q_len, 32).to(dtype)
        k, v = (torch.randn(b, hk, n, 32).to(dtype) for _ in "kv")
        rest = ids, torch.randn(n), torch.randn(hk * group), with_score
        _, _, seen = attend(q, k, v, *rest)
        before = seen.int().cummax(1).values == 0
        after = seen.flip(1).int().cummax(1).values.flip(1) == 0
        if b == 1:  # rows of a batch may be read together
            for x in (k, v):
                x.masked_fill_((before | after)[:, None, :, None], math.nan)
        out, truth, _ = attend(q, k, v, *rest)
        tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out.double(), truth, rtol=tolerance, atol=tolerance / 4)


def test_an_index_out_of_range_at_a_kept_pair_is_an_error():
    q, k, v = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    table, grid = torch.randn(39), torch.randn(2, 39)
    scores = [
        lambda s, b, h, i, j: s + table[j],
        lambda s, b, h, i, j: s + table[j - 40],
        lambda s, b, h, i, j: s + grid[b, j],
        lambda s, b, h, i, j: s + grid[h + 1, 0],
    ]
    wrong = [(39, 0), (-40, 0), (39, 1), (2, 0)]
    for score, (index, dim) in zip(scores, wrong, strict=True):
        message = f"reads index {index} of dimension {dim}"
        with pytest.raises(IndexError, match=message), torch.no_grad():
            hw.attention(q, k, v, score)
        with torch.no_grad():
            hw.attention(q, k, v, score, mask=lambda b, h, i, j: (j > 0) & (j < 39) & (h < 1))
