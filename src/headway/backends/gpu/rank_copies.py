"""Copies of rows on one card, all in one kernel: the host launches once, and the card does not wait
between small ones."""

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
    spans: Sequence[tuple[int, int, int]], known: dict[Any, Any], parts: Sequence[Tensor],
    to: Sequence[Tensor],
) -> bool:  # fmt: skip
    """Rows of `parts`, one or two of (b, h, tokens, width), become rows of `to`, of the same dtype.
    False where it is not for them: rows that are wider than keys are, whose numbers are not next to
    each other, or of integers.

    - `spans`: first row, first row in `to`, and number of rows, of each copy.
    - `known`: what was worked out before, for these spans.
    """
    x, w, y, z = parts[0], parts[-1], to[0], to[-1]
    key = x.shape, w.shape, x.stride(), w.stride(), y.stride(), z.stride(), x.dtype
    found = known.get(key)
    if found is None:
        found = known[key] = _launcher(spans, len(parts), x, w, y, z)
    if isinstance(found, bool):
        return found
    kernel, table = found
    kernel((x, w, y, z, table))
    return True


def _launcher(
    spans: Sequence[tuple[int, int, int]], count: int, x: Tensor, w: Tensor, y: Tensor, z: Tensor
) -> tuple[KernelLauncher, Tensor] | bool:
    """The kernel and its table: of every block of rows the first row, the first row in `to`, and
    their number. What to return instead where there is none."""
    wide = max(x.shape[3], w.shape[3]) > _WIDEST
    if wide or not x.is_floating_point() or any(t.stride(3) != 1 for t in (x, w, y, z)):
        return False
    table = [
        (first + n, there + n, min(_BLOCK, size - n))
        for first, there, size in spans
        for n in range(0, size, _BLOCK)
    ]
    b, h = x.shape[:2]
    if not table or not b * h * max(x.shape[3], w.shape[3]):
        return True
    found = torch.tensor(table, dtype=torch.int64, device=x.device)
    of_x = len(table) * b * h  # programs
    strides = [n for t in (x, w, y, z) for n in t.stride()[:3]]
    sizes = of_x, h, b * h, x.shape[3], w.shape[3], *strides
    options = {
        "BLOCK": _BLOCK, "WIDTH": triton.next_power_of_2(max(x.shape[3], w.shape[3])),
    }  # fmt: skip
    arrange = lambda tensors, *_: (*tensors, *sizes)
    return KernelLauncher(copy_kernel, x.device, options, of_x * count, arrange), found


@triton.jit(do_not_specialize=["of_x"])
def copy_kernel(
    x, w, y, z, table, of_x, heads, all_heads, x_width, w_width, x_b, x_h, x_row, w_b, w_h, w_row,
    y_b, y_h, y_row, z_b, z_h, z_row, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A block of rows of one head: of x to y in the first `of_x` programs, or of w to z."""
    pid = tl.program_id(0)
    number = pid % of_x
    entry = table + 3 * (number // all_heads)
    head = tl.cast(number % all_heads, tl.int64)
    b, h = head // heads, head % heads
    if pid < of_x:
        from_x, to_y = x + b * x_b + h * x_h, y + b * y_b + h * y_h
        _copy(from_x, to_y, entry, x_row, y_row, x_width, BLOCK, WIDTH)
    else:
        from_w, to_z = w + b * w_b + h * w_h, z + b * z_b + h * z_h
        _copy(from_w, to_z, entry, w_row, z_row, w_width, BLOCK, WIDTH)


@triton.jit
def _copy(x, y, entry, x_row, y_row, width, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    first, there, size = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    i, column = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    live = (i < size)[:, None] & (column < width)[None, :]
    rows = tl.load(x + (first + i)[:, None] * x_row + column[None, :], mask=live)
    tl.store(y + (there + i)[:, None] * y_row + column[None, :], rows, mask=live)
