import triton
import triton.language as tl

from headway.backends.gpu.device import diagonals, gradients, maths


@triton.jit
def score(score, b, h, q_idx, kv_idx, captured):
    t0 = captured[0][0]
    t0_size0 = captured[0][1]
    t0_stride0 = captured[0][2]
    x0 = captured[1][0]
    # return score - self.slopes[h] * (q_idx - kv_idx).abs()
    v0 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0)
    v3 = tl.abs((tl.cast(q_idx, tl.float32) - tl.cast(kv_idx, tl.float32)))
    v4 = v0 * v3
    v5 = score - v4
    # return self.cap * torch.tanh(score / self.cap)
    v6 = v5 * (1 / x0)
    v7 = maths.tanh(v6)
    v8 = x0 * v7
    return tl.broadcast_to(v8, score.shape)


@triton.jit
def derivative(score, b, h, q_idx, kv_idx, captured):
    t0 = captured[0][0]
    t0_size0 = captured[0][1]
    t0_stride0 = captured[0][2]
    x0 = captured[1][0]
    # return score - self.slopes[h] * (q_idx - kv_idx).abs()
    v0 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0)
    v3 = tl.abs((tl.cast(q_idx, tl.float32) - tl.cast(kv_idx, tl.float32)))
    v4 = v0 * v3
    v5 = score - v4
    v6 = v5 * (1 / x0)
    v7 = maths.tanh(v6)
    v8 = x0 * v7
    v9 = v7 * v7
    v10 = 1.0 - v9
    v11 = -v10
    v12 = v11 * v3
    return (tl.broadcast_to(v8, score.shape), tl.broadcast_to(v10, score.shape), tl.broadcast_to(v12, score.shape))


@triton.jit
def offset0(score, b, h, q_idx, kv_idx, captured):
    t0_size0 = captured[0][1]
    return maths.clamp_index(h, t0_size0)


@triton.jit
def scatter(grads, values, score, b, h, q_idx, kv_idx, captured):
    # return score - self.slopes[h] * (q_idx - kv_idx).abs()
    gradients.add_one(grads[0], values[0], offset0, b, h, q_idx, kv_idx, captured, score)


@triton.jit
def mask(b, h, q_idx, kv_idx, captured):
    n0 = tl.cast(captured[1][0], tl.int32)
    # return kv_idx <= q_idx + self.offset
    v0 = q_idx + n0
    v1 = kv_idx <= v0
    return v1
