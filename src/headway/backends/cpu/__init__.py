"""The CPU backend: the default where tensors are on the CPU, forward and backward.

`flash` runs PyTorch's CPU flash kernels, `tiled` blocks of torch ops with any score, `decode` few
queries over many keys. `tile_plan` cuts calls into blocks that fit the caches.
"""

from torch import Tensor

from ...types import Forward, Grads, Spec, acc_dtype
from ..base import Call, CapabilityKey, graph_text, no_limits, nothing_prepared
from . import decode, flash, tiled
from . import tangent as tangent_blocks
from .maxima import row_maxima

name = "cpu"


def reasons_against(spec: Spec, capability: CapabilityKey) -> list[str]:
    """Accept every call whose tensors are on the CPU."""
    if capability.device.type != "cpu":
        return [f"the tensors are on {capability.device}: move them to the CPU"]
    return []


def forward(spec: Spec, call: Call) -> Forward:
    """Compute by PyTorch's flash kernels where they support the call, else by blocks of torch ops.
    Few queries are computed by `decode`."""
    if decode.suits(spec, call):
        return decode.forward(spec, call)
    result = None
    if not spec.entropy and flash.suits(spec, call):
        result = flash.forward(spec, call)
    if result is None:
        return tiled.forward(spec, call)  # it computes every logit: statistics are free
    if not (spec.max_logit or spec.row_max):
        return result
    # The kernels do not return their logits. Blocks of torch ops take twice as long as the kernels
    # and a second product.
    row_max = row_maxima(spec, call, None if spec.row_max else result.lse)
    return result._replace(
        max_logit=row_max.amax(-1) if spec.max_logit else result.max_logit,
        row_max=row_max if spec.row_max else result.row_max,
    )


def backward(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    needs: tuple[bool, ...], dentropy: Tensor | None = None,
) -> Grads:  # fmt: skip
    """Compute by PyTorch's flash kernels or by blocks of torch ops, whatever the forward used."""
    if dentropy is not None and not dentropy.any():  # a compiled program gives zeros
        dentropy = None
    if dentropy is None and flash.suits(spec, call):
        grads = flash.backward(spec, call, out, lse, dout, dlse)
        if grads is not None:
            return grads
    return tiled.backward(spec, call, out, lse, dout, dlse, needs, dentropy)


native, plain, infer = flash.native, flash.plain, decode.infer
tangent = tangent_blocks.tangent
limits, accumulates, code, prepare = no_limits, acc_dtype, graph_text, nothing_prepared
