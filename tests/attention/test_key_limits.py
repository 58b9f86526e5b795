"""Limits on keys of few queries are those of tensors: narrow integers wrap around, and an index out of
range is an error at a pair that is kept."""

import pytest
import torch

import headway as hw
from headway.errors import CapturedIndexError

U8 = torch.tensor([0, 7], dtype=torch.uint8)
I8 = torch.tensor([127, 3], dtype=torch.int8)
LENGTHS = torch.tensor([29, 11])


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q_idx, kv_idx: kv_idx < U8[b] - 1,
        lambda b, h, q_idx, kv_idx: kv_idx >= I8[b] * 2 - 9,
        lambda b, h, q_idx, kv_idx: kv_idx < (LENGTHS[b] * 10).to(torch.uint8),
    ],
)
def test_narrow_integers_wrap_around(mask):
    """Few queries see the keys that the reference sees."""
    q, k = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 40, 8)
    found = hw.attention_with_stats(q, k, k, mask=mask)
    expected = hw.attention_with_stats(q, k, k, mask=mask, backend="reference")
    torch.testing.assert_close(tuple(found), tuple(expected))


@pytest.mark.parametrize("at", [lambda b: b - 5, lambda b: b + 1])
def test_out_of_range(at):
    """An error where a pair is kept, and nothing where none is."""
    q, k = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 40, 8)
    with pytest.raises(CapturedIndexError):
        hw.attention(q, k, k, mask=lambda b, h, i, j: j < LENGTHS[at(b)])
    mask = lambda b, h, i, j: (j < LENGTHS[at(b)]) & (b > 5)
    assert hw.attention(q, k, k, mask=mask).abs().max() == 0
