import triton
import triton.language as tl

from headway.backends.gpu.device import diagonals, gradients, maths


@triton.jit
def mask(b, h, q_idx, kv_idx, captured):
    t0 = captured[0][0]
    t0_size0 = captured[0][1]
    t0_stride0 = captured[0][2]
    t0_size1 = captured[0][3]
    t0_stride1 = captured[0][4]
    t1 = captured[0][5]
    t1_size0 = captured[0][6]
    t1_stride0 = captured[0][7]
    n0 = tl.cast(captured[1][0], tl.int32)
    n1 = tl.cast(captured[1][1], tl.int32)
    # return kv_idx <= q_idx + self.offset
    v0 = q_idx + n0
    v1 = kv_idx <= v0
    # distance = q_idx - kv_idx
    v2 = q_idx - kv_idx
    # return (distance < self.window) & (distance > -self.window)
    v3 = v2 < n1
    v4 = -n1
    v5 = v2 > v4
    v6 = v3 & v5
    v7 = v1 & v6
    # mine = ids[b, q_idx] if ids.dim() == 2 else ids[q_idx]
    v8 = tl.load(t0 + maths.clamp_index(b, t0_size0) * t0_stride0 + maths.clamp_index(q_idx, t0_size1) * t0_stride1)
    # theirs = kv_ids[b, kv_idx] if kv_ids.dim() == 2 else kv_ids[kv_idx]
    v9 = tl.load(t0 + maths.clamp_index(b, t0_size0) * t0_stride0 + maths.clamp_index(kv_idx, t0_size1) * t0_stride1)
    # return mine == theirs
    v10 = v8 == v9
    v11 = v7 & v10
    # return kv_idx < (length[b] if per_batch else length)
    v12 = tl.load(t1 + maths.clamp_index(b, t1_size0) * t1_stride0)
    v13 = kv_idx < v12
    v14 = v11 | v13
    return v14


@triton.jit
def shared(b, h, captured):
    t1 = captured[0][5]
    t1_size0 = captured[0][6]
    t1_stride0 = captured[0][7]
    # return kv_idx < (length[b] if per_batch else length)
    v12 = tl.load(t1 + maths.clamp_index(b, t1_size0) * t1_stride0)
    return (v12,)


@triton.jit
def of_q(b, h, q_idx, shared, captured):
    t0 = captured[0][0]
    t0_size0 = captured[0][1]
    t0_stride0 = captured[0][2]
    t0_size1 = captured[0][3]
    t0_stride1 = captured[0][4]
    # mine = ids[b, q_idx] if ids.dim() == 2 else ids[q_idx]
    v8 = tl.load(t0 + maths.clamp_index(b, t0_size0) * t0_stride0 + maths.clamp_index(q_idx, t0_size1) * t0_stride1)
    return (v8,)


@triton.jit
def of_kv(b, h, kv_idx, shared, captured):
    t0 = captured[0][0]
    t0_size0 = captured[0][1]
    t0_stride0 = captured[0][2]
    t0_size1 = captured[0][3]
    t0_stride1 = captured[0][4]
    # theirs = kv_ids[b, kv_idx] if kv_ids.dim() == 2 else kv_ids[kv_idx]
    v9 = tl.load(t0 + maths.clamp_index(b, t0_size0) * t0_stride0 + maths.clamp_index(kv_idx, t0_size1) * t0_stride1)
    return (v9,)


@triton.jit
def steps(b, h, q_idx, kv_idx, QUERIES: tl.constexpr, shared, captured):
    n0 = tl.cast(captured[1][0], tl.int32)
    n1 = tl.cast(captured[1][1], tl.int32)
    # return kv_idx <= q_idx + self.offset
    v0 = q_idx + n0
    # distance = q_idx - kv_idx
    v2 = q_idx - kv_idx
    # return (distance < self.window) & (distance > -self.window)
    v4 = -n1
    # return kv_idx < (length[b] if per_batch else length)
    v12 = shared[0]
    return (tl.maximum(kv_idx - v0, v4 - v2 + 1), 1 if QUERIES else -1, v2 - n1 + 1, -1 if QUERIES else 1, kv_idx - maths.clamp_small(v12) + 1, 1 if QUERIES else 0)


@triton.jit
def pairs(b, h, q_idx, kv_idx, shared, of_q, of_kv, steps, captured):
    # return kv_idx <= q_idx + self.offset
    v1 = steps[0]
    # return (distance < self.window) & (distance > -self.window)
    v3 = steps[1]
    v5 = steps[0]
    v6 = v3 & v5
    v7 = v1 & v6
    # mine = ids[b, q_idx] if ids.dim() == 2 else ids[q_idx]
    v8 = of_q[0]
    # theirs = kv_ids[b, kv_idx] if kv_ids.dim() == 2 else kv_ids[kv_idx]
    v9 = of_kv[0]
    # return mine == theirs
    v10 = v8 == v9
    v11 = v7 & v10
    # return kv_idx < (length[b] if per_batch else length)
    v13 = steps[2]
    v14 = v11 | v13
    return v14
