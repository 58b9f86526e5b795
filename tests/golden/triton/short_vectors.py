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
    # nearest = TABLE.mT[:3, h].amax()
    v0 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(0, t0_size1) * t0_stride1)
    v1 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(1, t0_size1) * t0_stride1)
    v2 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(2, t0_size1) * t0_stride1)
    v3 = tl.maximum(v0, v1, propagate_nan=tl.PropagateNan.ALL)
    v4 = tl.maximum(v3, v2, propagate_nan=tl.PropagateNan.ALL)
    v13 = v4
    v15 = v13
    v17 = v15
    v19 = v17
    # return s + nearest + torch.stack([s, TABLE[h, q_idx % 9]]).sum()
    v20 = score + v19
    v21 = maths.mod(q_idx, 9)
    v22 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(v21, t0_size1) * t0_stride1)
    v23 = score + v22
    v24 = v20 + v23
    return tl.broadcast_to(v24, score.shape)


@triton.jit
def derivative(score, b, h, q_idx, kv_idx, captured):
    t0 = captured[0][0]
    t0_size0 = captured[0][1]
    t0_stride0 = captured[0][2]
    t0_size1 = captured[0][3]
    t0_stride1 = captured[0][4]
    # nearest = TABLE.mT[:3, h].amax()
    v0 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(0, t0_size1) * t0_stride1)
    v1 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(1, t0_size1) * t0_stride1)
    v2 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(2, t0_size1) * t0_stride1)
    v3 = tl.maximum(v0, v1, propagate_nan=tl.PropagateNan.ALL)
    v4 = tl.maximum(v3, v2, propagate_nan=tl.PropagateNan.ALL)
    v5 = v0 == v4
    v6 = tl.cast(v5, tl.float32)
    v7 = v1 == v4
    v8 = tl.cast(v7, tl.float32)
    v9 = v2 == v4
    v10 = tl.cast(v9, tl.float32)
    v11 = v6 + v8
    v12 = v11 + v10
    v13 = v6 * (1 / v12)
    v14 = v8 * (1 / v12)
    v15 = v10 * (1 / v12)
    v16 = score + v4
    v17 = maths.mod(q_idx, 9)
    # return s + nearest + torch.stack([s, TABLE[h, q_idx % 9]]).sum()
    v18 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(v17, t0_size1) * t0_stride1)
    v19 = score + v18
    v20 = v16 + v19
    return (tl.broadcast_to(v20, score.shape), tl.where(score == score, 2.0, 2.0), tl.where(score == score, v13, v13), tl.where(score == score, v14, v14), tl.where(score == score, v15, v15), tl.where(score == score, 1.0, 1.0))


@triton.jit
def offset0(score, b, h, q_idx, kv_idx, captured):
    t0_size0 = captured[0][1]
    t0_size1 = captured[0][3]
    return (maths.clamp_index(h, t0_size0)) * t0_size1 + maths.clamp_index(0, t0_size1)


@triton.jit
def offset1(score, b, h, q_idx, kv_idx, captured):
    t0_size0 = captured[0][1]
    t0_size1 = captured[0][3]
    return (maths.clamp_index(h, t0_size0)) * t0_size1 + maths.clamp_index(1, t0_size1)


@triton.jit
def offset2(score, b, h, q_idx, kv_idx, captured):
    t0_size0 = captured[0][1]
    t0_size1 = captured[0][3]
    return (maths.clamp_index(h, t0_size0)) * t0_size1 + maths.clamp_index(2, t0_size1)


@triton.jit
def offset3(score, b, h, q_idx, kv_idx, captured):
    t0_size0 = captured[0][1]
    t0_size1 = captured[0][3]
    # return s + nearest + torch.stack([s, TABLE[h, q_idx % 9]]).sum()
    v0 = maths.mod(q_idx, 9)
    return (maths.clamp_index(h, t0_size0)) * t0_size1 + maths.clamp_index(v0, t0_size1)


@triton.jit
def scatter(grads, values, score, b, h, q_idx, kv_idx, captured):
    # nearest = TABLE.mT[:3, h].amax()
    gradients.add_one(grads[0], values[0], offset0, b, h, q_idx, kv_idx, captured, score)
    # nearest = TABLE.mT[:3, h].amax()
    gradients.add_one(grads[1], values[1], offset1, b, h, q_idx, kv_idx, captured, score)
    # nearest = TABLE.mT[:3, h].amax()
    gradients.add_one(grads[2], values[2], offset2, b, h, q_idx, kv_idx, captured, score)
    # return s + nearest + torch.stack([s, TABLE[h, q_idx % 9]]).sum()
    gradients.add_rows(grads[3], values[3], offset3, b, h, q_idx, kv_idx, captured, score)


@triton.jit
def mask(b, h, q_idx, kv_idx, captured):
    t0 = captured[0][0]
    t0_size0 = captured[0][1]
    t0_stride0 = captured[0][2]
    t0_size1 = captured[0][3]
    t0_stride1 = captured[0][4]
    # return (CHOSEN[q_idx // 64] == (kv_idx // 64).unsqueeze(-1)).any(-1)
    v0 = maths.floordiv(q_idx, 64)
    v1 = maths.floordiv(kv_idx, 64)
    v2 = tl.load(t0 + maths.clamp_index(v0, t0_size0) * t0_stride0 + maths.clamp_index(0, t0_size1) * t0_stride1)
    v3 = v2 == v1
    v4 = tl.load(t0 + maths.clamp_index(v0, t0_size0) * t0_stride0 + maths.clamp_index(1, t0_size1) * t0_stride1)
    v5 = v4 == v1
    v6 = tl.load(t0 + maths.clamp_index(v0, t0_size0) * t0_stride0 + maths.clamp_index(2, t0_size1) * t0_stride1)
    v7 = v6 == v1
    v8 = v3 | v5
    v9 = v8 | v7
    return v9
