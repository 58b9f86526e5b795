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
    """Return contiguous memory for a result: the n-th of `Call.into` if launches of this kind can
    write to it, else new memory."""
    if n < len(call.into):
        out = call.into[n]
        matches = out.shape == shape and out.dtype == dtype and out.is_contiguous()
        if matches and not out.data_ptr() % 16:
            return out
    return torch.empty(shape, dtype=dtype, device=call.q.device)


def first_columns(x: Tensor, columns: int) -> Tensor:
    """Return the first columns of a matrix, contiguous."""
    return x if x.shape[3] == columns else x[..., :columns].contiguous()


def of_forward(
    spec: Spec, out: Tensor, lse: Tensor, row_max: Tensor | None, program_logits: Tensor | None,
    entropy: Tensor | None = None,
) -> Forward:  # fmt: skip
    """Return the results of a forward; those that were not asked for are empty.

    - `program_logits`: (b, hq, programs), the largest logit that each program of a head saw; None
      if no kernel ran, since there was no pair.
    """
    empty = max_logit = empty_result(out.device)
    if spec.max_logit and program_logits is not None:
        max_logit = program_logits.amax(-1)
    elif spec.max_logit:
        max_logit = lse.new_full(lse.shape[:2], -math.inf)
    row_max, entropy = (empty if x is None else x for x in (row_max, entropy))
    return Forward(out, lse, max_logit, row_max, entropy)


def of_no_pairs(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    dentropy: Tensor | None, captured: list,
) -> Grads:  # fmt: skip
    """Return the gradients of a call without queries or without keys: zeros, except the sink's.

    - `captured`: from `captured_grads.zeros`.
    """
    q_dtype, kv_dtype = spec.grad_dtypes(call.q.dtype)
    dsink = None
    if call.sink is not None:
        dsink = captured_grads.of_sink(call.sink, lse, deltas(out, dout, dlse), dentropy)
    zeros = lambda like, dtype: torch.zeros(like.shape, dtype=dtype, device=like.device)
    dq, dk, dv = zeros(call.q, q_dtype), zeros(call.k, kv_dtype), zeros(call.v, kv_dtype)
    return Grads(dq, dk, dv, dsink, captured)
