"""The parts of a call's results that do not depend on the kernels."""

import math

import torch
from torch import Tensor

from ...types import Forward, Grads, Spec
from ..base import Call
from . import captured_grads
from .preprocess import deltas
from .runtime.call_plan import empty_result


def memory_for(
    call: Call, n: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:  # fmt: skip
    """Memory for a result: number n of what the call brings (`Call.into`), if it is as new memory
    would be, on which launches of one kind depend."""
    if n < len(call.into):
        x = call.into[n]
        if x.shape == shape and x.dtype == dtype and x.is_contiguous() and not x.data_ptr() % 16:
            return x
    return torch.empty(shape, dtype=dtype, device=call.q.device)


def of_forward(
    spec: Spec, out: Tensor, lse: Tensor, row_max: Tensor | None, top: Tensor | None
) -> Forward:
    """The results of a forward; those that were not asked for are empty.

    - `top`: (b, hq, slots), the largest logits that each program of a head found; None if no kernel
      ran, since there was no pair.
    """
    none = empty_result(out.device)
    max_logit = none
    if spec.max_logit:
        max_logit = lse.new_full(lse.shape[:2], -math.inf) if top is None else top.amax(-1)
    return Forward(out, lse, max_logit, none if row_max is None else row_max)


def of_no_pairs(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    captured: list,
) -> Grads:  # fmt: skip
    """The gradients of a call without queries or without keys: zeros, except the sink's.

    - `captured`: from `captured_grads.zeros`.
    """
    of_q, of_kv = spec.grad_dtypes(call.q.dtype)
    zero = lambda x, dtype: torch.zeros(x.shape, dtype=dtype, device=x.device)
    dsink = None
    if call.sink is not None:
        dsink = captured_grads.of_sink(call.sink, lse, deltas(out, dout, dlse))
    return Grads(zero(call.q, of_q), zero(call.k, of_kv), zero(call.v, of_kv), dsink, captured)
