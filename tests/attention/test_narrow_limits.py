"""Limits on keys that are computed in narrow integers wrap around, as tensors do."""

import pytest
import torch

import headway as hw

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
