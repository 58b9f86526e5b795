"""Correct first: every contestant against the definition in float64, before anything is timed.

The whole square does not fit at these lengths, and need not: the gradient of the output is zero
but for some rows of every head, so that those rows alone give the exact gradients of all keys.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .case import Case, Inputs

PAIRS = 1 << 23  # pairs looked at in one case, over all heads: 64 MB of float64 a matrix
FACTOR = 3.0  # times the error of plain PyTorch in the same dtype that are allowed ...
FLOOR = 5e-6  # ... or up to this: PyTorch's flash kernels take a faster, rougher exp


class Error(NamedTuple):
    """The largest, over heads, of |x - truth| / |truth| (Frobenius), and the most allowed."""

    what: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """NaN does not pass."""
        return self.error <= self.limit


def definition(case: Case, x: Inputs, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """softmax(score(scale q kᵀ) where mask) v for some rows, in plain PyTorch, in q's dtype."""
    k, v = (t.repeat_interleave(case.hq // case.hk, dim=1) for t in (k, v))
    s = (q[:, :, rows] @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(case.d)
    index = (
        torch.arange(case.b, device=q.device)[:, None, None, None],
        torch.arange(case.hq, device=q.device)[:, None, None],
        rows[:, None],
        torch.arange(case.length, device=q.device),
    )
    if x.score is not None:
        s = x.score(s, *index)
    if x.mask is not None:
        s = s.masked_fill(~x.mask(*index), -math.inf)
    return s.softmax(-1).to(v.dtype) @ v


class Truth:
    """The right results of a case on some rows, and how far plain PyTorch is from them."""

    def __init__(self, case: Case, x: Inputs) -> None:
        count = max(4, min(256, PAIRS // (case.b * case.hq * case.length)))
        inner = torch.randperm(case.length, generator=torch.Generator().manual_seed(1))[:count]
        ends = torch.tensor([0, case.length - 1])  # where tails go wrong
        self.rows = torch.cat([inner, ends]).unique().to(x.q.device)
        self.dout = torch.zeros_like(x.dout)
        self.dout[:, :, self.rows] = x.dout[:, :, self.rows]
        self.inputs = x
        self.exact = self._plain(case, torch.float64)
        near = self._plain(case, x.q.dtype)
        self.limits = [
            max(FACTOR * distance(a, b), FLOOR) for a, b in zip(near, self.exact, strict=True)
        ]

    def _plain(self, case: Case, dtype: torch.dtype) -> list[Tensor]:
        x = self.inputs
        q, k, v = (t.detach().to(dtype).requires_grad_() for t in (x.q, x.k, x.v))
        out = definition(case, x, q, k, v, self.rows)
        dout = x.dout[:, :, self.rows].to(dtype)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v, *x.learned), dout)]

    def errors(
        self, forward: Callable[[], Tensor], backward: bool, given: Inputs | None = None
    ) -> list[Error]:
        """Of a contestant's output, and of its gradients where it has a backward. `given`: the
        tensors that it computes on, if they are others with the same numbers."""
        leaves = (self.inputs if given is None else given).leaves
        with torch.set_grad_enabled(backward):
            out = forward()
        found = [out.detach()[:, :, self.rows]]
        if backward:
            found += torch.autograd.grad(out, leaves, self.dout)
        learned = (f"d(learned {n})" for n in range(len(leaves) - 3))
        names = ("out", "dq", "dk", "dv", *learned)
        return [
            Error(name, distance(a, b), limit)
            for name, a, b, limit in zip(names, found, self.exact, self.limits, strict=False)
        ]


def distance(x: Tensor, exact: Tensor) -> float:
    """|x - exact| / |exact|, of the worst head; of all of it where there are no heads."""
    x, exact = x.double(), exact.double()
    if x.dim() < 3:
        return float((x - exact).norm() / exact.norm())
    return float(((x - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))).max())
