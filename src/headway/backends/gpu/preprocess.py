"""The backward's preprocess: delta and lse over log 2 of every row, and the dQ accumulator."""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

import triton

from . import precision
from .runtime.launcher import KernelLauncher

_BLOCK = 32  # rows of a program
_ALIGNMENT = 32  # float32 numbers: delta, lse2 and dq_accum begin at multiples of 128 bytes
_LOG2E, _LN2 = tl.constexpr(precision.LOG2E), tl.constexpr(precision.LN2)
_MAX_LSE = tl.constexpr(precision.MAX_LSE)
_NO_P = tl.constexpr(2.0**127)  # an lse over log 2 that leaves nothing of P


class BackwardWorkspace:
    """The layout of a backward plan's float32 buffer: delta, then lse over log 2 (`lse2`), then the
    dQ accumulator, which is 0.

    With `zeroed_by_backward`, the accumulator is uninitialised: the backward kernel zeroes it. Then
    int32 counters follow, which are 0: the blocks it has zeroed of each head, and those taken.

    Rows past the end of out have delta = 0 and lse2 = inf, so that their P is 0. The same holds for
    queries without any key, whose lse is -inf, and for those whose |lse| is too large (`in_log2`).

    - `shape`: the shape of out.
    - `rows`: the rows per head in the buffer: q_len, rounded up to what the kernels read at a time.
    - `columns`: those of the accumulator (b, hq, rows, columns), a multiple of 64; 0: no
      accumulator.
    - `negative`: True to store -delta, which the product dP can be initialised with.
    - `entropy`: True for a third vector, -dentropy log 2, which log2(P) is multiplied with. It is 0
      for rows without any P, whose lse2 then is `_NO_P` and not inf: no product is a NaN.
    """

    def __init__(
        self, shape: Sequence[int], rows: int, columns: int, device: torch.device,
        zeroed_by_backward: bool = False, negative: bool = False, entropy: bool = False,
    ) -> None:  # fmt: skip
        (self.b, self.heads, self.q_len, self.width), self.rows = shape, rows
        self.columns, self.device, self.negative = columns, device, negative
        self.aligned_rows = -(-self.b * self.heads * rows // _ALIGNMENT) * _ALIGNMENT
        self.counters = self.b * self.heads + 1 if zeroed_by_backward else 0
        self.vectors = 3 if entropy else 2
        accumulator = self.b * self.heads * rows * columns
        self.size = self.vectors * self.aligned_rows + accumulator + self.counters
        self.kernels: dict[tuple, KernelLauncher] = {}

    def split(self, workspace: Tensor) -> tuple[Tensor, Tensor, *tuple[Tensor | None, ...]]:
        """Return delta and lse2, (b, hq, rows); the accumulator (b, hq, rows, columns), or None;
        the int32 counters (b hq + 1,), or None; -dentropy log 2, or None."""
        shape, rows = (self.b, self.heads, self.rows), self.b * self.heads * self.rows
        delta, lse2, *neg_dentropy = (
            workspace[n * self.aligned_rows :][:rows].view(shape) for n in range(self.vectors)
        )
        rest = workspace[self.vectors * self.aligned_rows :]
        dq_accum, counters = rest.split((rows * self.columns, self.counters))
        return (
            delta, lse2, dq_accum.view(*shape, self.columns) if self.columns else None,
            counters.view(torch.int32) if self.counters else None,
            neg_dentropy[0] if neg_dentropy else None,
        )  # fmt: skip

    def arrange(self, tensors: Sequence[Any], *_: object) -> tuple:
        """Return the arguments of `preprocess_kernel`."""
        out, dout, dlse, workspace, lse, dentropy = tensors
        delta, lse2, dq_accum, counters, neg_dentropy = self.split(workspace)
        accum_to_zero = None if counters is not None else dq_accum
        lse2 = None if lse is None else lse2
        sizes = self.heads, self.q_len, self.rows, self.width
        strides = out.stride(), dout.stride()
        return (
            out, dout, dlse, delta, lse, lse2, dentropy, neg_dentropy, accum_to_zero, counters,
            *strides, *sizes,
        )  # fmt: skip

    def kernel(self) -> KernelLauncher:
        """Return a launcher for tensors of one `key` of `run_preprocess`."""
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
    workspace: BackwardWorkspace, out: Tensor, dout: Tensor, dlse: Tensor | None,
    lse: Tensor | None, dentropy: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return a new buffer, filled in one pass over out and dout, which may have any strides. `lse`
    None: lse2 stays uninitialised."""
    buffer = torch.empty(workspace.size, dtype=torch.float32, device=workspace.device)
    if not workspace.aligned_rows:
        return buffer
    key = out.dtype, dout.dtype, out.stride(), dout.stride(), dlse is None, lse is None
    kernel = workspace.kernels.get(key)
    if kernel is None:
        kernel = workspace.kernels[key] = workspace.kernel()
    if dlse is not None:
        dlse = dlse.contiguous()
    if lse is not None:
        lse = lse.contiguous()
    if dentropy is not None:
        dentropy = dentropy.contiguous()
    kernel((out, dout, dlse, buffer, lse, dentropy))
    return buffer


def deltas(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """Return delta = rowsum(dout∘out) − dlse in float32, (b, hq, q_len), in one pass over both."""
    workspace = BackwardWorkspace(out.shape, out.shape[2], 0, out.device)
    return workspace.split(run_preprocess(workspace, out, dout, dlse, None))[0]


@triton.jit(do_not_specialize=["heads", "q_len", "rows"])
def preprocess_kernel(
    out, dout, dlse, delta, lse, lse2, dentropy, neg_dentropy, accum_to_zero, counters,
    out_strides, dout_strides, heads, q_len, rows, width,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Preprocess BLOCK rows of one head."""
    blocks = tl.cdiv(rows, BLOCK)
    head = tl.cast(tl.program_id(0) // blocks, tl.int64)
    block = tl.program_id(0) % blocks
    i = block * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    live = i < q_len
    inside = live[:, None] & (column < width)[None, :]
    lse_row = head * q_len + i
    out_tile = _load(out, out_strides, head, heads, i, column, inside)
    total = sums(out_tile, _load(dout, dout_strides, head, heads, i, column, inside))
    if dlse is not None:
        total -= tl.load(dlse + lse_row, mask=live, other=0.0)
    row = head * rows + i
    tl.store(delta + row, -total if NEGATIVE else total, mask=i < rows)
    if lse is not None:
        lse_rows = tl.load(lse + lse_row, mask=live, other=float("inf"))
        lse2 += row
        lse_rows = in_log2(lse_rows)
        if neg_dentropy is not None:
            has_p = lse_rows != float("inf")
            lse_rows = tl.where(has_p, lse_rows, _NO_P)
            of_row = tl.load(dentropy + lse_row, mask=live, other=0.0) * -_LN2
            tl.store(neg_dentropy + row, tl.where(has_p, of_row, 0.0), mask=i < rows)
        tl.store(lse2, lse_rows, mask=i < rows)
    if accum_to_zero is not None:
        first_64 = accum_to_zero + row[:, None] * COLUMNS + tl.arange(0, 64)[None, :]
        for n in tl.static_range(COLUMNS // 64):
            tl.store(first_64 + n * 64, tl.zeros([BLOCK, 64], tl.float32), mask=(i < rows)[:, None])
    if counters is not None:
        tl.store(counters + head, 0, mask=block == 0)
        tl.store(counters + tl.num_programs(0) // blocks, 0, mask=tl.program_id(0) == 0)


@triton.jit
def _load(x, strides, head, heads, i, column, inside):
    """Load rows i of a head, counted over all batch rows; zeros outside."""
    x += head // heads * strides[0] + head % heads * strides[1]
    at = tl.cast(i, tl.int64)[:, None] * strides[2] + column[None, :] * strides[3]
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def sums(out, dout):
    """Return rowsum(out∘dout) of two tiles, in float32."""
    return tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)


@triton.jit
def in_log2(lse):
    """Return lse over log 2. It is inf, so P = exp2(T log2(e) - lse2) = 0, for a query without any
    key, and where rounding leaves nothing of P: 64 at lse = -1e9, so P is off by 2^64."""
    return tl.where(tl.abs(lse) > _MAX_LSE, float("inf"), lse) * _LOG2E
