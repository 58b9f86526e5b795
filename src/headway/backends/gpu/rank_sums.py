"""Sums of key gradients of several ranks, in one kernel and one order: 100 us, where fills, adds
and casts took 280 (docs/lab/ranks.md)."""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

import triton

from .runtime.launcher import KernelLauncher

_BLOCK = 32  # rows of a program


def write_sums(comm: Any, parts: Sequence[Tensor], received: Tensor, to: Sequence[Tensor]) -> None:
    """Write the sums of this rank's contributions and of the received ones, rank after rank, to
    `to`, (b, h, tokens, width) of any dtype. Every sum is rounded once; it is 0 without any.

    - `comm`: the `CommPlan` of the exchange.
    - `parts`: this rank's contributions to all rows that it has read.
    - `received`: a message (`comm_plan.empty_message`).
    """
    parts = [part.contiguous() for part in parts]
    for n, (part, total) in enumerate(zip(parts, to, strict=True)):
        if not total.numel():
            continue
        shapes = tuple([tuple(part.shape) for part in parts])
        key = "sums", n, shapes, total.stride(), total.dtype, part.dtype
        launcher = comm.launch_cache.get(key)
        if launcher is None:
            launcher = comm.launch_cache[key] = _launcher(comm, parts, n, total)
        kernel, table = launcher
        kernel((part, received if received.numel() else part, total, table))


def _launcher(
    comm: Any, parts: Sequence[Tensor], n: int, total: Tensor
) -> tuple[KernelLauncher, Tensor]:
    """Return the kernel for part n, and its table: for each contribution the first row here, the
    number of rows, the offset of the first one, and the stride of heads."""
    b, h, rows, width = parts[n].shape
    entries = [(s.holder_start, s.size, s.reader_start * width, rows * width) for s in comm.local]
    begin = 0
    for s in comm.outgoing:
        for m, x in enumerate(parts):
            if m == n:
                entries.append((s.holder_start, s.size, begin, s.size * width))
            begin += b * x.shape[1] * s.size * x.shape[3]
    table = torch.tensor(entries, dtype=torch.int64, device=total.device).reshape(-1, 4)
    sizes = len(comm.local), len(entries), h, total.shape[2], width, *total.stride()[:3]
    programs = b * h * -(-total.shape[2] // _BLOCK)
    options = {"BLOCK": _BLOCK, "WIDTH": triton.next_power_of_2(width)}
    arrange = lambda tensors, *_: (*tensors, *sizes)
    return KernelLauncher(sum_kernel, total.device, options, programs, arrange), table


@triton.jit
def sum_kernel(
    local, received, out, table, local_count, count, heads, tokens, width, stride_b, stride_h,
    stride_row,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum BLOCK rows of one head."""
    blocks = tl.cdiv(tokens, BLOCK)
    head = tl.cast(tl.program_id(0) // blocks, tl.int64)
    first = tl.program_id(0) % blocks * BLOCK
    i = first + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    total = tl.zeros([BLOCK, WIDTH], local.dtype.element_ty)
    for n in range(local_count):
        total += _rows(local, table + 4 * n, head, first, i, column, width)
    for n in range(local_count, count):
        total += _rows(received, table + 4 * n, head, first, i, column, width)
    at = out + head // heads * stride_b + head % heads * stride_h
    at += tl.cast(i, tl.int64)[:, None] * stride_row + column[None, :]
    live = (i < tokens)[:, None] & (column < width)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _rows(x, entry, head, first, i, column, width):
    """Return the rows of one contribution, 0 where it has none."""
    start, size = tl.load(entry), tl.load(entry + 1)
    at = x + tl.load(entry + 2) + head * tl.load(entry + 3)
    row = i - start
    live = (row >= 0) & (row < size)
    return tl.load(
        at + row[:, None] * width + column[None, :],
        mask=live[:, None] & (column < width)[None, :], other=0.0,
    )  # fmt: skip
