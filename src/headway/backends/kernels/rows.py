"""What a backward needs of every row of out and its gradient."""

import torch
import triton.language as tl
from torch import Tensor

import triton

from .device import on

_BLOCK = 32  # rows of a program


def deltas(out: Tensor, dout: Tensor, dlse: Tensor | None, rows: int) -> Tensor:
    """delta = rowsum(dout∘out) − dlse in float32, in one pass over both.

    - `rows`: of a head in the result; those past the end of out are 0.

    **Returns:** (b, hq, rows).
    """
    b, heads, q_len, width = out.shape
    delta = torch.empty(b, heads, rows, dtype=torch.float32, device=out.device)
    if delta.numel():
        with on(out.device):
            delta_kernel[(-(-rows // _BLOCK), b * heads)](
                out.contiguous(), dout, None if dlse is None else dlse.contiguous(), delta,
                dout.stride(), heads, q_len, rows, width,
                BLOCK=_BLOCK, WIDTH=triton.next_power_of_2(max(width, 1)),  # type: ignore[arg-type]
            )  # fmt: skip
    return delta


@triton.jit(do_not_specialize=["heads", "q_len", "rows"])
def delta_kernel(
    out, dout, dlse, delta, strides, heads, q_len, rows, width,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
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
    total = tl.sum(x.to(tl.float32) * dx.to(tl.float32), 1)
    if dlse is not None:
        total -= tl.load(dlse + at, mask=live, other=0.0)
    tl.store(delta + head * rows + i, total, mask=i < rows)
