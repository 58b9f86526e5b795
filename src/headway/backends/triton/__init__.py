"""The Triton backend: any score, any mask, forward and backward, on any GPU that Triton knows.

Importing it loads no Triton; running it, or asking for its code, does.
"""

import importlib.util
import sys

import torch

from ...types import Spec, acc_dtype, constant_under_compile
from ..base import CapabilityKey, launched, no_operator, nothing_prepared
from ..gpu import inference
from ..gpu import limits as limits
from ..gpu.named_card import named_card

name = "triton"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 512  # columns of q, k and v that fit in registers
WIDEST_TANGENT = 192  # with their tangents


def reasons_against(spec: Spec, kind: CapabilityKey) -> list[str]:
    """Return why a call cannot run here: other devices than GPUs, dtypes than float32, bfloat16 and
    float16, widths above 512 (192 with tangents); over a cache, those of `gpu.inference`."""
    reasons = []
    device_reason = unavailable(kind.device.type, kind.device.index)
    if device_reason:
        reasons.append(device_reason)
    if kind.cache:
        return reasons + inference.reasons_against(spec, kind)
    if kind.dtype not in DTYPES:
        reasons.append(
            f"{kind.dtype} is not among float32, bfloat16 and float16: convert with .to(), or use "
            "backend='reference'"
        )
    if max(kind.d, kind.dv) > WIDEST:
        reasons.append(f"widths d = {kind.d}, dv = {kind.dv}: at most {WIDEST} fit in registers")
    if kind.moves and WIDEST_TANGENT < max(kind.d, kind.dv) <= WIDEST:
        reasons.append(
            f"an input has a tangent (forward mode), and d = {kind.d}, dv = {kind.dv}: its two "
            f"accumulators fit in registers up to {WIDEST_TANGENT}; split the heads, or use "
            "backend='reference'"
        )
    return reasons


forward, backward, tangent = (
    launched(__name__, part) for part in ("forward", "backward", "tangent")
)
accumulates, native, infer = acc_dtype, no_operator, inference.infer
prepare, code = nothing_prepared, inference.code


def unavailable(device: str, index: int | None) -> str:
    """Return why kernels cannot run on a device; empty if they can."""
    if named_card() is not None or device == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed: pip install triton"
        card = named_card()
        capability = torch.cuda.get_device_capability(index) if card is None else card.capability
        if (card is not None or torch.version.hip is None) and capability < (8, 0):
            return f"the GPU has compute capability {capability}, Triton's kernels need (8, 0)"
        return ""
    # On the CPU there is Triton's interpreter, for tests, which load it and switch it on.
    triton = sys.modules.get("triton")
    if device == "cpu" and triton is not None and triton.knobs.runtime.interpret:
        return ""
    return f"the tensors are on {device}: move them to a GPU"


constant_under_compile(unavailable)
