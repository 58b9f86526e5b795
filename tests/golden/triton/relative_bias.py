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
    n0 = tl.cast(captured[1][0], tl.int32)
    # distance = (kv_idx - q_idx).clamp(-self._most, self._most)
    v0 = kv_idx - q_idx
    v1 = -n0
    v2 = tl.maximum(v0, v1)
    v3 = tl.minimum(v2, n0)
    # return score + self.table[h, distance + self._most]
    v4 = v3 + n0
    v5 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(v4, t0_size1) * t0_stride1)
    v6 = score + v5
    return tl.broadcast_to(v6, score.shape)


@triton.jit
def derivative(score, b, h, q_idx, kv_idx, captured):
    t0 = captured[0][0]
    t0_size0 = captured[0][1]
    t0_stride0 = captured[0][2]
    t0_size1 = captured[0][3]
    t0_stride1 = captured[0][4]
    n0 = tl.cast(captured[1][0], tl.int32)
    v0 = kv_idx - q_idx
    v1 = -n0
    v2 = tl.maximum(v0, v1)
    v3 = tl.minimum(v2, n0)
    v4 = v3 + n0
    # return score + self.table[h, distance + self._most]
    v5 = tl.load(t0 + maths.clamp_index(h, t0_size0) * t0_stride0 + maths.clamp_index(v4, t0_size1) * t0_stride1)
    v6 = score + v5
    return (tl.broadcast_to(v6, score.shape), tl.where(score == score, 1.0, 1.0), tl.where(score == score, 1.0, 1.0))


@triton.jit
def offset0(score, b, h, q_idx, kv_idx, captured):
    t0_size0 = captured[0][1]
    t0_size1 = captured[0][3]
    n0 = tl.cast(captured[1][0], tl.int32)
    # distance = (kv_idx - q_idx).clamp(-self._most, self._most)
    v0 = kv_idx - q_idx
    v1 = -n0
    v2 = tl.maximum(v0, v1)
    v3 = tl.minimum(v2, n0)
    # return score + self.table[h, distance + self._most]
    v4 = v3 + n0
    return (maths.clamp_index(h, t0_size0)) * t0_size1 + maths.clamp_index(v4, t0_size1)


@triton.jit
def scatter(grads, values, score, b, h, q_idx, kv_idx, captured):
    # return score + self.table[h, distance + self._most]
    gradients.add_diagonals(grads[0], values[0], offset0, b, h, q_idx, kv_idx, captured, score)


@triton.jit
def mask(b, h, q_idx, kv_idx, captured):
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
    return v7
