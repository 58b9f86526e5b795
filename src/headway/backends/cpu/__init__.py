"""The CPU backend: the default where tensors are on the CPU, forward and backward."""

from torch import Tensor

from ...types import Forward, Grads, Spec, acc_dtype
from ..base import Call, CapabilityKey, graph_text, no_limits, nothing_prepared
from . import few, flash, tiled
from .maxima import row_maxima

name = "cpu"


def reasons_against(spec: Spec, kind: CapabilityKey) -> list[str]:
    """It runs every call whose tensors are on the CPU."""
    if kind.device.type != "cpu":
        return [f"the tensors are on {kind.device}: move them to the CPU"]
    return []


def forward(spec: Spec, call: Call) -> Forward:
    """PyTorch's flash kernels where they can do the call, else blocks of torch ops; few queries go
    a way of their own."""
    if few.suits(spec, call):
        return few.forward(spec, call)
    result = flash.forward(spec, call) if flash.suits(spec, call) else None
    if result is None:
        return tiled.forward(spec, call)  # sees every logit: statistics are free
    if not (spec.max_logit or spec.row_max):
        return result
    # Those kernels do not return their logits. A second product is cheaper than doing without the
    # kernels: blocks of torch ops take twice as long as both.
    row_max = row_maxima(spec, call, None if spec.row_max else result.lse)
    return result._replace(
        max_logit=row_max.amax(-1) if spec.max_logit else result.max_logit,
        row_max=row_max if spec.row_max else result.row_max,
    )


def backward(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    needs: tuple[bool, ...],
) -> Grads:  # fmt: skip
    """PyTorch's flash kernels or blocks of torch ops, whatever the forward used."""
    if flash.suits(spec, call):
        grads = flash.backward(spec, call, out, lse, dout, dlse)
        if grads is not None:
            return grads
    return tiled.backward(spec, call, out, lse, dout, dlse, needs)


native, plain, infer = flash.native, flash.plain, few.infer
limits, accumulates, code, prepare = no_limits, acc_dtype, graph_text, nothing_prepared
