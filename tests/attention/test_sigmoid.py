"""Sigmoid attention against its definition, dense and in float64."""

import math

import pytest
import torch

import headway as hw
import oracle
from headway.errors import ArgumentError, UnknownKeyword


def dense(q, k, v, score=None, mask=None, *, bias, scale=None):
    """sum_j sigmoid(T_ij + bias) v_j over kept pairs, by autograd on these lines."""
    _, t, kept = oracle.scores(q, k, score, mask, scale)
    bias = torch.as_tensor(bias, dtype=t.dtype)
    p = torch.sigmoid(t + (bias[:, None, None] if bias.dim() else bias))
    return torch.where(kept, p, 0.0) @ oracle.to_heads(v, q.shape[1]).to(p.dtype)


def inputs(dtype=torch.float64, q_len=25, kv_len=33, std=1.0):
    q = torch.randn(2, 4, q_len, 16, dtype=torch.float64) * std
    k, v = torch.randn(2, 2, 2, kv_len, 16, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (q, k * std, v)]


CALLS = {
    "plain": {},
    "causal": {"mask": (hw.causal(8), lambda b, h, i, j: j <= i + 8)},
    "empty rows": {"mask": (hw.causal(-7), lambda b, h, i, j: j <= i - 7)},
    "block mask": {
        "mask": (hw.block_mask(hw.causal(), 1, 1, 25, 33, tile=8), lambda b, h, i, j: j <= i)
    },
    "scale": {"scale": 0.7},
    "softcap": {"score": (hw.softcap(2.0), lambda s, b, h, i, j: 2 * torch.tanh(s / 2))},
    "a function": {"score": (lambda s, b, h, i, j: s - 0.1 * (i - j).abs(),) * 2},
    "walls": {"score": (lambda s, b, h, i, j: torch.where(j % 3 == 0, -math.inf, s),) * 2},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("bias", ["number", "learned"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_float64(name, bias, backend):
    call = CALLS[name]
    pick = lambda n: {key: x[n] if isinstance(x, tuple) else x for key, x in call.items()}
    bias = -math.log(33) if bias == "number" else (torch.randn(4).double() - 3).requires_grad_()
    leaves = inputs()
    out = hw.sigmoid_attention(*leaves, **pick(0), bias=bias, backend=backend)
    want = dense(*leaves, **pick(1), bias=bias)
    torch.testing.assert_close(out, want)
    on = leaves + ([bias] if isinstance(bias, torch.Tensor) else [])
    dout = torch.randn_like(out)
    for got, right in zip(*(torch.autograd.grad(o, on, dout) for o in (out, want)), strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_exact_as_plain_pytorch(dtype):
    """Of the rounded inputs, at most twice as far from float64 as plain lines in that dtype."""
    leaves = inputs(dtype, 130, 200, std=2.0)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    plain = [x.detach().requires_grad_() for x in leaves]
    dout = torch.randn(2, 4, 130, 16).to(dtype)

    def plainly(q, k, v):
        k, v = (oracle.to_heads(x, 4) for x in (k, v))
        return torch.sigmoid((q @ k.mT).float() / 4 - math.log(200)).to(dtype) @ v

    results = []
    for fn, on in (
        (lambda *x: hw.sigmoid_attention(*x, bias=-math.log(200)), leaves),
        (plainly, plain),
        (lambda *x: dense(*x, bias=-math.log(200)), exact),
    ):
        out = fn(*on)
        assert out.dtype == on[0].dtype
        results.append([out, *torch.autograd.grad(out, on, dout.to(out.dtype))])
    for name, ours, theirs, right in zip(["out", "dq", "dk", "dv"], *results, strict=True):
        far = [(x.double() - right).norm() / right.norm() for x in (ours, theirs)]
        assert far[0] <= 2 * far[1] + torch.finfo(dtype).eps / 8, (name, far)


@pytest.mark.parametrize("bias", [-60.0, -1000.0, 60.0])
def test_far_from_zero(bias):
    """Weights that are all next to nothing, nothing, or all 1."""
    leaves = inputs(torch.float32)
    out = hw.sigmoid_attention(*leaves, bias=bias)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = dense(*exact, bias=bias)
    tolerance = {"rtol": 1e-4, "atol": 1e-4 * float(want.detach().abs().max())}
    torch.testing.assert_close(out.double(), want, **tolerance)
    grads = [torch.autograd.grad(x.sum(), on) for x, on in ((out, leaves), (want, exact))]
    for got, right in zip(*grads, strict=True):
        # In float32, dq and dk at 60 are the rounding of numbers of the size of dv.
        scale = max(float(g.abs().max()) for g in grads[1])
        torch.testing.assert_close(got.double(), right, rtol=1e-3, atol=1e-5 * scale)


def test_rows_that_see_nothing_are_zero_and_have_no_gradient():
    q, k, v = leaves = inputs(torch.float32)
    out = hw.sigmoid_attention(q, k, v, mask=hw.causal(-12), bias=0.0)
    assert (out[:, :, :12] == 0).all()
    dq, *rest = torch.autograd.grad(out.sum(), leaves)
    assert (dq[:, :, :12] == 0).all()
    assert all(g.isfinite().all() for g in (dq, *rest))


def test_compiled():
    q, k, v = inputs(torch.float32)
    call = lambda q, k, v: hw.sigmoid_attention(q, k, v, mask=hw.causal(), bias=-4.0)
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(out, call(q, k, v))


def test_dropout_drops_weights_and_scales_the_rest():
    q, k, _ = inputs(q_len=70, kv_len=90)
    v = torch.eye(90, dtype=torch.float64).expand(2, 2, 90, 90)
    whole = hw.sigmoid_attention(q, k, v, bias=-4.0)
    kept = hw.sigmoid_attention(q, k, v, bias=-4.0, dropout=0.25, seed=3)
    torch.testing.assert_close(kept, torch.where(kept == 0, 0.0, whole / 0.75))
    assert 0.2 < (kept == 0).double().mean() < 0.3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "bias"),
        ({"bias": "log"}, ArgumentError, "bias='log'"),
        ({"bias": math.inf}, ArgumentError, "bias=inf"),
        ({"bias": torch.zeros(3)}, ArgumentError, "bias has shape"),
        ({"bias": 0.0, "score": hw.causal()}, ArgumentError, "pass it as mask"),
        ({"bias": 0.0, "sink": torch.zeros(4)}, UnknownKeyword, "sink"),
    ],
)
def test_mistakes(options, error, message):
    with pytest.raises(error, match=message):
        hw.sigmoid_attention(*inputs(), **options)
