import triton
import triton.language as tl

from headway.backends.gpu.device import diagonals, gradients, maths, special


@triton.jit
def score(score, b, h, q_idx, kv_idx, captured):
    t0 = captured[0][0]
    t0_size0 = captured[0][1]
    t0_stride0 = captured[0][2]
    t0_size1 = captured[0][3]
    t0_stride1 = captured[0][4]
    # angle = torch.atan2(s, TABLE[h, 0]) + torch.asinh(s) - torch.hypot(s, TABLE[h, 1])
    v0 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(0, t0_size1) * t0_stride1)
    v1 = special.atan2(score, v0)
    v2 = special.asinh(score)
    v3 = v1 + v2
    v4 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(1, t0_size1) * t0_stride1)
    v5 = special.hypot(score, v4)
    v6 = v3 - v5
    # return angle * torch.copysign(torch.erfc(s), q_idx - kv_idx) + torch.lgamma(s.abs() + 1)
    v7 = special.erfc(score)
    v9 = (tl.cast(q_idx, tl.float32) - tl.cast(kv_idx, tl.float32))
    v10 = special.copysign(v7, v9)
    v11 = v6 * v10
    v12 = tl.abs(score)
    v13 = v12 + 1.0
    v14 = special.lgamma(v13)
    v15 = v11 + v14
    return tl.broadcast_to(v15, score.shape)


@triton.jit
def derivative(score, b, h, q_idx, kv_idx, captured):
    t0 = captured[0][0]
    t0_size0 = captured[0][1]
    t0_stride0 = captured[0][2]
    t0_size1 = captured[0][3]
    t0_stride1 = captured[0][4]
    # angle = torch.atan2(s, TABLE[h, 0]) + torch.asinh(s) - torch.hypot(s, TABLE[h, 1])
    v0 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(0, t0_size1) * t0_stride1)
    v1 = special.atan2(score, v0)
    v2 = special.asinh(score)
    v3 = v1 + v2
    v4 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(1, t0_size1) * t0_stride1)
    v5 = special.hypot(score, v4)
    v6 = v3 - v5
    v7 = special.erfc(score)
    v9 = (tl.cast(q_idx, tl.float32) - tl.cast(kv_idx, tl.float32))
    v10 = special.copysign(v7, v9)
    v11 = v6 * v10
    v12 = tl.abs(score)
    v13 = v12 + 1.0
    v14 = special.lgamma(v13)
    v15 = v11 + v14
    v16 = special.digamma(v13)
    v17 = maths.sign(score).to(tl.float32)
    v18 = v16 * v17
    v19 = v10 / v7
    v20 = v7 == 0.0
    v21 = tl.where(v20, 0.0, v19)
    v22 = v6 * v21
    v23 = score * score
    v24 = -v23
    v25 = tl.exp(v24)
    v26 = v25 * (-1.1283791670955126)
    v27 = v26 * v22
    v28 = v18 + v27
    v29 = -v10
    v30 = v29 * v4
    v31 = v30 / v5
    v32 = v29 * score
    v33 = v32 / v5
    v34 = v28 + v33
    v35 = v23 + 1.0
    v36 = tl.rsqrt(v35)
    v37 = v10 * v36
    v38 = v34 + v37
    v39 = v0 * v0
    v40 = v23 + v39
    v41 = 1 / v40
    v42 = v40 == 0.0
    v43 = tl.where(v42, 0.0, v41)
    v44 = v10 * v0
    v45 = v44 * v43
    v46 = -score
    v47 = v10 * v46
    v48 = v47 * v43
    v49 = v38 + v45
    return (tl.broadcast_to(v15, score.shape), tl.broadcast_to(v49, score.shape), tl.broadcast_to(v48, score.shape), tl.broadcast_to(v31, score.shape))


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
def scatter(grads, values, score, b, h, q_idx, kv_idx, captured):
    # angle = torch.atan2(s, TABLE[h, 0]) + torch.asinh(s) - torch.hypot(s, TABLE[h, 1])
    gradients.add_one(grads[0], values[0], offset0, b, h, q_idx, kv_idx, captured, score)
    # angle = torch.atan2(s, TABLE[h, 0]) + torch.asinh(s) - torch.hypot(s, TABLE[h, 1])
    gradients.add_one(grads[1], values[1], offset1, b, h, q_idx, kv_idx, captured, score)


@triton.jit
def mask(b, h, q_idx, kv_idx, captured):
    n0 = tl.cast(captured[1][0], tl.int32)
    # return kv_idx <= q_idx + self.offset
    v0 = q_idx + n0
    v1 = kv_idx <= v0
    return v1
