"""torchtitan's own model on Headway, where torchtitan (0.3.0) is installed."""

import pytest
import torch

titan = pytest.importorskip(
    "torchtitan.models.common.attention", reason="torchtitan is not installed"
)

from headway.compat import flex, use_for_sdpa  # noqa: E402


def dense(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
    """What FlexAttention computes for a mask, by PyTorch's plain formula."""
    assert score_mod is None
    shape = (*block_mask.shape[:2], q.shape[2], k.shape[2])
    kept = flex.create_mask(block_mask.mask_mod, *shape, "cpu")
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, kept, scale=scale, enable_gqa=enable_gqa
    )
    return out, flex.AuxOutput()


def test_llama_of_packed_documents(monkeypatch):
    """In place of its compiled FlexAttention, with its own block masks; it trains on the CPU."""
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    model = config.build()
    model.init_states()
    tokens = torch.randint(0, 2048, (2, 48))
    positions = torch.cat([torch.arange(20), torch.arange(28)]).expand(2, -1)
    masks = model.get_attention_masks(positions)
    calls, results = [], []

    def ours(*args, **kwargs):
        calls.append(1)
        return flex.flex_attention(*args, **kwargs)

    for function in (dense, ours):
        monkeypatch.setattr(titan.FlexAttention, "_compiled_flex_attn", staticmethod(function))
        model.zero_grad()
        out = model(tokens, attention_masks=masks, positions=positions)
        out.square().mean().backward()
        results.append([out.detach(), *[p.grad.clone() for p in model.parameters()]])
    assert len(calls) == 2
    for right, got in zip(*results, strict=True):
        assert (got - right).abs().max() <= 1e-5 * (1e-3 + right.abs().max())


def test_its_inner_attention_of_sdpa():
    inner = titan.ScaledDotProductAttention(titan.ScaledDotProductAttention.Config())
    q, k = torch.randn(2, 9, 4, 8), torch.randn(2, 9, 2, 8)
    right = inner(q, k, k, enable_gqa=True)
    with use_for_sdpa():
        torch.testing.assert_close(inner(q, k, k, enable_gqa=True), right)
