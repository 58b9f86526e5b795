"""The epilogue of bwd/kernel.py: dK and dV of a work tile, from registers to global memory.

Rounded, they pass through the shared memory of the dQ tiles, from which a reduce warp stores them
by TMA: the keys and values of the next work tile are loaded meanwhile. dV goes first, and with it
the second piece of dK, if there is one; then dK. In float32 a consumer stores them itself, straight
from registers.
"""

from ..device.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    tma_store,
    tma_store_wait,
)
from ..device.mma import ROWS, at_stage
from ..device.pipeline import (
    advance,
    consumer_release,
    consumer_wait,
    producer_acquire,
    producer_commit,
)
from ..device.work_tile import ONE_WARP
from .common import read_key_location, store_float32


@gluon.jit
def seen_as_keys(dq_smem, k):
    """Return the shared memory of a dQ tile as what TMA stores to dK or dV.

    - `k`: the keys, or values, of a consumer.
    """
    return reinterpret(dq_smem, k.dtype, k.shape, k.layout)


# -- a consumer -----------------------------------------------------------------------------------


@gluon.jit
def store_dkdv(dk, dv, smem, rings, dq_at, rate, W: gl.constexpr):
    """Store dK and dV of consumer W's 64 keys for its reduce warp. **Returns:** the cursor.

    - `rings`: of the dQ tiles, piece by piece; all pieces have one cursor.
    """
    inputs, dq_smem = smem.inputs, smem.dq
    _acquire_all(rings, dq_at)
    seen_as_keys(dq_smem[0].index(W), inputs.v.index(W)).store(dv.to(inputs.v.dtype))
    if len(dq_smem) == 2:
        second = (dk[1] * rate).to(inputs.v.dtype)
        seen_as_keys(dq_smem[1].index(W), inputs.k[1].index(W)).store(second)
    dq_at = _commit_all(rings, dq_at)
    _acquire_all(rings, dq_at)
    first = (dk[0] * rate).to(inputs.v.dtype)
    seen_as_keys(dq_smem[0].index(W), inputs.k[0].index(W)).store(first)
    return _commit_all(rings, dq_at)


@gluon.jit
def _acquire_all(rings, dq_at):
    for n in gl.static_range(len(rings)):
        producer_acquire(rings[n], dq_at)


@gluon.jit
def _commit_all(rings, dq_at):
    """Commit all pieces, whether they hold something or not: they have one cursor."""
    fence_async_shared()
    for n in gl.static_range(len(rings)):
        producer_commit(rings[n], dq_at)
    return advance(dq_at, 1)


@gluon.jit
def store_dkdv_float32(dk, dv, grads, keys, sizes, rate, W: gl.constexpr):
    """Store dK and dV of consumer W's 64 keys to global memory, in float32.

    - `grads`: a `KeyGradOutputs`; `keys`: the work tile's `KeyLocation`.
    """
    first, h = keys.first_key + W * ROWS, keys.h // sizes.share
    heads = sizes.heads // sizes.share
    base = (gl.cast(keys.b, gl.int64) * heads + h) * sizes.kv_len
    column = 0
    for n in gl.static_range(len(dk)):
        store_float32(
            dk[n] * rate,
            grads.dk_float32 + base * grads.d_width,
            first,
            sizes.kv_len,
            grads.d_width,
            column,
        )
        column += dk[n].shape[1]
    dv_ptr = grads.dv_float32 + base * grads.dv_width
    store_float32(dv, dv_ptr, first, sizes.kv_len, grads.dv_width, 0)


# -- a reduce warp --------------------------------------------------------------------------------


@gluon.jit
def copy_dkdv_out(outputs, smem, rings, work_at, sizes, dq_at, W: gl.constexpr):
    """Have TMA store what consumer W's `store_dkdv` hands over. **Returns:** the cursor.

    - `outputs`: a `ReduceOutputs`; `work_at`: the stage of the work tile.
    """
    keys = read_key_location(smem.work, work_at, ONE_WARP)
    first, h, b = keys.first_key + W * ROWS, keys.h // sizes.share, keys.b
    inputs, dq_smem, rings = smem.inputs, at_stage(smem.dq, W), rings.dq[W]
    _wait_all(rings, dq_at)
    tma_store(outputs.dv, [b, h, first, 0], seen_as_keys(dq_smem[0], inputs.v.index(W)))
    if len(dq_smem) == 2:
        column: gl.constexpr = inputs.k[0].shape[2]
        second = seen_as_keys(dq_smem[1], inputs.k[1].index(W))
        tma_store(outputs.dk[1], [b, h, first, column], second)
    dq_at = _release_all(rings, dq_at)
    _wait_all(rings, dq_at)
    tma_store(outputs.dk[0], [b, h, first, 0], seen_as_keys(dq_smem[0], inputs.k[0].index(W)))
    return _release_all(rings, dq_at)


@gluon.jit
def _wait_all(rings, dq_at):
    for n in gl.static_range(len(rings)):
        consumer_wait(rings[n], dq_at)


@gluon.jit
def _release_all(rings, dq_at):
    tma_store_wait(0)
    for n in gl.static_range(len(rings)):
        consumer_release(rings[n], dq_at)
    return advance(dq_at, 1)
