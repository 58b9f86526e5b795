"""`MLA` against Hugging Face's `DeepseekV3Attention`, and the scales of the published models."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import headway
from headway.errors import ArgumentError
from headway.nn import MLA, Rotary, YaRN, rescale

# (YaRN of the model, m², m² / sqrt(192)): from the configurations that were published with them.
SCALES = {
    "DeepSeek-V2-Lite": (YaRN(40, 4096, 32, 1, 0.707, 0.707), 1.589626, 0.114721),
    "DeepSeek-V3": (YaRN(40, 4096, 32, 1, 1.0, 1.0), 1.873854, 0.135234),
    "Kimi K2": (YaRN(32, 4096, 1, 1, 1.0, 1.0), 1.813260, 0.130861),
    "before the extension": (None, 1.0, 0.0721688),
}
SMALL = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "nope_width": 12, "rope_width": 8, "value_width": 10,
}  # fmt: skip


@pytest.mark.parametrize("model", SCALES)
def test_scales_of_published_models(model):
    yarn, square, scale = SCALES[model]
    rotary = Rotary(64, interleaved=True, yarn=yarn)
    module = MLA(64, 2, rotary=rotary, device="meta")
    assert module.scale == pytest.approx(scale, rel=1e-5)
    if yarn is not None:
        assert yarn.softmax_factor == pytest.approx(square, rel=1e-5)
        assert yarn.rotation_factor == 1.0


@pytest.mark.parametrize(
    ("width", "heads", "rank", "millions"),
    [(2048, 16, None, 13.76), (7168, 128, 1536, 187.1), (7168, 64, 1536, 101.1)],
)
def test_parameter_counts_of_published_models(width, heads, rank, millions):
    module = MLA(width, heads, q_lora_rank=rank, device="meta")
    assert sum(p.numel() for p in module.parameters()) / 1e6 == pytest.approx(millions, rel=1e-3)


def huggingface(config_options, interleave=True):
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    config = transformers.DeepseekV3Config(
        hidden_size=40,
        num_attention_heads=3,
        num_key_value_heads=3,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        rope_interleave=interleave,
        attn_implementation="sdpa",
        max_position_embeddings=160,
        **config_options,
    )
    attention = deepseek.DeepseekV3Attention(config, layer_idx=0)
    return config, attention, deepseek.DeepseekV3RotaryEmbedding(config)


YARN = {
    "rope_type": "yarn", "rope_theta": 5e4, "factor": 32.0, "beta_fast": 4.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LITE = {"mscale": 0.707, "mscale_all_dim": 0.707}


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"q_lora_rank": 24, "rope_parameters": YARN},
        {
            "q_lora_rank": None,
            "rope_parameters": {**YARN, **LITE},
        },
        {"q_lora_rank": 24, "attention_bias": True},
    ],
    ids=["kimi", "lite", "bias"],
)
def test_huggingface_weights_forward_and_gradients(options, interleave):
    config, theirs, rotary = huggingface(options, interleave)
    theirs.double()
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3 if p.dim() == 2 else 1.0)
    ours = MLA.from_config(config).double()
    ours.load_state_dict(theirs.state_dict())
    length = 23
    x = torch.randn(2, length, 40, dtype=torch.float64)
    positions = torch.arange(length)[None]
    cos, sin = rotary(x.float(), positions)
    mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, _ = theirs(other, (cos.double(), sin.double()), mask)
    out = ours(mine, headway.causal())
    # Their latent norms compute in float32, also in a float64 model.
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=5e-6)
    dout = torch.randn_like(out)
    out.backward(dout)
    expected.backward(dout)
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=2e-5)
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    assert grads.keys() == dict(ours.named_parameters()).keys()
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-5, atol=5e-5, msg=name)


@pytest.mark.parametrize("rank", [24, None])
def test_deepseek_v2(rank):
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek

    config = transformers.DeepseekV2Config(
        hidden_size=42, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=rank,
        kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
        attn_implementation="sdpa", max_position_embeddings=160, rope_parameters=YARN | LITE,
    )  # fmt: skip
    theirs = deepseek.DeepseekV2Attention(config, layer_idx=0).double()
    ours = MLA.from_config(config).double()
    if theirs.scaling != pytest.approx(ours.scale):
        pytest.skip("this transformers forgets mscale² in DeepSeek-V2 (mended in July 2026)")
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3 if p.dim() == 2 else 1.0)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 23, 42, dtype=torch.float64)
    turns = deepseek.DeepseekV2RotaryEmbedding(config)(x, torch.arange(23)[None])
    mask = torch.full((23, 23), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected, _ = theirs(x, mask, position_embeddings=turns)
    # Their rotation computes in float32, also in a float64 model.
    torch.testing.assert_close(ours(x, headway.causal()), expected, rtol=1e-5, atol=2e-5)


def test_huggingface_rotary_is_ours():
    config, _, rotary = huggingface({"q_lora_rank": 24, "rope_parameters": YARN})
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(160)[None])
    angles = MLA.from_config(config).rotary.angles(torch.arange(160))
    torch.testing.assert_close(angles.cos, cos[0, :, :4], rtol=0, atol=2e-6)
    torch.testing.assert_close(angles.sin, sin[0, :, :4], rtol=0, atol=2e-6)


@pytest.mark.parametrize("rank", [24, None])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_modes_begin_alike(rank, backend):
    x = torch.randn(2, 17, 40, dtype=torch.float64)
    results = []
    for scaling in ("logits", "query", "init"):
        torch.manual_seed(5)
        module = MLA(
            40, 3, **{**SMALL, "q_lora_rank": rank}, scaling=scaling, backend=backend,
            dtype=torch.float64, init=lambda w: nn.init.normal_(w, std=0.3),
        )  # fmt: skip
        results.append((module(x, headway.causal()).detach(), module.max_logit.value))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-6, atol=1e-9)
    rescale(module, "logits")
    torch.testing.assert_close(module(x, headway.causal()).detach(), results[0][0])


def test_the_widths_go_to_the_kernel_as_they_are(monkeypatch):
    from headway.nn import scaling

    seen = []

    def spy(q, k, v, *args, **options):
        seen.append((q.shape[-1], k.shape[-1], v.shape[-1], options["scale"]))
        return headway.attention_with_stats(q, k, v, *args, **options)

    monkeypatch.setattr(scaling, "attention_with_stats", spy)
    MLA(32, 2, kv_lora_rank=16)(torch.randn(1, 5, 32))
    assert seen == [(192, 192, 128, pytest.approx(192**-0.5))]


def test_unknown_rotary_scaling_is_refused():
    config = SimpleNamespace(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4})
    with pytest.raises(ArgumentError, match="llama3"):
        MLA.from_config(config)
    config.rope_parameters = {**YARN, "attention_factor": 2.0}
    with pytest.raises(ArgumentError, match="attention_factor"):
        MLA.from_config(config)
