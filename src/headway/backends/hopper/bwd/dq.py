"""dq in bwd/kernel.py, as far as consumers make it: parts of 64 queries and 64 columns, or 32,
which they hand over to the adders (bwd/dq_reduce.py)."""

from ..device.gluon_compat import gl, gluon, reinterpret, warpgroup_mma
from ..device.mma import ROWS, acc_layout, matrix_layout
from ..device.pipeline import mbarrier_ring, producer_acquire
from .common import in_order


@gluon.jit
def parts(dq):
    """Shared memory for the pieces of the parts of dq of both consumers."""
    if len(dq) == 1:
        return (_part_buffer(dq[0]),)
    else:
        return (_part_buffer(dq[0]), _part_buffer(dq[1]))


@gluon.jit
def _part_buffer(desc):
    shape: gl.constexpr = [2, desc.block_shape[0], desc.block_shape[1]]
    return gl.allocate_shared_memory(gl.float32, shape, desc.layout)


@gluon.jit
def rings_of(dq):
    """A channel for each piece."""
    if len(dq) == 1:
        return (mbarrier_ring(1, 1, 1),)
    else:
        return (mbarrier_ring(1, 1, 1), mbarrier_ring(1, 1, 1))


@gluon.jit
def zeros_of(dq_smem):
    """What stands for the last piece of dq before the first block."""
    WIDTH: gl.constexpr = dq_smem[len(dq_smem) - 1].shape[1] * 4
    return gl.full([ROWS, WIDTH], 0.0, gl.float32, layout=acc_layout(WIDTH))


@gluon.jit
def part(ds_smem, a, k_smem, z, W: gl.constexpr):
    """Issue this consumer's part of dq, from all keys: of 128 queries, half of these; else half of
    the first 128 columns, or of the 64 that there are."""
    k = k_smem[0]
    nothing = gl.full([ROWS, 64], 0.0, gl.float32, layout=acc_layout(64))
    if ds_smem.shape[2] == 128:
        strips = reinterpret(
            ds_smem, k.dtype, [2 * ds_smem.shape[0], ROWS, 64], matrix_layout(k.layout)
        )
        a = 2 * a + W
        return _of_all(strips.index(a), strips.index(a + 2), k.index(z), k.index(z + 1), nothing)
    elif k.shape[2] == 64:
        return strip_of_part(ds_smem, a, k, z, W)
    else:
        halves = reinterpret(k, k.dtype, [4, ROWS, 64], matrix_layout(k.layout))
        k0, k1 = halves.index(z + W), halves.index(z + 2 + W)
        return _of_all(ds_smem.index(a), ds_smem.index(a + 1), k0, k1, nothing)


@gluon.jit
def strip_of_part(ds_smem, a, k, z, W: gl.constexpr):
    """Issue what belongs to the part of 64 columns: half of them."""
    start: gl.constexpr = 32 * W
    nothing = gl.full([ROWS, 32], 0.0, gl.float32, layout=acc_layout(32))
    k0 = k.index(z).slice(start, 32, dim=1)
    k1 = k.index(z + 1).slice(start, 32, dim=1)
    return _of_all(ds_smem.index(a), ds_smem.index(a + 1), k0, k1, nothing)


@gluon.jit
def _of_all(ds0, ds1, k0, k1, zero):
    """Issue dS k over the keys of both consumers; dS as it is stored, keys by queries."""
    dq = warpgroup_mma(ds0.permute((1, 0)), k0, zero, use_acc=False, is_async=True)
    return warpgroup_mma(ds1.permute((1, 0)), k1, dq, is_async=True)


@gluon.jit
def store_dq(acc_q, dq_smem, ring, at):
    """Store dq for the adder, by 16-byte stores that meet no conflict."""
    producer_acquire(ring, at)
    dq_smem.store(in_order(acc_q))
