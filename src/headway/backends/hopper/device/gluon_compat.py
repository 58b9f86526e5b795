"""The one file that knows how Gluon's names differ between Triton 3.6 and 3.9.

Gluon is experimental and its names move. Kernels import from here. What a version lacks is defined
here; a version that cannot serve was refused before, with the reason (`hopper.unavailable`).
"""

from triton.experimental import gluon as gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared as fence_async_shared,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma_wait as warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor

# Triton 3.8 renamed the TMA copies after their PTX instructions.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait

if hasattr(tma, "async_atomic_add"):
    tma_reduce_add = tma.async_atomic_add
else:
    # Triton 3.6 has the operation, but no name for it.
    from triton._C.libtriton import ir

    @builtin
    def tma_reduce_add(desc, coord, src, _semantic=None):
        """TMA reduce: add a tile of shared memory to global memory."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)


barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # of the threads of a partition


@gluon.jit
def tma_store_wait_visible():
    """Wait until this thread's TMA stores are visible in global memory: they may be read back, and
    another CTA may be signalled. (`tma_store_wait` waits only until they have left shared memory.)
    The fence names global memory: for a fence of shared memory as well, ptxas emits one that waits
    for the whole GPU."""
    inline_ptx("cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, $1;")


@gluon.jit
def fence_global():
    """Order what this thread, or TMA on its behalf, does to global memory from here on after
    everything that it has observed."""
    inline_ptx("fence.acq_rel.gpu; fence.proxy.async.global; mov.u32 $0, $1;")


@gluon.jit
def inline_ptx(ASM: gl.constexpr, n=0, condition=1):
    """PTX that has no name in Gluon, executed by every thread. `$1` is n and `$2` the condition,
    both uniform. The text has to end by moving `$1` to `$0`; nobody reads that result."""
    operands = [gl.to_tensor(n), gl.to_tensor(condition).to(gl.int32)]
    gl.inline_asm_elementwise(ASM, "=r,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@builtin
def reinterpret(smem, dtype, shape, layout, _semantic=None):
    """The same bytes of shared memory as another matrix (a method that was renamed)."""
    dtype, shape, layout = (_unwrap_if_constexpr(x) for x in (dtype, shape, layout))
    shape = [_unwrap_if_constexpr(n) for n in shape]
    return _semantic.memdesc_reinterpret(smem, dtype, shape, layout)
