"""What calls give back where it does not depend on the kernels."""

import math

import torch
from torch import Tensor

from ...types import Forward, Grads, Spec
from ..base import Call
from . import captured_grads
from .preprocess import deltas
from .runtime.call_plan import nothing


def of_forward(
    spec: Spec, out: Tensor, lse: Tensor, row_max: Tensor | None, top: Tensor | None
) -> Forward:
    """The results, and nothing for those that were not asked for.

    - `top`: the largest logits of a head by what computed them, (b, hq, slots); None where no
      kernel ran, since there was no pair.
    """
    none = nothing(out.device)
    max_logit = none
    if spec.max_logit:
        max_logit = lse.new_full(lse.shape[:2], -math.inf) if top is None else top.amax(-1)
    return Forward(out, lse, max_logit, none if row_max is None else row_max)


def of_no_pairs(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    captured: list,
) -> Grads:  # fmt: skip
    """The gradients where there are no queries or no keys: zeros, but for a sink's.

    - `captured`: from `learned.zeros`.
    """
    dtype = torch.float32 if spec.partial else call.q.dtype
    zero = lambda x: torch.zeros(x.shape, dtype=dtype, device=x.device)
    dsink = None
    if call.sink is not None:
        dsink = captured_grads.of_sink(call.sink, lse, deltas(out, dout, dlse))
    return Grads(zero(call.q), zero(call.k), zero(call.v), dsink, captured)
