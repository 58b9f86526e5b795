"""Inference: few queries over a cache of keys and values, on every GPU that Triton knows.

Both GPU backends use it, over caches (`infer`) and for plain calls with few queries and nothing to
train (`suits`). Importing it loads no Triton and no code generation.

- kernel.py: the kernel. work.py: the shares of its CTAs. merge.py: merges their partial results.
- block_lists.py: the key blocks that a block mask chooses.
- config.py: tile sizes. plan.py: the plan of a kind of call. launch.py: runs a call.
- slots.py: the kernel that writes keys and values to the slots of a cache.
"""

from typing import Any

import torch
from torch import Tensor

from ....types import FLOAT8, Forward, Spec
from ...base import Call, CapabilityKey

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 576  # of q and k: MLA's latent
MAX_PLAIN_QUERIES = 64  # of a group, in plain calls


def reasons_against(spec: Spec, kind: CapabilityKey) -> list[str]:
    """Return the reasons why it cannot run a call. It takes float32, bfloat16 and float16, over
    caches of that dtype or of float8, up to a width of 576."""
    reasons = []
    if kind.dtype not in DTYPES:
        reasons.append(
            f"{kind.dtype} is not among float32, bfloat16 and float16: convert with .to(), or use "
            "backend='reference'"
        )
    if kind.kv_dtype not in (None, *FLOAT8):
        reasons.append(
            f"a cache of {kind.kv_dtype} and q of {kind.dtype}: it takes q's dtype, "
            "float8_e4m3fn or float8_e5m2"
        )
    if max(kind.d, kind.dv) > WIDEST:
        reasons.append(f"widths d = {kind.d}, dv = {kind.dv}: at most {WIDEST} fit in registers")
    return reasons


def infer(spec: Spec, call: Call) -> Forward:
    """Run a call over a cache: `Backend.infer`. The first call loads Triton."""
    from . import launch

    return launch.infer(spec, call)


def write_slots(*inputs: Tensor | None) -> None:
    """Write to a cache; `backends.slots.write_slots`. The first call loads Triton."""
    from . import slots

    slots.write_slots(*inputs)  # type: ignore[arg-type]


def suits(spec: Spec, call: Call) -> bool:
    """Return True if a plain call runs here: up to 64 queries of a group, nothing to train, and
    either no mask, one that allows a range of keys (`causal`, windows, `padding`, `chunked`, and
    their intersections), or that of packed sequences, where every key is some query's.

    The training kernels have tiles of one head, which few queries leave mostly empty. But they skip
    the empty tiles of a block mask, which pays for masks with holes (documents, dilated windows).
    """
    q, k = call.q, call.k
    if q.shape[2] * (q.shape[1] // k.shape[1]) > MAX_PLAIN_QUERIES or not k.shape[2]:
        return False
    if spec.dropout or spec.entropy or spec.tiles is not None or spec.exact_out:
        return False
    if q.dtype not in DTYPES:
        return False
    if call.coords.q_pos is not None or call.coords.kv_pos is not None:
        return False
    if call.signature is None:
        inputs = q, k, call.v, call.sink, *call.captured.tensors
        trained = any(tensor is not None and tensor.requires_grad for tensor in inputs)
    else:
        trained = call.signature.trained
    if trained or spec.mask is None:
        return not trained
    from ..codegen.limits import is_packed, is_range

    return is_range(spec.mask) or is_packed(spec.mask)


def code(spec: Spec, call: Call, **training: Any) -> str:
    """Return the functions generated for the score and the mask.

    - `training`: fields of `CodegenSpec` for calls that do not run here.
    """
    from ..codegen import emit

    here = call.kv is not None or suits(spec, call)
    options: dict[str, Any] = {"consecutive": False, "limits": True} if here else training
    wide_offsets = (False,) * len(call.captured.tensors)
    codegen_spec = emit.CodegenSpec(spec.score, spec.mask, wide_offsets=wide_offsets, **options)
    return (_TITLE if here else "") + emit.source(codegen_spec)


_TITLE = (
    "# the kernel of inference: the queries of a group are the rows of one tile, and keys are "
    "split over the GPU\n"
)
