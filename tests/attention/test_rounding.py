"""Results are as exact as rounding the truth allows: out, dq, dk and dv in half precision, the gradients
of sinks, and those of float32 where logits are large.

Calls are random: shapes, groups, masks, scores, scales, sinks, with statistics or without, eager and
compiled. The truth is dense float64 on the same numbers.
"""

import math
import random
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import headway as hw

MASKS: dict[str, Callable | None] = {
    "none": None,
    "causal": hw.causal(),
    "window": hw.causal() & hw.sliding_window(9),
    "function": lambda b, h, i, j: (j <= i + 2) | (j % 5 == 0),
}
SCORES: dict[str, Callable | None] = {
    "none": None,
    "softcap": lambda s, b, h, i, j: 20.0 * (s / 20.0).tanh(),
    "distance": lambda s, b, h, i, j: s - 0.05 * (i - j).abs(),
}


class Draw(NamedTuple):
    """A call: its tensors by name, and its options."""

    inputs: dict[str, Tensor]  # q, k, v and perhaps sink
    dout: Tensor
    mask: str
    score: str
    scale: float
    stats: bool


def draw(seed: int, dtype: torch.dtype, std: float, score: str | None = None) -> Draw:
    pick = random.Random(seed)
    torch.manual_seed(seed)
    hk, group, d = pick.choice([1, 2, 3]), pick.choice([1, 2, 4]), pick.choice([8, 32, 64, 80])
    kv_len = pick.choice([2, 5, 16, 17, 40, 130, 300])
    q_len = pick.choice([kv_len, kv_len, pick.randint(1, kv_len)])
    shapes = {
        "q": (2, hk * group, q_len, d), "k": (2, hk, kv_len, d), "v": (2, hk, kv_len, d),
    }  # fmt: skip
    inputs = {n: (torch.randn(s) * (1 if n == "v" else std)).to(dtype) for n, s in shapes.items()}
    if pick.random() < 0.4:
        inputs["sink"] = torch.randn(hk * group)
    return Draw(
        {n: x.requires_grad_() for n, x in inputs.items()},
        torch.randn(shapes["q"]).to(dtype),
        pick.choice(list(MASKS)),
        pick.choice(list(SCORES)) if score is None else score,
        pick.choice([1 / math.sqrt(d), 0.3, 1.0]),
        pick.random() < 0.4,
    )


def dense(call: Draw, x: dict[str, Tensor]) -> Tensor:
    """Plain PyTorch in the dtype of x."""
    group = x["q"].shape[1] // x["k"].shape[1]
    k, v = (x[n].repeat_interleave(group, 1) for n in "kv")
    t = call.scale * (x["q"] @ k.mT)
    at = [torch.arange(n).view([-1] + [1] * m) for n, m in zip(t.shape, (3, 2, 1, 0), strict=True)]
    if score := SCORES[call.score]:
        t = score(t, *at)
    if mask := {**MASKS, **PLAIN_MASKS}[call.mask]:
        t = t.masked_fill(~mask(*at), -math.inf)
    if "sink" in x:
        t = torch.cat([t, x["sink"].view(-1, 1, 1).expand(*t.shape[:3], 1)], -1)
    nothing = (t == -math.inf).all(-1, keepdim=True)
    p = t.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return p[..., : v.shape[2]] @ v


PLAIN_MASKS = {
    "causal": lambda b, h, i, j: j <= i,
    "window": lambda b, h, i, j: (j <= i) & (i - j < 9),
}


def ours(call: Draw, x: dict[str, Tensor]) -> Tensor:
    options = {"mask": MASKS[call.mask], "scale": call.scale, "sink": x.get("sink")}
    if call.stats:
        return hw.attention_with_stats(x["q"], x["k"], x["v"], SCORES[call.score], **options).out
    return hw.attention(x["q"], x["k"], x["v"], SCORES[call.score], **options)


@cache
def compiled() -> Callable:
    return torch.compile(ours, backend="aot_eager", dynamic=False)


def results(run: Callable, call: Draw, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    x = {
        n: t.detach().to(t.dtype if dtype is None else dtype).requires_grad_()
        for n, t in call.inputs.items()
    }
    out = run(call, x)
    grads = torch.autograd.grad(out, list(x.values()), call.dout.to(out.dtype))
    return {"out": out.detach(), **dict(zip(x, grads, strict=True))}


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def check_half(run: Callable, call: Draw) -> None:
    """At most 1.3 times the error of rounding the truth, and float32's own: where nearly all of P is
    one key's, dP - delta is a difference of two numbers of the size of dout vᵀ."""
    truth, got = results(dense, call, torch.float64), results(run, call)
    sizes = {n: rms(x) for n, x in (*call.inputs.items(), ("dout", call.dout))}
    pair = call.scale * sizes["dout"] * sizes["v"] * math.sqrt(call.dout.shape[3])
    sizes |= {"out": sizes["v"], "q": pair * sizes["k"], "k": pair * sizes["q"]}
    rows = call.dout.shape[0] * call.dout.shape[2]
    sizes["sink"] = pair / call.scale * math.sqrt(rows)
    for name, right in truth.items():
        rounding = rms(right.to(got[name].dtype).double() - right)
        limit = 1.3 * rounding + 2**-22 * sizes[name]
        assert rms(got[name].double() - right) <= limit, (name, call[2:])


@pytest.mark.parametrize("std", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_the_rounded_truth(dtype, std):
    for seed in range(10):
        check_half(ours, draw(seed, dtype, std))


def test_compiled_as_well():
    for seed in (3, 8):
        call = draw(seed, torch.bfloat16, 3.0, score="none")._replace(stats=False)
        check_half(compiled(), call)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_large_logits_in_float32(size):
    """Where P comes from a rounded lse, rounding an lse of at most 256 and S - lse changes P by 2^-17
    each. P of a larger lse is computed anew, and dv is as exact as plain PyTorch's."""
    for seed in range(8):
        call = draw(seed, torch.float32, 1.0, score="none")
        scale = size / 3 / call.inputs["q"].shape[3]
        call = call._replace(scale=scale)
        truth, plain = results(dense, call, torch.float64), results(dense, call)
        got = results(ours, call)
        for name in ("out", "v", "sink"):
            if name in truth:
                limit = 4 * rms(plain[name] - truth[name]) + 2**-15 * rms(truth[name])
                assert rms(got[name] - truth[name]) <= limit, (seed, name, call[2:])
