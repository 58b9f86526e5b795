"""Errors of dq, dk and dv in half precision, beside those of flash attention's arithmetic."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import headway as hw
import oracle


@dataclass(frozen=True)
class Kind:
    """A call whose gradients are compared."""

    mask: Callable | None = None
    formula: Callable | None = None  # the mask's
    score: Callable | None = None
    statistics: bool = False


CAUSAL = hw.causal(), lambda b, h, i, j: j <= i
KINDS = {
    "causal": Kind(*CAUSAL),
    "window": Kind(CAUSAL[0] & hw.sliding_window(9), lambda b, h, i, j: (j <= i) & (i - j < 9)),
    "softcap": Kind(*CAUSAL, lambda s, b, h, i, j: 20.0 * torch.tanh(s / 20.0)),
    "statistics": Kind(*CAUSAL, statistics=True),
}


def times_of_flash(
    name: str, dtype: torch.dtype, backend: str, std: float, seed: int
) -> dict[str, float]:
    """The error (rms) of each gradient over that of the arithmetic of flash kernels: P and dS are
    rounded for their products, delta = rowsum(dout∘out) has a rounded out, all else is exact."""
    kind, draw = KINDS[name], torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(shape, generator=draw)
    q, k = ((std * new(1, 2, 96, 32)).to(dtype) for _ in range(2))
    v, dout = (new(1, 2, 96, 32).to(dtype) for _ in range(2))
    dlse = new(1, 2, 96) if kind.statistics else None

    def dense(factors: torch.dtype | None = None, exact_out: Tensor | None = None) -> tuple:
        """out, dq, dk and dv; with `exact_out` delta is off by what the rounded out is off by."""
        x = [t.double().requires_grad_() for t in (q, k, v)]
        made = oracle.attention(*x, kind.score, kind.formula, factors=factors)
        of_lse = torch.zeros_like(made.lse) if dlse is None else dlse.double()
        if exact_out is not None:
            of_lse = of_lse - (dout * (made.out.detach().to(dtype) - exact_out)).sum(-1)
        grads = torch.autograd.grad([made.out, made.lse], x, [dout.double(), of_lse])
        return made.out.detach(), *grads

    out, *exact = dense()
    _, *flash = dense(dtype, out)
    x = [t.requires_grad_() for t in (q, k, v)]
    made = hw.attention_with_stats(*x, kind.score, kind.mask, backend=backend)
    results = [made.out] if dlse is None else [made.out, made.lse]
    ours = torch.autograd.grad(results, x, [dout, dlse][: len(results)])
    rms = lambda error: math.sqrt(error.double().square().mean())
    return {
        what: rms(got - right) / rms(near.to(dtype) - right)
        for what, got, near, right in zip(("dq", "dk", "dv"), ours, flash, exact, strict=True)
    }


def farther_than_flash(dtype: torch.dtype, backend: str, seed: int) -> dict[str, str]:
    """Gradients whose error is more than 0.15 of it larger, where logits are flat and where they are
    peaked."""
    found = {}
    for name in KINDS:
        for std in (1.0, 3.0):
            times = times_of_flash(name, dtype, backend, std, seed)
            if max(times.values()) > 1.15:
                found[f"{name}, {dtype}, std {std}"] = f"{times} of flash kernels' errors"
    return found
