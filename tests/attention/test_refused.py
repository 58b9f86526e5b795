"""What shows that a call is not meant as it is written is refused by name, or warned about."""

import numpy as np
import pytest
import torch

import headway as hw
from headway import inference
from headway.compat import flash, flex, torch_sdpa
from headway.errors import ArgumentError
from headway.nn import MLA, Attention, Rotary
from headway.optim import MuonClip

X = torch.randn(2, 4, 6, 8)
LENGTHS = torch.tensor([6, 6], dtype=torch.int32)


# -- flags ----------------------------------------------------------------------------------------

FLAGS = {
    "plain": lambda flag: hw.attention(X, X, X, deterministic=flag),
    "masked": lambda flag: hw.attention(X, X, X, mask=hw.sliding_window(3), deterministic=flag),
    "stats": lambda flag: hw.attention_with_stats(X, X, X, deterministic=flag),
    "explain": lambda flag: hw.explain(X, X, X, deterministic=flag),
    "sigmoid": lambda flag: hw.sigmoid_attention(X, X, X, bias=0.0, deterministic=flag),
    "flash": lambda flag: flash.flash_attn_func(X, X, X, deterministic=flag),
    "causal of flash": lambda flag: flash.flash_attn_func(X, X, X, causal=flag),
    "flex": lambda flag: flex.flex_attention(X, X, X, enable_gqa=flag),
    "lse of flex": lambda flag: flex.flex_attention(X, X, X, return_lse=flag),
    "sdpa": lambda flag: torch_sdpa.scaled_dot_product_attention(X, X, X, enable_gqa=flag),
    "fused": lambda flag: Attention(16, 2, fused=flag),
    "bias": lambda flag: Attention(16, 2, bias=flag),
    "out_bias": lambda flag: Attention(16, 2, out_bias=flag),
    "qk_norm": lambda flag: Attention(16, 2, qk_norm=flag),
    "sink": lambda flag: Attention(16, 2, sink=flag),
    "MLA": lambda flag: MLA(
        16, 2, kv_lora_rank=8, nope_width=8, rope_width=4, value_width=6, bias=flag
    ),
    "rotary": lambda flag: Rotary(8, interleaved=flag),
    "per_head": lambda flag: MuonClip(Attention(16, 2), per_head=flag),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_true_or_false(name):
    call = FLAGS[name]
    for flag in ("yes", "False", None, 2, 1.0, [], torch.tensor(True)):
        with pytest.raises(ArgumentError, match=r"must be (True or False|bool)"):
            call(flag)
    call(True)
    call(False)
    if name != "sdpa":  # PyTorch's takes Python's alone
        call(np.bool_(False))
        call(0)


# -- nested tensors -------------------------------------------------------------------------------

NESTED = {
    "attention": lambda n: hw.attention(n, n, n),
    "masked": lambda n: hw.attention(n, n, n, mask=hw.sliding_window(3)),
    "k": lambda n: hw.attention(X, n, X),
    "v": lambda n: hw.attention(X, X, n),
    "sink": lambda n: hw.attention(X, X, X, sink=n),
    "stats": lambda n: hw.attention_with_stats(n, n, n),
    "explain": lambda n: hw.explain(n, n, n),
    "weights": lambda n: hw.attention_weights(n, n),
    "sigmoid": lambda n: hw.sigmoid_attention(n, n, n, bias=0.0),
    "inference": lambda n: inference.attention(n, X, X, lengths=LENGTHS),
    "cache": lambda n: inference.attention(X, n, n, lengths=LENGTHS),
    "merge": lambda n: hw.merge((n, n)),
    "cascade": lambda n: inference.cascade(n, [(X, X, LENGTHS)]),
    "flash": lambda n: flash.flash_attn_func(n, n, n),
    "kvcache": lambda n: flash.flash_attn_with_kvcache(X, n, n),
    "packed": lambda n: flash.flash_attn_qkvpacked_func(n),
    "module": lambda n: Attention(8, 2)(n),
}


TAKEN = ("attention", "masked", "stats", "explain")  # jagged ones: test_varlen.py


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("name", NESTED)
@pytest.mark.filterwarnings("ignore:.*nested")
def test_nested_tensors_are_refused(name, layout):
    if name in TAKEN and layout == torch.jagged:
        return
    rows = [torch.randn(n, 4, 8) for n in (6, 3)]
    nested = torch.nested.nested_tensor(rows, layout=layout).transpose(1, 2)
    with pytest.raises(
        ArgumentError, match=r"is a nested tensor, which .*headway\.document\(ids\)"
    ):
        NESTED[name](nested)


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_captured_nested_tensors_are_refused(layout):
    q = torch.randn(1, 1, 5, 4)
    ids = torch.nested.nested_tensor([torch.arange(3), torch.arange(2)], layout=layout)
    for option in (
        {"mask": lambda b, h, i, j: ids[b, i] == ids[b, j]}, {"mask": hw.document(ids)},
        {"score": lambda s, b, h, i, j: s + ids[b, j]},
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match="nested tensor; pad it"):
            hw.attention(q, q, q, **option)


# -- (batch, heads, length, width) given to the functions of FlashAttention ------------------------


def test_heads_before_lengths_are_told_where_the_shapes_show_it():
    way = r"These functions take \(batch, length, heads, width\).*pass q\.transpose\(1, 2\)"
    q, k = torch.randn(2, 8, 50, 16), torch.randn(2, 2, 37, 16)
    with pytest.raises(RuntimeError, match=way):
        flash.flash_attn_func(q, k, k)
    with pytest.raises(RuntimeError, match=way):
        flash.flash_attn_kvpacked_func(q, torch.stack((k, k), 2))
    with pytest.raises(RuntimeError, match=way):
        flash.flash_attn_func(q, q, q, learnable_sink=torch.zeros(8))
    with pytest.raises(RuntimeError, match=r"alibi_slopes .* here \(50,\).*\(batch, length, heads"):
        flash.flash_attn_func(q, q, q, alibi_slopes=torch.ones(8))
    with pytest.raises(RuntimeError, match=r"multiple of key heads: hq = 7, hk = 3$"):
        flash.flash_attn_func(torch.randn(1, 5, 7, 8), *[torch.randn(1, 3, 3, 8)] * 2)
    right = flash.flash_attn_func(*[x.transpose(1, 2) for x in (q, k, k)])
    assert right.shape == (2, 50, 8, 16)


# -- torch.jit.trace ------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [
    lambda x: hw.attention(x, x, x),
    lambda x: hw.attention(x, x, x, mask=hw.sliding_window(3)),
    lambda x: hw.attention_with_stats(x, x, x, hw.softcap(3.0)).out,
    lambda x: inference.attention(x, x, x, lengths=LENGTHS),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_jit_trace_is_warned_about(call):
    with pytest.warns(torch.jit.TracerWarning, match=r"keeps the score and the mask .* constants"):
        traced = torch.jit.trace(call, (X,), check_trace=False)
    torch.testing.assert_close(traced(X), call(X))
