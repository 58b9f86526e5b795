"""Out lies in memory as q does, whatever the call: a model that splits its heads by a view joins
them by one. (The shared table asks it of every case on every backend: `checks.run`.)"""

import itertools
import random
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import headway as hw
from headway import inference, operators, resolve
from headway.compat import flash, flex, torch_sdpa
from memory_order import same_order

B, H, L, D = 2, 4, 24, 16
PERMUTATIONS = list(itertools.permutations(range(4)))


def laid(order, *shape):
    """Random numbers whose dimensions lie in memory in that order, the outermost first."""
    inverse = [order.index(n) for n in range(4)]
    return torch.randn([shape[n] for n in order]).permute(inverse)


def near(b, h, i, j):
    return (i - j).abs() < 5


def stats(q, k, v, **options):
    return hw.attention_with_stats(q, k, v, **options).out


LENGTHS = torch.tensor([30, 25], dtype=torch.int32)
CALLS = {
    "plain": lambda q, k, v: hw.attention(q, k, v),
    "causal": lambda q, k, v: hw.attention(q, k, v, mask=hw.causal()),
    "mask": lambda q, k, v: hw.attention(q, k, v, mask=near),
    "score": lambda q, k, v: hw.attention(q, k, v, hw.softcap(2.0)),
    "both": lambda q, k, v: hw.attention(q, k, v, hw.softcap(2.0), hw.causal()),
    "statistics": stats,
    "statistics, causal": lambda q, k, v: stats(q, k, v, mask=hw.causal()),
    "statistics, score": lambda q, k, v: stats(q, k, v, score=hw.softcap(2.0)),
    "dropout": lambda q, k, v: hw.attention(q, k, v, dropout=0.2, seed=3),
    "sink": lambda q, k, v: hw.attention(q, k, v, sink=q.new_zeros(H)),
    "sigmoid": lambda q, k, v: hw.sigmoid_attention(q, k, v, bias=-2.0),
    "sdpa": lambda q, k, v: torch_sdpa.scaled_dot_product_attention(
        q, k, v, near(0, 0, torch.arange(L)[:, None], torch.arange(L)), enable_gqa=True
    ),
    "flex": lambda q, k, v: flex.flex_attention(
        q, k, v, lambda s, b, h, i, j: s + i, enable_gqa=True
    ),
}  # fmt: skip
CACHES = {
    "cache": lambda q, k, v: inference.attention(
        q, k, v, mask=hw.causal(), lengths=LENGTHS - L + 12
    ),
    "cache, statistics": lambda q, k, v: (
        inference.attention_with_stats(q, k, v, lengths=LENGTHS - L + 12).out
    ),
}


def by(backend):
    """Every call inside runs on this backend."""
    choose = resolve.choose
    return mock.patch.object(resolve, "choose", lambda _, spec, *rest: choose(backend, spec, *rest))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CALLS)
def test_every_permutation(name, backend):
    for order in PERMUTATIONS if backend == "cpu" else random.sample(PERMUTATIONS, 3):
        hk, dv = random.choice([4, 2]), D if "flex" in name else random.choice([D, 8])
        q, k, v = laid(order, B, H, L, D), torch.randn(B, hk, L, D), torch.randn(B, hk, L, dv)
        trained = random.random() < 0.5
        q.requires_grad_(trained)
        with by(backend):
            out = CALLS[name](q, k, v)
        assert same_order(q, out), (order, out.stride())
        if order == (0, 2, 1, 3):
            out.transpose(1, 2).view(B, L, H * dv)
        if trained:
            (grad,) = torch.autograd.grad(out.square().sum(), q)
            out = CALLS[name](q.contiguous(), k, v)
            (other,) = torch.autograd.grad(out.square().sum(), q)
            torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("q_len", [1, 3, 20])
@pytest.mark.parametrize("name", CACHES)
def test_every_permutation_over_a_cache(name, q_len):
    for order in PERMUTATIONS:
        q, k = laid(order, B, H, q_len, D), torch.randn(B, 2, 40, D)
        assert same_order(q, CACHES[name](q, k, k))
        tokens = laid(order, 1, H, 2 * q_len, D)
        cu = torch.tensor([0, q_len, 2 * q_len], dtype=torch.int32)
        out = inference.attention(tokens, k, k, lengths=LENGTHS, cu_q=cu, max_q=q_len)
        assert same_order(tokens, out)


@pytest.mark.parametrize(
    ("name", "dynamic"), [("plain", True), ("causal", False), ("both", True), ("statistics", False)]
)
def test_compiled(name, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for order in ((0, 2, 1, 3), random.choice(PERMUTATIONS)):
        q, k, v = laid(order, B, H, L, D), torch.randn(B, 2, L, D), torch.randn(B, 2, L, D)
        q.requires_grad_()
        assert same_order(q, compiled(q, k, v)), order


def test_fakes_have_the_strides_of_the_operators():
    def forward(q, k, v):
        spec, call = resolve.prepare(q, k, v, hw.softcap(2.0), hw.causal(), max_logit=True)
        return torch.ops.headway.forward(spec.text, *operators.flat(call))

    for order in PERMUTATIONS:
        for b, h, length, dv in ((B, H, L, D), (1, H, L, 8), (B, 1, L, D), (B, H, 1, 8)):
            q, k = laid(order, b, h, length, D), torch.randn(b, 1, length, D)
            v = torch.randn(b, 1, length, dv)
            real = forward(q, k, v)
            with FakeTensorMode() as mode:
                fake = forward(*[mode.from_tensor(x) for x in (q, k, v)])
            for x, y in zip(real, fake, strict=True):
                assert x.stride() == y.stride(), (order, x.shape)


def test_meta_tensors():
    for order in PERMUTATIONS:
        q = laid(order, B, H, L, D)
        out = hw.attention(*[x.to("meta") for x in (q, q, q)], hw.softcap(2.0))
        assert same_order(q, out)


def test_expanded_dimensions_stay_where_they_are():
    q = torch.randn(1, L, H, D).transpose(1, 2).expand(B, H, L, D)
    hw.attention(q, q, q, mask=near).transpose(1, 2).view(B, L, H * D)
    q = torch.randn(1, 1, 1, 1).expand(B, H, L, D)
    assert hw.attention(q, q, q, mask=near).is_contiguous()


def test_flash_is_contiguous():
    for order in PERMUTATIONS:
        q = laid(order, B, L, H, D)
        for options in ({}, {"causal": True}, {"window_size": (3, 0), "softcap": 3.0}):
            assert flash.flash_attn_func(q, q, q, **options).is_contiguous()
            out, _, _ = flash.flash_attn_func(q, q, q, return_attn_probs=True, **options)
            assert out.is_contiguous()
