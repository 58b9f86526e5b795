"""Tile sizes of inference: rows and keys of a block, warps, pipeline stages."""

from functools import lru_cache
from typing import NamedTuple

WIDEST = 576  # of q and k: MLA's latent


class Config(NamedTuple):
    """The sizes of a kernel."""

    n: int  # keys of a block
    warps: int
    stages: int  # of the pipeline of loads
    ctas: int  # of a multiprocessor, that fit and are launched


# Rows of a tile, by the bits of a factor and the largest width. More than 16 rows only where
# queries fill them: keys are read once for all rows, and tensor cores wait for memory.
_ROWS = {(16, 128): (16, 32, 64, 128), (16, 256): (16, 32, 64), (16, 576): (16, 32, 64),
         (19, 128): (16, 32, 64), (19, 256): (16, 32), (19, 576): (16,),
         (32, 128): (16, 32), (32, 256): (16,), (32, 576): (16,)}  # fmt: skip

# By (bits of a factor, largest width, most rows of a tile), best first: a GPU with less shared
# memory takes the first that fits. 19 bits are tf32, 32 are without tensor cores. Some 64 KB of
# keys and values in flight on every multiprocessor keep the memory of an H100 busy.
_TABLE: dict[tuple[int, int, int], tuple[Config, ...]] = {
    (16, 64, 32): (Config(128, 4, 3, 2), Config(64, 4, 3, 2)),
    (16, 64, 64): (Config(64, 4, 3, 2), Config(64, 4, 2, 2)),
    (16, 64, 128): (Config(64, 8, 3, 2), Config(64, 8, 2, 1)),
    (16, 128, 32): (Config(64, 4, 3, 2), Config(64, 4, 2, 2), Config(32, 4, 2, 2)),
    (16, 128, 64): (Config(64, 4, 3, 2), Config(64, 4, 2, 1), Config(32, 4, 2, 1)),
    (16, 128, 128): (Config(64, 8, 3, 1), Config(64, 8, 2, 1), Config(32, 8, 2, 1)),
    (16, 256, 32): (Config(32, 4, 3, 2), Config(32, 4, 2, 1)),
    (16, 256, 64): (Config(64, 8, 2, 1), Config(32, 8, 2, 1), Config(16, 8, 2, 1)),
    (16, 576, 32): (
        Config(64, 8, 3, 1),
        Config(64, 8, 2, 1),
        Config(32, 4, 2, 1),
        Config(16, 4, 2, 1),
    ),
    (16, 576, 64): (Config(64, 8, 2, 1), Config(32, 8, 2, 1), Config(16, 8, 2, 1)),
    (19, 128, 64): (Config(32, 4, 3, 1), Config(32, 4, 2, 1), Config(16, 4, 2, 1)),
    (19, 256, 32): (Config(32, 4, 2, 1), Config(16, 4, 2, 1)),
    (19, 576, 16): (Config(16, 4, 2, 1), Config(16, 4, 1, 1)),
    (32, 128, 32): (Config(32, 4, 2, 2), Config(16, 4, 2, 1)),
    (32, 256, 16): (Config(16, 4, 2, 1), Config(16, 4, 1, 1)),
    (32, 576, 16): (Config(16, 4, 1, 1),),
}
KEYS = 256  # that a CTA has at least, if there are as many: merging takes as long as some blocks


@lru_cache(maxsize=1024)
def rows_of_tile(bits: int, width: int, rows: int) -> int:
    """Rows of a tile for `rows` queries of a group: the fewest that hold them, or the most."""
    sizes = _ROWS[min(key for key in _ROWS if key[0] == bits and key[1] >= width)]
    return next((m for m in sizes if m >= rows), sizes[-1])


def configs(bits: int, width: int, m: int) -> tuple[Config, ...]:
    """The sizes for tiles of `m` rows, best first.

    - `bits`: of the factors of a product: 16, 19 (tf32) or 32.
    """
    key = min(k for k in _TABLE if k[0] == bits and k[1] >= width and k[2] >= m)
    return _TABLE[key]
