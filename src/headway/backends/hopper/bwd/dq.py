"""dQ in bwd/kernel.py, up to shared memory: tiles of 64 queries and 64 columns, or 32, which the
consumers compute and store for the dQ reduce warps (bwd/dq_reduce.py)."""

from ..device.gluon_compat import gl, gluon, reinterpret, warpgroup_mma
from ..device.mma import ROWS, acc_layout, matrix_layout
from ..device.pipeline import mbarrier_ring, producer_acquire
from .common import CHUNK, to_accum_order

HALF_CHUNK = gl.constexpr(32)  # columns


@gluon.jit
def dq_buffers(dq_accum):
    """Allocate shared memory for the pieces of both consumers' dQ tiles.

    - `dq_accum`: descriptors.
    """
    if len(dq_accum) == 1:
        return (_dq_buffer(dq_accum[0]),)
    else:
        return (_dq_buffer(dq_accum[0]), _dq_buffer(dq_accum[1]))


@gluon.jit
def _dq_buffer(desc):
    shape: gl.constexpr = [2, desc.block_shape[0], desc.block_shape[1]]
    return gl.allocate_shared_memory(gl.float32, shape, desc.layout)


@gluon.jit
def dq_rings(dq_accum):
    """Make a pipeline for each piece, from one consumer to its reduce warp."""
    if len(dq_accum) == 1:
        return (mbarrier_ring(1, 1, 1),)
    else:
        return (mbarrier_ring(1, 1, 1), mbarrier_ring(1, 1, 1))


@gluon.jit
def zero_dq(dq_smem):
    """Return the last piece of dQ before the first block: zeros."""
    WIDTH: gl.constexpr = dq_smem[len(dq_smem) - 1].shape[1] * 4
    return gl.full([ROWS, WIDTH], 0.0, gl.float32, layout=acc_layout(WIDTH))


@gluon.jit
def issue_dq(ds_smem, stage, k_smem, zero, W: gl.constexpr):
    """Issue consumer W's tile of dQ = dS k, over all keys of the work tile. Of 128 queries it is 64
    of the queries. Of 64 queries it is half of the first 128 columns, or of all 64.

    - `stage`: of dS, of both consumers, one after the other; `zero`: from `opaque_zero`.
    """
    k = k_smem[0]
    acc = gl.full([ROWS, CHUNK], 0.0, gl.float32, layout=acc_layout(CHUNK))
    ds = stage * 2
    if ds_smem.shape[2] == 128:
        strips = reinterpret(
            ds_smem, k.dtype, [2 * ds_smem.shape[0], ROWS, CHUNK], matrix_layout(k.layout)
        )
        ds = 2 * ds + W
        return _issue_ds_k(
            strips.index(ds), strips.index(ds + 2), k.index(zero), k.index(zero + 1), acc
        )
    elif k.shape[2] == CHUNK:
        return issue_dq_strip(ds_smem, stage, k, zero, W)
    else:
        halves = reinterpret(k, k.dtype, [4, ROWS, CHUNK], matrix_layout(k.layout))
        k0, k1 = halves.index(zero + W), halves.index(zero + 2 + W)
        return _issue_ds_k(ds_smem.index(ds), ds_smem.index(ds + 1), k0, k1, acc)


@gluon.jit
def issue_dq_strip(ds_smem, stage, k, zero, W: gl.constexpr):
    """Issue consumer W's half of 64 columns of dQ."""
    start: gl.constexpr = HALF_CHUNK * W
    acc = gl.full([ROWS, HALF_CHUNK], 0.0, gl.float32, layout=acc_layout(HALF_CHUNK))
    ds = stage * 2
    k0 = k.index(zero).slice(start, HALF_CHUNK, dim=1)
    k1 = k.index(zero + 1).slice(start, HALF_CHUNK, dim=1)
    return _issue_ds_k(ds_smem.index(ds), ds_smem.index(ds + 1), k0, k1, acc)


@gluon.jit
def _issue_ds_k(ds0, ds1, k0, k1, acc):
    """Issue dS k over the keys of both consumers. dS is stored transposed, keys by queries."""
    dq = warpgroup_mma(ds0.permute((1, 0)), k0, acc, use_acc=False, is_async=True)
    return warpgroup_mma(ds1.permute((1, 0)), k1, dq, is_async=True)


@gluon.jit
def store_dq(dq, dq_smem, ring, dq_at):
    """Store dQ for the reduce warp, by 16-byte stores without bank conflicts."""
    producer_acquire(ring, dq_at)
    dq_smem.store(to_accum_order(dq))
