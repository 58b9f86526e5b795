"""What a backward needs of every row of out and its gradient."""

import torch
import triton.language as tl
from torch import Tensor

import triton

from .plan import Direct, remembered

_BLOCK = 32  # rows of a program
_LOG2E = tl.constexpr(1.4426950408889634)


def deltas(out: Tensor, dout: Tensor, dlse: Tensor | None, rows: int) -> Tensor:
    """delta = rowsum(dout∘out) − dlse in float32, in one pass over both.

    - `rows`: of a head in the result; those past the end of out are 0.

    **Returns:** (b, hq, rows).
    """
    delta = torch.empty(*out.shape[:2], rows, dtype=torch.float32, device=out.device)
    _run(out, dout, dlse, delta, None, None, None)
    return delta


def row_terms(
    out: Tensor, dout: Tensor, dlse: Tensor | None, lse: Tensor, rows: int, columns: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """In the same pass: delta, lse in units of log 2, and zeros.

    Rows past the end have lse = inf, so that their P is 0; and so has a query that sees nothing,
    whose lse is -inf.

    - `columns`: a multiple of 64.

    **Returns:** (b, hq, rows) twice, and (b, hq, rows, columns) or None, all float32.
    """
    b, heads = out.shape[:2]
    new = lambda *shape: torch.empty(b, heads, rows, *shape, dtype=torch.float32, device=out.device)
    delta, lse2, nothing = new(), new(), new(columns) if columns else None
    _run(out, dout, dlse, delta, lse, lse2, nothing)
    return delta, lse2, nothing


def _run(
    out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor, lse: Tensor | None,
    lse2: Tensor | None, nothing: Tensor | None,
) -> None:  # fmt: skip
    if not delta.numel():
        return
    columns = 0 if nothing is None else nothing.shape[3]
    (b, heads, q_len, width), strides, rows = out.shape, dout.stride(), delta.shape[2]
    key = (_run, out.shape, out.dtype, dout.dtype, strides, out.device, rows, columns,
           dlse is None, lse is None)  # fmt: skip
    kernel = remembered(key, lambda: _kernel(width, columns, out.device))
    if not out.is_contiguous():
        out = out.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    if lse is not None:
        lse = lse.contiguous()
    grid = -(-rows // _BLOCK), b * heads, 1
    sizes = strides, heads, q_len, rows, width
    kernel(grid, (out, dout, dlse, delta, lse, lse2, nothing, *sizes), (out, dout, dlse, lse))


def _kernel(width: int, columns: int, device: torch.device) -> Direct:
    size = triton.next_power_of_2
    options = {"BLOCK": _BLOCK, "WIDTH": size(max(width, 1)), "COLUMNS": columns}  # type: ignore[arg-type]
    return Direct(row_kernel, device, options)


@triton.jit(do_not_specialize=["heads", "q_len", "rows"])
def row_kernel(
    out, dout, dlse, delta, lse, lse2, nothing, strides, heads, q_len, rows, width,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
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
    to = head * rows + i
    tl.store(delta + to, total, mask=i < rows)
    if lse is not None:
        l = tl.load(lse + at, mask=live, other=float("inf"))
        l = tl.where(l == float("-inf"), float("inf"), l) * _LOG2E
        tl.store(lse2 + to, l, mask=i < rows)
    if nothing is not None:
        strip = nothing + to[:, None] * COLUMNS + tl.arange(0, 64)[None, :]
        for n in tl.static_range(COLUMNS // 64):
            tl.store(strip + n * 64, tl.zeros([BLOCK, 64], tl.float32), mask=(i < rows)[:, None])
