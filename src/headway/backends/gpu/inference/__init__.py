"""Inference: few queries over a cache of keys and values, on every GPU that Triton knows.

Both GPU backends run it. Importing it loads no Triton.

- kernel.py: the kernel; work.py: how its CTAs share the work; merge.py: what several of them
  computed of one tile, put together.
- config.py: tile sizes; plan.py: what calls of a kind share; launch.py: from a call to a launch.
"""

import torch

from ....types import Forward, Spec
from ...base import Call, CapabilityKey
from .config import WIDEST

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    if spec.tiles is not None:
        reasons.append(
            "a block mask over a cache: give its mask itself, or use backend='reference'"
        )
    return reasons


def infer(spec: Spec, call: Call) -> Forward:
    """`Backend.infer`. The first call loads Triton."""
    from . import launch

    return launch.infer(spec, call)
