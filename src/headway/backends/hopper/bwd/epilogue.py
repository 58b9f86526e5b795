"""What a rank of bwd/kernel.py ends with: dk and dv to global memory.

Rounded, they leave through the places of parts of dq, from which an adder has the copy engine write
them: the next rank's keys and values are copied meanwhile. First dv goes, and with it what second
piece dk has, then dk. In float32 a consumer writes them itself, straight from registers.
"""

from ..device.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    tma_store,
    tma_store_wait,
)
from ..device.pipeline import (
    advance,
    consumer_release,
    consumer_wait,
    producer_acquire,
    producer_commit,
)
from .common import write


@gluon.jit
def as_keys(place, k):
    """The place of a part of dq as what the copy engine writes to dk or dv.

    - `k`: the keys, or values, of a consumer.
    """
    return reinterpret(place, k.dtype, k.shape, k.layout)


# -- a consumer -----------------------------------------------------------------------------------


@gluon.jit
def put_keys(acc_k, acc_v, inputs, places, rings, at, rate, W: gl.constexpr):
    """Hand over dk and dv of 64 keys. **Returns:** the cursor.

    - `inputs`: keys and values; `places`, `rings`, `at`: where parts of dq go, piece by piece.
    """
    k_smem, v_smem = inputs
    _acquire(rings, at)
    as_keys(places[0].index(W), v_smem.index(W)).store(acc_v.to(v_smem.dtype))
    if len(places) == 2:
        second = (acc_k[1] * rate).to(v_smem.dtype)
        as_keys(places[1].index(W), k_smem[1].index(W)).store(second)
    at = _publish(rings, at)
    _acquire(rings, at)
    as_keys(places[0].index(W), k_smem[0].index(W)).store((acc_k[0] * rate).to(v_smem.dtype))
    return _publish(rings, at)


@gluon.jit
def _acquire(rings, at):
    for n in gl.static_range(len(rings)):
        producer_acquire(rings[n], at)


@gluon.jit
def _publish(rings, at):
    """All of them, whether there is something or not: they have one cursor."""
    fence_async_shared()
    for n in gl.static_range(len(rings)):
        producer_commit(rings[n], at)
    return advance(at, 1)


@gluon.jit
def write_keys(acc_k, acc_v, at, to, rate):
    """Write dk and dv in float32.

    - `at`: the first of these keys, the head and batch row of dk, its heads and length.
    """
    first, h, b, heads, kv_len = at
    wide_dk, wide_dv, d_width, dv_width = to
    base = (gl.cast(b, gl.int64) * heads + h) * kv_len
    column = 0
    for n in gl.static_range(len(acc_k)):
        write(acc_k[n] * rate, wide_dk + base * d_width, first, kv_len, d_width, column)
        column += acc_k[n].shape[1]
    write(acc_v, wide_dv + base * dv_width, first, kv_len, dv_width, 0)


# -- an adder -------------------------------------------------------------------------------------


@gluon.jit
def copy_keys(dk, dv, b, h, first, inputs, places, rings, at, W):
    """Have the copy engine write what `put_keys` hands over. **Returns:** the cursor."""
    k_smem, v_smem = inputs
    _await(rings, at)
    tma_store(dv, [b, h, first, 0], as_keys(places[0], v_smem.index(W)))
    if len(places) == 2:
        column: gl.constexpr = k_smem[0].shape[2]
        tma_store(dk[1], [b, h, first, column], as_keys(places[1], k_smem[1].index(W)))
    at = _release(rings, at)
    _await(rings, at)
    tma_store(dk[0], [b, h, first, 0], as_keys(places[0], k_smem[0].index(W)))
    return _release(rings, at)


@gluon.jit
def _await(rings, at):
    for n in gl.static_range(len(rings)):
        consumer_wait(rings[n], at)


@gluon.jit
def _release(rings, at):
    tma_store_wait(0)
    for n in gl.static_range(len(rings)):
        consumer_release(rings[n], at)
    return advance(at, 1)
