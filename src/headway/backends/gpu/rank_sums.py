"""Gradients of keys, to which several ranks contribute, added in one kernel and one order."""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

import triton

from .runtime.launcher import KernelLauncher

_BLOCK = 32  # rows of a program


def write_sums(routes: Any, parts: Sequence[Tensor], came: Tensor, to: Sequence[Tensor]) -> None:
    """`to`, (b, h, tokens, width) of any dtype, become the sums of this rank's own contributions
    and of those that came, rank after rank; 0 where there are none. Every sum is rounded once.

    - `routes`: `distributed.exchange.routes.Routes`, by which they came.
    - `parts`: this rank's contributions to all rows that it has read.
    - `came`: a message (`routes.message`).
    """
    parts = [x.contiguous() for x in parts]
    for n, (own, y) in enumerate(zip(parts, to, strict=True)):
        if not y.numel():
            continue
        shapes = tuple([tuple(x.shape) for x in parts])
        key = "sums", n, shapes, y.stride(), y.dtype, own.dtype
        launcher = routes.known.get(key)
        if launcher is None:
            launcher = routes.known[key] = _launcher(routes, parts, n, y)
        kernel, table = launcher
        kernel((own, came if came.numel() else own, y, table))


def _launcher(
    routes: Any, parts: Sequence[Tensor], n: int, y: Tensor
) -> tuple[KernelLauncher, Tensor]:
    """The kernel for part n, and its table: of each contribution the first row here, the number of
    rows, where they begin, and how far its heads are apart, in numbers."""
    b, h, rows, width = parts[n].shape
    table = [(s.at, s.size, s.to * width, rows * width) for s in routes.own]
    begin = 0
    for s in routes.outgoing:
        for m, x in enumerate(parts):
            if m == n:
                table.append((s.at, s.size, begin, s.size * width))
            begin += b * x.shape[1] * s.size * x.shape[3]
    found = torch.tensor(table, dtype=torch.int64, device=y.device).reshape(-1, 4)
    sizes = len(routes.own), len(table), h, y.shape[2], width, *y.stride()[:3]
    programs = b * h * -(-y.shape[2] // _BLOCK)
    options = {"BLOCK": _BLOCK, "WIDTH": triton.next_power_of_2(width)}
    arrange = lambda tensors, *_: (*tensors, *sizes)
    return KernelLauncher(sum_kernel, y.device, options, programs, arrange), found


@triton.jit
def sum_kernel(
    own, came, out, table, own_count, count, heads, tokens, width, stride_b, stride_h, stride_row,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of one head."""
    blocks = tl.cdiv(tokens, BLOCK)
    head = tl.cast(tl.program_id(0) // blocks, tl.int64)
    first = tl.program_id(0) % blocks * BLOCK
    i = first + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    total = tl.zeros([BLOCK, WIDTH], own.dtype.element_ty)
    for n in range(own_count):
        total += _rows(own, table + 4 * n, head, first, i, column, width)
    for n in range(own_count, count):
        total += _rows(came, table + 4 * n, head, first, i, column, width)
    at = out + head // heads * stride_b + head % heads * stride_h
    at += tl.cast(i, tl.int64)[:, None] * stride_row + column[None, :]
    live = (i < tokens)[:, None] & (column < width)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _rows(x, entry, head, first, i, column, width):
    """Those of one contribution, 0 where it has none."""
    start, size = tl.load(entry), tl.load(entry + 1)
    at = x + tl.load(entry + 2) + head * tl.load(entry + 3)
    row = i - start
    live = (row >= 0) & (row < size)
    return tl.load(
        at + row[:, None] * width + column[None, :],
        mask=live[:, None] & (column < width)[None, :], other=0.0,
    )  # fmt: skip
