"""`Attention` loads the weights of Hugging Face's modules, and computes what they compute."""

import importlib

import pytest
import torch
from torch import nn

import headway
from headway.nn import Attention, Rotary, YaRN

YARN = {
    "rope_type": "yarn", "rope_theta": 5e3, "factor": 8.0, "beta_fast": 8.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
# Options of their configuration, and of ours.
MODELS = {
    "llama": ({"attention_bias": True}, {"bias": True, "out_bias": True}),
    "llama, yarn": (
        {"rope_parameters": YARN, "max_position_embeddings": 128},
        {"rotary": Rotary(8, 5e3, yarn=YaRN(8.0, 16, 8.0, 1.0))},
    ),
    "qwen2": ({}, {"bias": True}),
    "qwen3": ({"head_dim": 8}, {"qk_norm": True}),
    "phi3": ({"pad_token_id": 0}, {"fused": True}),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("scaling", ["logits", "query"])
def test_weights_forward_and_gradients(model, scaling):
    pytest.importorskip("transformers")
    theirs_options, ours_options = MODELS[model]
    kind = model.split(",")[0]
    code = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    settings = importlib.import_module(f"transformers.models.{kind}.configuration_{kind}")
    name = kind.capitalize()
    config = getattr(settings, f"{name}Config")(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        attn_implementation="sdpa", **theirs_options,
    )  # fmt: skip
    theirs = getattr(code, f"{name}Attention")(config, layer_idx=0).double()
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.4 if p.dim() == 2 else 1.0)
    ours = Attention(32, 4, 2, **{"rotary": Rotary(8), "scaling": scaling} | ours_options).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 19, 32, dtype=torch.float64)
    rotary = getattr(code, f"{name}RotaryEmbedding")(config)
    cos, sin = rotary(x.float(), torch.arange(19)[None])
    mask = torch.full((19, 19), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = ours(mine, headway.causal())
    expected, *_ = theirs(other, (cos.double(), sin.double()), mask)
    # Their norms of queries and keys compute in float32, also in a float64 model.
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
    dout = torch.randn_like(out)
    out.backward(dout)
    expected.backward(dout)
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5)
    named = dict(theirs.named_parameters())
    assert named.keys() == dict(ours.named_parameters()).keys()
    for n, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, named[n].grad, rtol=1e-5, atol=2e-5, msg=n)
