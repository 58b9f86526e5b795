import triton
import triton.language as tl

from headway.backends.gpu.device import diagonals, gradients, maths


@triton.jit
def score(score, b, h, q_idx, kv_idx, captured):
    t0 = captured[0][0]
    t0_size0 = captured[0][1]
    t0_stride0 = captured[0][2]
    t0_size1 = captured[0][3]
    t0_stride1 = captured[0][4]
    # distance = (q_idx - kv_idx).clamp(min=0)
    v0 = q_idx - kv_idx
    v1 = tl.maximum(v0, 0)
    # return s + TABLE[h, torch.minimum(distance // 4, torch.tensor(8))]
    v2 = maths.floordiv(v1, 4)
    v3 = tl.minimum(v2, 8)
    v4 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(v3, t0_size1) * t0_stride1)
    v5 = score + v4
    return tl.broadcast_to(v5, score.shape)


@triton.jit
def derivative(score, b, h, q_idx, kv_idx, captured):
    t0 = captured[0][0]
    t0_size0 = captured[0][1]
    t0_stride0 = captured[0][2]
    t0_size1 = captured[0][3]
    t0_stride1 = captured[0][4]
    v0 = q_idx - kv_idx
    v1 = tl.maximum(v0, 0)
    v2 = maths.floordiv(v1, 4)
    v3 = tl.minimum(v2, 8)
    # return s + TABLE[h, torch.minimum(distance // 4, torch.tensor(8))]
    v4 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(v3, t0_size1) * t0_stride1)
    v5 = score + v4
    return (tl.broadcast_to(v5, score.shape), tl.where(score == score, 1.0, 1.0), tl.where(score == score, 1.0, 1.0))


@triton.jit
def offset0(score, b, h, q_idx, kv_idx, captured):
    t0_size0 = captured[0][1]
    t0_size1 = captured[0][3]
    # distance = (q_idx - kv_idx).clamp(min=0)
    v0 = q_idx - kv_idx
    v1 = tl.maximum(v0, 0)
    # return s + TABLE[h, torch.minimum(distance // 4, torch.tensor(8))]
    v2 = maths.floordiv(v1, 4)
    v3 = tl.minimum(v2, 8)
    return (maths.clamp_index(h, t0_size0)) * t0_size1 + maths.clamp_index(v3, t0_size1)


@triton.jit
def scatter(grads, values, score, b, h, q_idx, kv_idx, captured):
    # return s + TABLE[h, torch.minimum(distance // 4, torch.tensor(8))]
    gradients.add_diagonals(grads[0], values[0], offset0, b, h, q_idx, kv_idx, captured, score)


@triton.jit
def mask(b, h, q_idx, kv_idx, captured):
    t0 = captured[0][0]
    t0_size0 = captured[0][1]
    t0_stride0 = captured[0][2]
    t0_size1 = captured[0][3]
    t0_stride1 = captured[0][4]
    n0 = tl.cast(captured[1][0], tl.int32)
    # return kv_idx <= q_idx + self.offset
    v0 = q_idx + n0
    v1 = kv_idx <= v0
    # mine = ids[b, q_idx] if ids.dim() == 2 else ids[q_idx]
    v2 = tl.load(t0 + maths.clamp_index(b, t0_size0) * t0_stride0 + maths.clamp_index(q_idx, t0_size1) * t0_stride1)
    # theirs = kv_ids[b, kv_idx] if kv_ids.dim() == 2 else kv_ids[kv_idx]
    v3 = tl.load(t0 + maths.clamp_index(b, t0_size0) * t0_stride0 + maths.clamp_index(kv_idx, t0_size1) * t0_stride1)
    # return mine == theirs
    v4 = v2 == v3
    v5 = v1 & v4
    return v5
