"""How wrong gradients of learned numbers and sinks are in half precision, and where out is float32."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import headway as hw
from headway.backends import get
from headway.resolve import prepare


@dataclass(frozen=True)
class Learned:
    """A call with a number that learns: its shape, spread, and where the number stands."""

    b: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    width: int
    value: float
    std: float = 1.0
    shifts: bool = False  # it is added to whole rows: the true gradient is 0
    sink: bool = False  # it is the sink of every head, and there is no score


SMALL = (  # for what runs kernels slowly
    Learned(1, (2, 1), (70, 90), 32, 1.82),
    Learned(1, (2, 2), (64, 64), 64, 0.5, std=2.0),
    Learned(1, (2, 1), (70, 90), 32, 0.5, shifts=True),
    Learned(1, (2, 1), (70, 90), 32, 1.0, sink=True),
)


def inputs(how: Learned, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """q, k, v, dout, rounded to `dtype`."""
    new = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    (hq, hk), (n, m), d = how.heads, how.lengths, how.width
    q, k, v = (how.std * new(how.b, h, x, d) for h, x in ((hq, n), (hk, m), (hk, m)))
    return [x.to(dtype) for x in (q, k, v, new(how.b, hq, n, d))]


def mods(how: Learned, t: Tensor) -> dict:
    """A temperature, a shift of whole rows, or a sink."""
    if how.sink:
        return {"sink": t, "mask": hw.causal(how.lengths[1] - how.lengths[0])}
    if how.shifts:
        return {"score": lambda s, b, h, i, j: s + t}
    return {"score": lambda s, b, h, i, j: s * t.exp()}


def gradient(how: Learned, given: list[Tensor], backend: str, partial_: bool = False) -> Tensor:
    """That of the number; of a sink, that of every head. `partial_`: of the call whose results are
    float32."""
    q, k, v, dout = given
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    t = torch.full([how.heads[0]] if how.sink else [], how.value, dtype=dtype, requires_grad=True)
    if partial_:
        spec, call = prepare(q, k, v, **mods(how, t), backend=backend, partial=True)
        pair = get(spec.backend)
        with torch.no_grad():
            out, lse, *_ = pair.forward(spec, call)
            assert out.dtype == dtype
            grads = pair.backward(spec, call, out, lse, dout, None, () if how.sink else (True,))
            grad = grads.sink if how.sink else grads.captured[0]
    else:
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        out = hw.attention(q, k, v, **mods(how, t), backend=backend)
        assert out.dtype == q.dtype
        out.backward(dout)
        grad = t.grad
    assert grad is not None
    return grad


def errors(how: Learned, dtype: torch.dtype, backend: str, seed: int = 0) -> tuple[float, float]:
    """Of the gradient, and of that where out is float32, at most: the truth is that of the same
    rounded inputs in float64."""
    given = inputs(how, dtype, seed)
    truth = gradient(how, [x.double() for x in given], "reference")
    both = (gradient(how, given, backend, partial_) for partial_ in (False, True))
    half, wide = (float((found - truth).abs().max()) for found in both)
    return half, wide
