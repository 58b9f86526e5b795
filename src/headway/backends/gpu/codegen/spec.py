"""The input of code generation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CodegenSpec:
    """A score, a mask and how to compile them; the key of the cache of generated modules.

    - `score`, `mask`: serialized graphs, or None.
    - `wanted`: the gathers of the score, by node index, that need a gradient.
    - `narrow`: positions and captured integers are below `POSITION_LIMIT` in magnitude.
    - `consecutive`: positions are consecutive, and so are the diagonals of a tile.
    - `wide_offsets`: for every captured tensor, the score's before the mask's, whether an offset
      into it may need 64 bits.
    - `approx_tanh`: compute tanh by the hardware's approximate instruction. Its relative error is
      at most 2^-11, a quarter of the error of rounding P to bfloat16.
    - `per_diagonal`: read each value that depends only on `kv_idx - q_idx` once per diagonal of a
      tile. The kernel passes the first positions of the tile as `captured[2]` (diagonals.py).
    - `affine`: also generate the terms of a score that is affine in S (affine.py).
    - `hoist`: also generate a mask with its loop-invariant parts hoisted (hoist.py).
    - `bias_tables`: the kernel reads relative biases from tables and passes the value of every
      pair as `captured[2]`.
    - `distance_sign`: the sign of q_idx - kv_idx in all pairs that the mask keeps; 0 if unknown
      (`affine.distance_sign`).
    - `exact_width`: WIDTH of the exact sums that `scatter` adds to (device/exact_sums.py); 0: it
      adds to float32 gradients.
    - `limits`: also generate the first and the last key that each query may see (limits.py).
    - `moving`: for a kernel of tangents, the tensors of the score that have one, by number; theirs
      are captured after those of the score. None: for a forward and a backward.
    """

    score: str | None
    mask: str | None
    wanted: tuple[int, ...] = ()
    narrow: bool = True
    consecutive: bool = True
    wide_offsets: tuple[bool, ...] = ()
    approx_tanh: bool = False
    per_diagonal: bool = False
    affine: bool = False
    hoist: bool = False
    bias_tables: bool = False
    distance_sign: int = 0
    exact_width: int = 0
    limits: bool = False
    moving: tuple[int, ...] | None = None
