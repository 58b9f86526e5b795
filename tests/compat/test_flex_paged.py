"""PyTorch's utilities for paged attention, over `compat.flex`."""

import pytest
import torch

from headway.compat import flex

paged = pytest.importorskip("torch.nn.attention.experimental._paged_attention")


def test_pages_by_pytorchs_utilities():
    """Its page table turns a block mask and a score of logical positions into physical ones."""
    b, hk, length, page = 2, 2, 64, 16
    pages = paged.PagedAttention(16, page, b, device="cpu")
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(b, h, length, 16, generator=g) for h in (4, hk, hk))
    k_cache, v_cache = (torch.zeros(1, hk, 16 * page, 16) for _ in range(2))
    for filled in (20, 64):  # row after row, so that pages of the two alternate
        for row in range(b):
            pages.reserve(torch.tensor(row), torch.tensor(filled))
    at = torch.arange(length).expand(b, -1)
    pages.assign(torch.arange(b), at, k, v, k_cache, v_cache)
    causal = lambda b, h, i, j: i >= j
    slope = lambda s, b, h, i, j: s + (j - i) * 0.1
    mask = flex.create_block_mask(causal, b, 1, length, length, device="cpu", BLOCK_SIZE=page)
    out = flex.flex_attention(
        q, k_cache, v_cache, pages.get_score_mod(slope), pages.convert_logical_block_mask(mask),
        enable_gqa=True,
    )  # fmt: skip
    whole = flex.create_block_mask(causal, 1, 1, length, length, device="cpu")
    wanted = flex.flex_attention(q, k, v, slope, whole, enable_gqa=True)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
