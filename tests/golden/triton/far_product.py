import triton
import triton.language as tl

from headway.backends.gpu.device import diagonals, gradients, maths


@triton.jit
def mask(b, h, q_idx, kv_idx, captured):
    # return (q_idx * kv_idx) % 1000 < 500
    v0 = tl.cast(q_idx, tl.int64) * kv_idx
    v1 = maths.mod(v0, 1000)
    v2 = v1 < 500
    return v2
