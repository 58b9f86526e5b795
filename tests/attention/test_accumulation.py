"""Half precision is accumulated in float32 on the CPU, whatever that CPU multiplies fastest: errors
stay those of rounding the exact results, at every length and by every way through the backend."""

import math
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import headway as hw
import oracle
from headway.backends import cpu
from headway.resolve import prepare

IDS = torch.arange(5000) // 173


class Shape(NamedTuple):
    """Lengths, heads of q and of k, and a mask: as a user writes it, and its formula."""

    q_len: int
    kv_len: int
    hq: int = 1
    hk: int = 1
    mask: hw.Mask | None = None
    formula: object = None


CAUSAL = hw.causal(), lambda b, h, i, j: i >= j
SHAPES = {
    "causal 1k": Shape(1024, 1024, 1, 1, *CAUSAL),
    "causal 4k": Shape(4096, 4096, 1, 1, *CAUSAL),
    "full 1k": Shape(1024, 1024),
    "full 4k": Shape(4096, 4096),
    "groups": Shape(1024, 1024, 4, 2, *CAUSAL),
    "lengths": Shape(300, 1500, 2, 1),
    "window": Shape(
        1500, 1500, 2, 1, hw.causal() & hw.sliding_window(200),
        lambda b, h, i, j: (i >= j) & (i - j < 200),
    ),
    "prefix": Shape(
        1000, 1000, 2, 2, hw.causal() | hw.prefix(300), lambda b, h, i, j: (i >= j) | (j < 300)
    ),
    "documents": Shape(
        1100, 1100, 2, 1, hw.document(IDS[:1100]), lambda b, h, i, j: IDS[i] == IDS[j]
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def matrix_units(monkeypatch):
    """The CPU says that it multiplies bfloat16 faster than float32."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)


@lru_cache
def inputs(name: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    shape = SHAPES[name]
    draw = torch.Generator().manual_seed(7)
    sizes = (shape.hq, shape.q_len), (shape.hk, shape.kv_len), (shape.hk, shape.kv_len)
    sizes = (*sizes, (shape.hq, shape.q_len))
    return [torch.randn(1, h, n, 64, generator=draw).to(dtype) for h, n in sizes]


@lru_cache
@torch.enable_grad()
def exact(name: str, dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk and dv in float64, a block of queries at a time."""
    formula = SHAPES[name].formula
    q, k, v, dout = (x.double() for x in inputs(name, dtype))
    k, v = k.requires_grad_(), v.requires_grad_()
    out, dq, (dk, dv) = [], [], (torch.zeros_like(x) for x in (k, v))
    for start in range(0, q.shape[2], 512):
        some = slice(start, start + 512)
        mask = formula and (lambda b, h, i, j, start=start: formula(b, h, i + start, j))
        rows = q[:, :, some].requires_grad_()
        made = oracle.attention(rows, k, v, None, mask).out
        grads = torch.autograd.grad(made, (rows, k, v), dout[:, :, some])
        out.append(made.detach())
        dq.append(grads[0])
        dk, dv = dk + grads[1], dv + grads[2]
    return [torch.cat(out, 2), torch.cat(dq, 2), dk, dv]


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


WAYS = {
    "out": hw.attention,
    "stats": lambda *call: hw.attention_with_stats(*call).out,
    "compiled": lambda *call: torch.compile(hw.attention, fullgraph=True, backend="aot_eager")(
        *call
    ),
}
CALLS = [(name, way, torch.bfloat16) for name in SHAPES for way in ("out", "stats")]
CALLS += [(name, "compiled", torch.bfloat16) for name in ("causal 1k", "full 1k", "window")]
CALLS += [(name, way, torch.float16) for name in ("causal 1k", "window") for way in WAYS]


@pytest.mark.parametrize(("name", "way", "dtype"), CALLS, ids=str)
def test_errors_are_those_of_rounding(name, way, dtype):
    *qkv, dout = inputs(name, dtype)
    qkv = [x.clone().requires_grad_() for x in qkv]
    out = WAYS[way](*qkv, None, SHAPES[name].mask)
    made = [out.detach(), *torch.autograd.grad(out, qkv, dout)]
    for what, x, right in zip(("out", "dq", "dk", "dv"), made, exact(name, dtype), strict=True):
        assert x.dtype == dtype
        times = rms(x - right) / rms(right.to(dtype) - right)
        assert times < 1.3, f"{what}: {times:.2f} times what rounding the exact result costs"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["causal 1k", "full 1k", "window", "documents"])
@torch.no_grad()
def test_partial_results_are_float32(name, dtype):
    """All of their digits, not numbers in half precision that were made longer."""
    q, k, v, dout = inputs(name, dtype)
    spec, call = prepare(q, k, v, None, SHAPES[name].mask, partial=True)
    out, lse, *_ = cpu.forward(spec, call)
    grads = cpu.backward(spec, call, out, lse, dout, None, ())
    for x, right in zip((out, *grads[:3]), exact(name, dtype), strict=True):
        assert x.dtype == torch.float32
        assert rms(x - right) < 2e-6 * math.sqrt(x.shape[2]) * rms(right)
        assert (x.to(dtype) == x).float().mean() < 0.1
