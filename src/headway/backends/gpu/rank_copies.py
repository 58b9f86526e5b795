"""Copies of rows on one GPU, all in one kernel: the host launches once, and the GPU does not wait
between small copies."""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

import triton

from .runtime.launcher import KernelLauncher

_BLOCK = 64  # rows of a program
_WIDEST = 512


def copy_rows(
    spans: Sequence[tuple[int, int, int]], cache: dict[Any, Any], parts: Sequence[Tensor],
    to: Sequence[Tensor],
) -> bool:  # fmt: skip
    """Copy rows of `parts`, one or two of (b, h, tokens, width), to `to`, of the same dtype.

    Return False, and copy nothing, for rows that are wider than 512, not contiguous, or integers.

    - `spans`: first row, first row in `to`, and number of rows, of each copy.
    - `cache`: the launchers of earlier copies with these spans.
    """
    key = parts[0].shape, parts[-1].shape, parts[0].dtype, *[x.stride() for x in (*parts, *to)]
    plan = cache.get(key)
    if plan is None:
        plan = cache[key] = _launcher(spans, parts, to)
    if isinstance(plan, bool):
        return plan
    kernel, table = plan
    kernel((parts[0], parts[-1], to[0], to[-1], table))
    return True


def _launcher(
    spans: Sequence[tuple[int, int, int]], parts: Sequence[Tensor], to: Sequence[Tensor]
) -> tuple[KernelLauncher, Tensor] | bool:
    """Return the kernel and its table: first row, first row in `to`, and number of rows, of every
    block of rows. Return the result of `copy_rows` instead if there is nothing to launch."""
    k, v = parts[0], parts[-1]  # or only one of them, twice
    tensors = k, v, to[0], to[-1]
    widest = max(k.shape[3], v.shape[3])
    contiguous = all(tensor.stride(3) == 1 for tensor in tensors)
    if widest > _WIDEST or not k.is_floating_point() or not contiguous:
        return False
    blocks = [
        (from_row + n, to_row + n, min(_BLOCK, rows - n))
        for from_row, to_row, rows in spans
        for n in range(0, rows, _BLOCK)
    ]
    b, h = k.shape[:2]
    if not blocks or not b * h * widest:
        return True
    table = torch.tensor(blocks, dtype=torch.int64, device=k.device)
    k_programs = len(blocks) * b * h
    strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    sizes = k_programs, h, b * h, k.shape[3], v.shape[3], *strides
    options = {"BLOCK": _BLOCK, "WIDTH": triton.next_power_of_2(widest)}
    arrange = lambda tensors, *_: (*tensors, *sizes)
    programs = k_programs * len(parts)
    return KernelLauncher(copy_kernel, k.device, options, programs, arrange), table


@triton.jit(do_not_specialize=["k_programs"])
def copy_kernel(
    k, v, to_k, to_v, table, k_programs, heads, all_heads, k_width, v_width, k_b, k_h, k_row,
    v_b, v_h, v_row, to_k_b, to_k_h, to_k_row, to_v_b, to_v_h, to_v_row,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy a block of rows of one head: of k in the first `k_programs` programs, else of v."""
    pid = tl.program_id(0)
    number = pid % k_programs
    entry = table + 3 * (number // all_heads)
    head = tl.cast(number % all_heads, tl.int64)
    b, h = head // heads, head % heads
    if pid < k_programs:
        k_head, to_k_head = k + b * k_b + h * k_h, to_k + b * to_k_b + h * to_k_h
        _copy(k_head, to_k_head, entry, k_row, to_k_row, k_width, BLOCK, WIDTH)
    else:
        v_head, to_v_head = v + b * v_b + h * v_h, to_v + b * to_v_b + h * to_v_h
        _copy(v_head, to_v_head, entry, v_row, to_v_row, v_width, BLOCK, WIDTH)


@triton.jit
def _copy(x, to, entry, x_stride, to_stride, width, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    from_row, to_row, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    i, column = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    live = (i < rows)[:, None] & (column < width)[None, :]
    block = tl.load(x + (from_row + i)[:, None] * x_stride + column[None, :], mask=live)
    tl.store(to + (to_row + i)[:, None] * to_stride + column[None, :], block, mask=live)
