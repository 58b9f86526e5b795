"""Formulas of our operators for `torch.utils.flop_counter.FlopCounterMode`.

They count every pair, as PyTorch does for its own attention: shapes do not say what a mask skips.
"""

import sys

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .types import NAMESPACE, REPLICATED_KV, Spec


def _forward(q, k, v, *args, **kwargs) -> int:
    b, h, q_len, d = q
    return 2 * b * h * q_len * k[2] * (d + v[3])


def _backward(q, k, v, *args, **kwargs) -> int:
    b, h, q_len, d = q  # S, dq, dk: width d; dP, dv: width dv
    return 2 * b * h * q_len * k[2] * (3 * d + 2 * v[3])


def _over_ranks(work):
    """Return the formula for this rank's queries and all keys, whose number is that of a table of
    shards, or the length of k."""

    def formula(spec, q, k, *given, **kwargs) -> int:
        table = given[-1 - _AFTER[work]]
        length = int(table[:, 2].max()) if len(table) else 0
        exchange = Spec.parse(spec).exchange
        if exchange is not None and exchange.plan == REPLICATED_KV:
            length = k.shape[2]
        return work(q.shape, (*k.shape[:2], length), given[0].shape)

    return formula


_AFTER = {_forward: 0, _backward: 6}  # arguments of the operator behind its table of the keys


def register_flops() -> None:
    """Register formulas of our operators, and of PyTorch's that may run in their place, once
    `FlopCounterMode` is imported: its import loads Triton."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    ours = getattr(torch.ops, NAMESPACE)
    if ours.forward in counter.flop_registry:
        return
    raw = {ours.cp_forward: _over_ranks(_forward), ours.cp_backward: _over_ranks(_backward)}
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
    for op, formula in raw.items():
        if op not in counter.flop_registry:
            counter.register_flop_formula(op, get_raw=True)(formula)
    for mode in _get_current_dispatch_mode_stack():  # modes copy the registry when they are made
        if isinstance(active := getattr(mode, "counter", None), counter.FlopCounterMode):
            active.flop_registry.update({op: counter.flop_registry[op] for op in (*formulas, *raw)})
