"""What a backward needs of every row of out and its gradient."""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

import triton

from . import precision
from .runtime.launcher import KernelLauncher

_BLOCK = 32  # rows of a program
_WHOLE = 32  # numbers: 128 bytes, at a multiple of which every term begins
_LOG2E, _MAX_LSE = tl.constexpr(precision.LOG2E), tl.constexpr(precision.MAX_LSE)


class BackwardWorkspace:
    """Where a backward of one kind has them: one buffer, of float32, with delta, lse in units of
    log 2, and memory for dq, one after the other: zeros; or anything, and counters that are 0, one
    for each head and one more.

    Rows past the end of out have delta = 0 and lse = inf, so that their P is 0; and so has a query
    that sees nothing, whose lse is -inf, and one whose lse is too far from 0 (`in_log2`).

    - `shape`: of out.
    - `rows`: of a head, in the buffer.
    - `columns`: of the memory, (b, hq, rows, columns); a multiple of 64.
    - `counted`: whether there are counters, and not zeros.
    - `negative`: delta with a minus: what the product dP may begin with.
    """

    def __init__(
        self, shape: Sequence[int], rows: int, columns: int, device: torch.device,
        counted: bool = False, negative: bool = False,
    ) -> None:  # fmt: skip
        (self.b, self.heads, self.q_len, self.width), self.rows = shape, rows
        self.columns, self.device, self.negative = columns, device, negative
        self.each = -(-self.b * self.heads * rows // _WHOLE) * _WHOLE
        self.counters = self.b * self.heads + 1 if counted else 0
        self.size = 2 * self.each + self.b * self.heads * rows * columns + self.counters
        self.kernels: dict[tuple, KernelLauncher] = {}

    def split(self, workspace: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(b, hq, rows) twice; (b, hq, rows, columns), and (b hq + 1,) of int32, or None."""
        shape, each = (self.b, self.heads, self.rows), self.each
        n = self.b * self.heads * self.rows
        delta, lse2 = (workspace[at : at + n].view(shape) for at in (0, each))
        memory, counters = workspace[2 * each :].split((n * self.columns, self.counters))
        return (
            delta, lse2, memory.view(*shape, self.columns) if self.columns else None,
            counters.view(torch.int32) if self.counters else None,
        )  # fmt: skip

    def arrange(self, tensors: Sequence[Any], *_: object) -> tuple:
        """The arguments of `row_kernel`."""
        out, dout, dlse, workspace, lse = tensors
        delta, lse2, zeros, counters = self.split(workspace)
        zeros = None if counters is not None else zeros
        lse2 = None if lse is None else lse2
        sizes = self.heads, self.q_len, self.rows, self.width
        return out, dout, dlse, delta, lse, lse2, zeros, counters, dout.stride(), *sizes

    def kernel(self) -> KernelLauncher:
        """For tensors of the same dtypes and strides, and None in the same places."""
        width = triton.next_power_of_2(max(self.width, 1))
        options = {
            "BLOCK": _BLOCK, "WIDTH": width, "COLUMNS": self.columns, "NEGATIVE": self.negative,
        }  # fmt: skip
        grid = -(-self.rows // _BLOCK), self.b * self.heads, 1
        return KernelLauncher(row_kernel, self.device, options, grid, self.arrange)


def run_preprocess(
    workspace: BackwardWorkspace, out: Tensor, dout: Tensor, dlse: Tensor | None, lse: Tensor | None
) -> Tensor:
    """All terms in one pass over out and dout; no lse and zeros where `lse` is None.

    **Returns:** the buffer.
    """
    found = torch.empty(workspace.size, dtype=torch.float32, device=workspace.device)
    if not workspace.each:
        return found
    key = out.dtype, dout.dtype, dout.stride(), dlse is None, lse is None
    kernel = workspace.kernels.get(key)
    if kernel is None:
        kernel = workspace.kernels[key] = workspace.kernel()
    if dlse is not None:
        dlse = dlse.contiguous()
    if lse is not None:
        lse = lse.contiguous()
    kernel((out.contiguous(), dout, dlse, found, lse))
    return found


def deltas(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """delta = rowsum(dout∘out) − dlse in float32, in one pass over both.

    **Returns:** (b, hq, q_len).
    """
    workspace = BackwardWorkspace(out.shape, out.shape[2], 0, out.device)
    return workspace.split(run_preprocess(workspace, out, dout, dlse, None))[0]


@triton.jit(do_not_specialize=["heads", "q_len", "rows"])
def row_kernel(
    out, dout, dlse, delta, lse, lse2, nothing, counters, strides, heads, q_len, rows, width,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of one head; the strides are those of dout."""
    head = tl.cast(tl.program_id(1), tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    live = i < q_len
    inside = live[:, None] & (column < width)[None, :]
    at = head * q_len + i
    x = tl.load(out + at[:, None] * width + column[None, :], mask=inside, other=0.0)
    dout += head // heads * strides[0] + head % heads * strides[1]
    rows_at = tl.cast(i, tl.int64)[:, None] * strides[2] + column[None, :] * strides[3]
    dx = tl.load(dout + rows_at, mask=inside, other=0.0)
    total = sums(x, dx)
    if dlse is not None:
        total -= tl.load(dlse + at, mask=live, other=0.0)
    to = head * rows + i
    tl.store(delta + to, -total if NEGATIVE else total, mask=i < rows)
    if lse is not None:
        tl.store(
            lse2 + to, in_log2(tl.load(lse + at, mask=live, other=float("inf"))), mask=i < rows
        )
    if nothing is not None:
        strip = nothing + to[:, None] * COLUMNS + tl.arange(0, 64)[None, :]
        for n in tl.static_range(COLUMNS // 64):
            tl.store(strip + n * 64, tl.zeros([BLOCK, 64], tl.float32), mask=(i < rows)[:, None])
    if counters is not None:
        first = tl.program_id(0) == 0
        tl.store(counters + head, 0, mask=first)
        tl.store(counters + tl.num_programs(1), 0, mask=first & (head == 0))


@triton.jit
def sums(x, dx):
    """rowsum(x∘dx), of two tiles, in float32."""
    return tl.sum(x.to(tl.float32) * dx.to(tl.float32), 1)


@triton.jit
def in_log2(lse):
    """lse in units of log 2; inf, and so P = 0, for a query that sees nothing, and for one of which
    P cannot be told: T log2(e) less a rounded lse of -1e9 would be off by 2^64."""
    return tl.where(tl.abs(lse) > _MAX_LSE, float("inf"), lse) * _LOG2E
