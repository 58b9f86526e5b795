"""What a rank of kernel_backward.py ends with: dk and dv to global memory."""

from .gluon_api import copy_out, copy_out_wait, fence_async_shared, gl, gluon, seen_as
from .kernel_backward_parts import write
from .pipeline import acquire


@gluon.jit
def put_keys(acc_k, acc_v, at, to, inputs, place, rings, dq_at, scale, W: gl.constexpr):
    """Write them, of 64 keys of consumer W: rounded, by the copy engine, or in float32.

    - `at`: the first of these keys, the head and batch row of dk, its heads and length.
    - `place`, `rings`, `dq_at`: where parts of dq are handed over, piece by piece.
    """
    first, h, b, heads, kv_len = at
    dk, dv, wide_dk, wide_dv, d_width, dv_width = to
    k_smem, v_smem = inputs
    if dv is not None:
        v_smem.index(W).store(acc_v.to(v_smem.dtype))
        fence_async_shared()
        copy_out(dv, [b, h, first, 0], v_smem.index(W))
        # The other consumer may still multiply with these keys: dk goes where dq was.
        column = 0
        for n in gl.static_range(len(dk)):
            acquire(rings[n], dq_at)
            place_k = as_keys(place[n].index(W), k_smem[n].index(W))
            place_k.store((acc_k[n] * scale).to(v_smem.dtype))
            fence_async_shared()
            copy_out(dk[n], [b, h, first, column], place_k)
            column += k_smem[n].shape[2]
        copy_out_wait(0)
    else:
        base = (gl.cast(b, gl.int64) * heads + h) * kv_len
        column = 0
        for n in gl.static_range(len(acc_k)):
            write(acc_k[n] * scale, wide_dk + base * d_width, first, kv_len, d_width, column)
            column += k_smem[n].shape[2]
        write(acc_v, wide_dv + base * dv_width, first, kv_len, dv_width, 0)


@gluon.jit
def as_keys(place, k):
    """The place of a part of dq as what the copy engine writes to dk or dv.

    - `k`: the keys, or values, of a consumer.
    """
    return seen_as(place, k.dtype, k.shape, k.layout)
