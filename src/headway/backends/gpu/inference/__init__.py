"""Inference: few queries over a cache of keys and values, on every GPU that Triton knows.

Both GPU backends run it: over caches (`infer`), and for plain calls with few queries and nothing to
train (`suits`). Importing it loads no Triton.

- kernel.py: the kernel; work.py: how its CTAs share the work; merge.py: what several of them
  computed of one tile, put together; listed.py: the key blocks that a block mask chooses.
- config.py: tile sizes; plan.py: what calls of a kind share; launch.py: from a call to a launch.
"""

import torch

from ....types import Forward, Spec
from ...base import Call, CapabilityKey
from ..codegen.limits import is_range
from .config import WIDEST

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


FEW = 64  # queries of a group, in plain calls


def reasons_against(spec: Spec, kind: CapabilityKey) -> list[str]:
    """It runs in float32, bfloat16 and float16, over caches of that dtype or of float8_e4m3fn, up
    to a width of 576."""
    reasons = []
    if kind.dtype not in DTYPES:
        reasons.append(
            f"{kind.dtype} is not among float32, bfloat16 and float16: convert with .to(), or use "
            "backend='reference'"
        )
    if kind.kv_dtype not in (None, torch.float8_e4m3fn):
        reasons.append(
            f"a cache of {kind.kv_dtype} and q of {kind.dtype}: it takes q's dtype or float8_e4m3fn"
        )
    if max(kind.d, kind.dv) > WIDEST:
        reasons.append(f"widths d = {kind.d}, dv = {kind.dv}: at most {WIDEST} fit in registers")
    return reasons


def infer(spec: Spec, call: Call) -> Forward:
    """`Backend.infer`. The first call loads Triton."""
    from . import launch

    return launch.infer(spec, call)


def suits(spec: Spec, call: Call) -> bool:
    """Whether a plain call runs here: with up to 64 queries of a group, nothing that is trained,
    and no mask or one that keeps all keys between two limits (`causal`, windows, `padding`,
    `chunked`, what they have in common). The kernels of training have tiles of one head, and walk
    the tiles of a block mask: few queries leave most of such a tile empty, but a mask with holes
    (documents, dilated windows) leaves keys out.
    """
    q, k, v, sink, _, captured, _, coords, signature, *_ = call
    if q.shape[2] * (q.shape[1] // k.shape[1]) > FEW or not k.shape[2]:
        return False
    if spec.dropout or spec.tiles is not None or spec.exact_out or q.dtype not in DTYPES:
        return False
    if coords.q_pos is not None or coords.kv_pos is not None:
        return False
    trained = (
        any(x is not None and x.requires_grad for x in (q, k, v, sink, *captured.tensors))
        if signature is None
        else signature.trained
    )
    return not trained and (spec.mask is None or is_range(spec.mask))


def code(spec: Spec, call: Call) -> str:
    """The functions generated for the score and the mask of a call that runs here."""
    from ..codegen import emit

    wide_offsets = (False,) * len(call.captured.tensors)
    text = emit.CodegenSpec(
        spec.score, spec.mask, consecutive=False, wide_offsets=wide_offsets, limits=True
    )
    return (
        "# the kernel of inference: the queries of a group are the rows of one tile, and keys are "
        "split over the GPU\n" + emit.source(text)
    )
