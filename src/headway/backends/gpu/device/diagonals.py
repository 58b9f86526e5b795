"""Gathers that depend on `kv_idx - q_idx` alone: relative biases of any form.

A tile of Q queries and KV keys has Q + KV - 1 diagonals. One contiguous load reads their values,
and a gather in shared memory expands them to the Q KV pairs: it replaces Q KV gathers.
"""

import triton.language as tl

import triton


@triton.jit
def expand(BIAS: tl.constexpr, b, h, q_idx, kv_idx, captured):
    """Return `BIAS(score, b, h, q_idx, kv_idx, captured)` for every pair of a tile.

    Its positions are consecutive from `captured[2]`: the first query and the first key. Rows past
    the last query may have its position, outside of the tile: theirs may be any of the values.
    """
    Q: tl.constexpr = q_idx.shape[0] * q_idx.shape[1]
    KV: tl.constexpr = kv_idx.shape[0] * kv_idx.shape[1]
    q_first, kv_first = captured[2]
    diagonals = tl.arange(0, 2 * (Q if Q > KV else KV))
    values = BIAS(0.0, b, h, q_first, kv_first - (Q - 1) + diagonals, captured)
    rows = (q_first - q_idx + (Q - 1)).to(tl.int32) & (Q - 1)  # 0 to Q - 1, in the tile or not
    columns = (kv_idx - kv_first).to(tl.int32) & (KV - 1)
    diagonal = rows + columns
    return tl.reshape(tl.gather(values, tl.reshape(diagonal, [Q * KV]), 0), diagonal.shape)
