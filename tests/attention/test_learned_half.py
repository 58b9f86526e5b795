"""Gradients of learned numbers in half precision: a learned number adds up the errors of all rows, so
the backward's delta must not come from a rounded out."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import headway as hw
from headway.backends import cpu
from headway.resolve import prepare
from learned import Learned, errors

HALF = (torch.bfloat16, torch.float16)


def _inputs(shape: tuple, dtype: torch.dtype, seed: int, std: float = 1.0) -> list[Tensor]:
    b, hq, hk, q_len, kv_len, d = shape
    draw = torch.Generator().manual_seed(seed)
    sizes = (b, hq, q_len, d), (b, hk, kv_len, d), (b, hk, kv_len, d), (b, hq, q_len, d)
    return [(torch.randn(size, generator=draw) * std).to(dtype) for size in sizes]


def _temperature(t: Tensor) -> Callable:
    return lambda s, b, h, i, j: s * t.exp()


def _per_head(t: Tensor) -> Callable:
    return lambda s, b, h, i, j: s * t[h % len(t)]


def _row(t: Tensor) -> Callable:
    """Moves whole rows: its true gradient is 0."""
    return lambda s, b, h, i, j: s + t


# b, hq, hk, q_len, kv_len, d; the score, its number, the inputs' standard deviation.
CASES = {
    "temperature": ((2, 4, 4, 150, 150, 64), _temperature, [1.82], 1.0),
    "temperature, wide logits": ((2, 4, 4, 150, 150, 64), _temperature, [0.5], 2.0),
    "temperature, groups": ((3, 21, 3, 108, 194, 32), _temperature, [0.1], 1.0),
    "a gain per head": ((2, 4, 2, 130, 70, 48), _per_head, [0.9, 1.7, 0.2, 3.0], 1.0),
    "a row": ((2, 4, 4, 150, 150, 64), _row, [0.3], 1.0),
}


def _learned(numbers: list[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers if len(numbers) > 1 else numbers[0], dtype=dtype).requires_grad_()


def _dense(x: list[Tensor], score: Callable, of: Tensor, lse_weight: float) -> Tensor:
    q, k, v, dout = (t.double() for t in x)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    at = [
        torch.arange(n).view([-1 if dim == m else 1 for dim in range(4)])
        for m, n in enumerate((*q.shape[:3], k.shape[2]))
    ]
    s = score(q @ k.mT / math.sqrt(q.shape[3]), *at)
    loss = ((s.softmax(-1) @ v) * dout).sum() + lse_weight * s.logsumexp(-1).sin().sum()
    return torch.autograd.grad(loss, of)[0]


def _exact_delta(x: list[Tensor], score: Callable, of: Tensor) -> Tensor:
    """The gradient by the waist with an out in float32: what there is to reach."""
    q, k, v, dout = x
    spec, call = prepare(q, k, v, score, partial=True, backend="cpu")
    with torch.no_grad():
        out, lse, *_ = cpu.forward(spec, call)
        assert out.dtype == torch.float32
        grads = cpu.backward(spec, call, out, lse, dout, None, (True,))
    assert grads.captured[0] is not None
    return grads.captured[0].double()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_right_as_with_an_out_in_float32(name, dtype):
    """At most twice its error, in every draw; the old way was off by ten times that and more."""
    shape, form, numbers, std = CASES[name]
    ours = wide = size = 0.0
    for seed in range(4):
        x = _inputs(shape, dtype, seed, std)
        t = _learned(numbers, torch.float32)
        right = _dense(x, form(t.double()), t, 0.0)
        (got,) = torch.autograd.grad((hw.attention(*x[:3], form(t)) * x[3]).sum(), t)
        ours = max(ours, float((got.double() - right).abs().max()))
        reach = _exact_delta(x, form(t), t)
        wide = max(wide, float((reach - right).abs().max()))
        size = max(size, float(right.abs().max()))
    assert ours <= 2 * wide + 1e-6 * (1 + size), (ours, wide, size)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("std", [1.0, 2.0])
@pytest.mark.parametrize("heads", [(4, 4), (21, 3)], ids=str)
def test_sinks_as_well(heads, std, dtype):
    """A sink adds up delta's error in all rows, too: 3 % of it, before out stayed in float32."""
    half = wide = 0.0
    for seed in range(4):
        how = Learned(2, heads, (108, 194), 64, 0.5, std, sink=True)
        for_seed = errors(how, dtype, "cpu", seed)
        half, wide = max(half, for_seed[0]), max(wide, for_seed[1])
    assert half <= 2 * wide + 1e-6


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_way_through_autograd(dtype):
    """Eager, with statistics, under a mode that watches, compiled, checkpointed: one gradient."""
    shape, form, numbers, std = CASES["temperature, wide logits"]
    x = _inputs(shape, dtype, 7, std)
    t = _learned(numbers, torch.float32)
    right = _dense(x, form(t.double()), t, 0.0)

    def gradient(attention: Callable) -> Tensor:
        q, k, v = (y.detach().requires_grad_() for y in x[:3])
        out = attention(q, k, v)
        assert out.dtype == dtype
        grads = torch.autograd.grad((out * x[3]).sum(), [q, k, v, t])
        assert [g.dtype for g in grads] == [dtype] * 3 + [torch.float32]
        return grads[-1]

    plain = lambda q, k, v: hw.attention(q, k, v, form(t))
    first = gradient(plain)
    assert abs(float(first - right)) < 2e-3 * abs(float(right)) + 2e-3
    score = form(t)
    ways = {
        "statistics": lambda q, k, v: hw.attention_with_stats(q, k, v, form(t)).out,
        "compiled": torch.compile(
            lambda q, k, v: hw.attention(q, k, v, score), backend="aot_eager", fullgraph=True
        ),
        "checkpoint": lambda *y: torch.utils.checkpoint.checkpoint(plain, *y, use_reentrant=False),
    }
    for name, way in ways.items():
        torch.testing.assert_close(gradient(way), first, rtol=1e-5, atol=1e-4, msg=name)
    with torch.profiler.profile():
        torch.testing.assert_close(gradient(plain), first, rtol=1e-5, atol=1e-4)


def test_out_is_the_same_rounded_number():
    """Whether anything learns or not, to the bit."""
    for dtype in HALF:
        x = _inputs((1, 2, 2, 70, 70, 16), dtype, 3)
        t = _learned([0.4], torch.float32)
        learning = hw.attention(*x[:3], _temperature(t))
        with torch.no_grad():
            idle = hw.attention(*x[:3], _temperature(t))
        assert torch.equal(learning, idle)
        assert torch.equal(learning, hw.attention(*x[:3], _temperature(t.detach())))


def test_only_what_learns_pays():
    x = _inputs((1, 2, 2, 8, 8, 16), torch.bfloat16, 0)
    t = _learned([0.4], torch.float32)
    q = x[0].requires_grad_()
    exact = lambda *given, **how: prepare(*given, **how)[0].exact_out
    assert exact(q, *x[1:3], _temperature(t))
    assert exact(q, *x[1:3], hw.alibi(2), hw.causal())
    assert not exact(q, *x[1:3], _temperature(t), partial=True)
    assert not exact(*(y.detach() for y in x[:3]), hw.alibi(2), hw.causal())
    assert not exact(q.float(), *(y.float() for y in x[1:3]), _temperature(t))
    with torch.no_grad():
        assert not exact(q, *x[1:3], _temperature(t))
