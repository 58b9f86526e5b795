"""The backward's preprocess: delta and lse over log 2 of every row, and memory for dq."""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

import triton

from . import precision
from .runtime.launcher import KernelLauncher

_BLOCK = 32  # rows of a program
_ALIGNMENT = 32  # numbers; each part of the workspace begins at a multiple of 128 bytes
_LOG2E, _MAX_LSE = tl.constexpr(precision.LOG2E), tl.constexpr(precision.MAX_LSE)


class BackwardWorkspace:
    """The layout of a float32 buffer for the backwards of one kind of call: delta, then lse over
    log 2, then an accumulator of dq.

    The accumulator is zero. With counters it is uninitialised, and one int32 counter per head and
    one more follow, which are 0.

    Rows past the end of out have delta = 0 and lse = inf, so that their P is 0. The same holds for
    queries without any key, whose lse is -inf, and for those whose |lse| is too large (`in_log2`).

    - `shape`: the shape of out.
    - `rows`: the rows of a head in the buffer.
    - `columns`: those of the accumulator (b, hq, rows, columns), a multiple of 64; 0: no
      accumulator.
    - `counted`: True for counters, and no zeros.
    - `negative`: True to store -delta, which the product dP can be initialised with.
    """

    def __init__(
        self, shape: Sequence[int], rows: int, columns: int, device: torch.device,
        counted: bool = False, negative: bool = False,
    ) -> None:  # fmt: skip
        (self.b, self.heads, self.q_len, self.width), self.rows = shape, rows
        self.columns, self.device, self.negative = columns, device, negative
        self.term_size = -(-self.b * self.heads * rows // _ALIGNMENT) * _ALIGNMENT
        self.counters = self.b * self.heads + 1 if counted else 0
        self.size = 2 * self.term_size + self.b * self.heads * rows * columns + self.counters
        self.kernels: dict[tuple, KernelLauncher] = {}

    def split(self, workspace: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return delta and lse2, (b, hq, rows); the accumulator (b, hq, rows, columns), or None;
        the int32 counters (b hq + 1,), or None."""
        shape, term_size = (self.b, self.heads, self.rows), self.term_size
        count = self.b * self.heads * self.rows
        delta, lse2 = (workspace[start : start + count].view(shape) for start in (0, term_size))
        dq, counters = workspace[2 * term_size :].split((count * self.columns, self.counters))
        return (
            delta, lse2, dq.view(*shape, self.columns) if self.columns else None,
            counters.view(torch.int32) if self.counters else None,
        )  # fmt: skip

    def arrange(self, tensors: Sequence[Any], *_: object) -> tuple:
        """Return the arguments of `preprocess_kernel`."""
        out, dout, dlse, workspace, lse = tensors
        delta, lse2, zeros, counters = self.split(workspace)
        zeros = None if counters is not None else zeros
        lse2 = None if lse is None else lse2
        sizes = self.heads, self.q_len, self.rows, self.width
        return out, dout, dlse, delta, lse, lse2, zeros, counters, dout.stride(), *sizes

    def kernel(self) -> KernelLauncher:
        """Return the launcher for tensors of the same dtypes and strides, None in the same
        places."""
        width = triton.next_power_of_2(max(self.width, 1))
        options = {
            "BLOCK": _BLOCK, "WIDTH": width, "COLUMNS": self.columns, "NEGATIVE": self.negative,
            # Fused, a product with a float32 out is rounded in one lane of a sum and not in its
            # neighbour: the two would write sums that differ in the last bit to one place.
            "enable_fp_fusion": False,
        }  # fmt: skip
        programs = self.b * self.heads * -(-self.rows // _BLOCK)
        return KernelLauncher(preprocess_kernel, self.device, options, programs, self.arrange)


def run_preprocess(
    workspace: BackwardWorkspace, out: Tensor, dout: Tensor, dlse: Tensor | None, lse: Tensor | None
) -> Tensor:
    """Fill a workspace in one pass over out and dout. `lse` None: lse2 stays uninitialised.

    **Returns:** the buffer.
    """
    buffer = torch.empty(workspace.size, dtype=torch.float32, device=workspace.device)
    if not workspace.term_size:
        return buffer
    key = out.dtype, dout.dtype, dout.stride(), dlse is None, lse is None
    kernel = workspace.kernels.get(key)
    if kernel is None:
        kernel = workspace.kernels[key] = workspace.kernel()
    if dlse is not None:
        dlse = dlse.contiguous()
    if lse is not None:
        lse = lse.contiguous()
    kernel((out.contiguous(), dout, dlse, buffer, lse))
    return buffer


def deltas(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """Return delta = rowsum(dout∘out) − dlse in float32, (b, hq, q_len), in one pass over both."""
    workspace = BackwardWorkspace(out.shape, out.shape[2], 0, out.device)
    return workspace.split(run_preprocess(workspace, out, dout, dlse, None))[0]


@triton.jit(do_not_specialize=["heads", "q_len", "rows"])
def preprocess_kernel(
    out, dout, dlse, delta, lse, lse2, zeros, counters, strides, heads, q_len, rows, width,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Preprocess BLOCK rows of one head. `strides` are those of dout."""
    blocks = tl.cdiv(rows, BLOCK)
    head = tl.cast(tl.program_id(0) // blocks, tl.int64)
    block = tl.program_id(0) % blocks
    i = block * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    live = i < q_len
    inside = live[:, None] & (column < width)[None, :]
    out_row = head * q_len + i
    out_tile = tl.load(out + out_row[:, None] * width + column[None, :], mask=inside, other=0.0)
    dout += head // heads * strides[0] + head % heads * strides[1]
    dout_at = tl.cast(i, tl.int64)[:, None] * strides[2] + column[None, :] * strides[3]
    dout_tile = tl.load(dout + dout_at, mask=inside, other=0.0)
    total = sums(out_tile, dout_tile)
    if dlse is not None:
        total -= tl.load(dlse + out_row, mask=live, other=0.0)
    row = head * rows + i
    tl.store(delta + row, -total if NEGATIVE else total, mask=i < rows)
    if lse is not None:
        lse_rows = tl.load(lse + out_row, mask=live, other=float("inf"))
        tl.store(lse2 + row, in_log2(lse_rows), mask=i < rows)
    if zeros is not None:
        strip = zeros + row[:, None] * COLUMNS + tl.arange(0, 64)[None, :]
        for n in tl.static_range(COLUMNS // 64):
            tl.store(strip + n * 64, tl.zeros([BLOCK, 64], tl.float32), mask=(i < rows)[:, None])
    if counters is not None:
        tl.store(counters + head, 0, mask=block == 0)
        tl.store(counters + tl.num_programs(0) // blocks, 0, mask=tl.program_id(0) == 0)


@triton.jit
def sums(out, dout):
    """Return rowsum(out∘dout) of two tiles, in float32."""
    return tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)


@triton.jit
def in_log2(lse):
    """Return lse over log 2. It is inf, so P = 0, for a query without any key, and for one whose P
    is lost to rounding: T log2(e) minus a rounded lse of -1e9 would be off by 2^64."""
    return tl.where(tl.abs(lse) > _MAX_LSE, float("inf"), lse) * _LOG2E
