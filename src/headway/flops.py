"""The work of a call, as `torch.utils.flop_counter.FlopCounterMode` counts it.

Whole squares, as PyTorch counts its own attention; the shapes do not say what a mask skips.
"""

import sys

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .types import NAMESPACE


def _forward(q, k, v, *args, **kwargs) -> int:
    b, h, q_len, d = q
    return 2 * b * h * q_len * k[2] * (d + v[3])


def _backward(q, k, v, *args, **kwargs) -> int:
    b, h, q_len, d = q  # S, dq, dk: width d; dP, dv: width dv
    return 2 * b * h * q_len * k[2] * (3 * d + 2 * v[3])


def register_flops() -> None:
    """Teach `FlopCounterMode` the formulas of our operators, and of PyTorch's that may run in their
    place, once it is there: importing it loads Triton."""
    counter = sys.modules.get("torch.utils.flop_counter")
    ours = getattr(torch.ops, NAMESPACE)
    if counter is None or ours.forward in counter.flop_registry:
        return
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    formulas = {
        ours.forward: lambda spec, *args, **kwargs: _forward(*args),
        ours.backward: lambda spec, *args, **kwargs: _backward(*args),
        getattr(torch.ops.aten, kernel): _forward,
        getattr(torch.ops.aten, f"{kernel}_backward"): lambda dout, *args, **kwargs: _backward(
            *args
        ),
    }
    for op, formula in formulas.items():
        if op not in counter.flop_registry:
            counter.register_flop_formula(op)(formula)
    for mode in _get_current_dispatch_mode_stack():  # modes copy the registry when they are made
        if isinstance(active := getattr(mode, "counter", None), counter.FlopCounterMode):
            active.flop_registry.update({op: counter.flop_registry[op] for op in formulas})
