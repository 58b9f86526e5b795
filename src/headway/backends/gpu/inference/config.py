"""Tile sizes of inference, tuned on an H100: rows, keys of a block, warps, pipeline stages."""

from functools import lru_cache
from typing import NamedTuple


class LaunchConfig(NamedTuple):
    """The sizes of a kernel and of its grid."""

    block_keys: int
    warps: int
    stages: int  # of the pipeline of loads
    ctas_per_processor: int


# Rows of a tile, by the bits of an operand and the largest width. More than 16 rows only where
# queries fill them: keys are read once for all rows, and tensor cores wait for memory.
_TILE_ROWS = {(16, 128): (16, 32, 64, 128), (16, 256): (16, 32, 64), (16, 576): (16, 32, 64),
         (19, 128): (16, 32, 64), (19, 256): (16, 32), (19, 576): (16,),
         (32, 128): (16, 32), (32, 256): (16,), (32, 576): (16,)}  # fmt: skip

# By (bits of an operand, largest width, most rows of a tile), best first: a GPU with less shared
# memory takes the first that fits. 19 bits are tf32, 32 are without tensor cores. Some 64 KB of
# keys and values in flight on every multiprocessor keep the memory of an H100 busy.
_CONFIGS: dict[tuple[int, int, int], tuple[LaunchConfig, ...]] = {
    key: tuple([LaunchConfig(*sizes) for sizes in best_first])
    for key, best_first in {
        (16, 64, 32): [(128, 4, 3, 2), (64, 4, 3, 2)],
        (16, 64, 64): [(64, 4, 3, 2), (64, 4, 2, 2)],
        (16, 64, 128): [(64, 8, 3, 2), (64, 8, 2, 1)],
        (16, 128, 32): [(128, 8, 3, 1), (64, 4, 3, 2), (64, 4, 2, 2), (32, 4, 2, 2)],
        (16, 128, 64): [(64, 4, 3, 2), (64, 4, 2, 1), (32, 4, 2, 1)],
        (16, 128, 128): [(64, 8, 3, 1), (64, 8, 2, 1), (32, 8, 2, 1)],
        (16, 256, 32): [(32, 4, 3, 2), (32, 4, 2, 1)],
        (16, 256, 64): [(64, 8, 2, 1), (32, 8, 2, 1), (16, 8, 2, 1)],
        (16, 576, 32): [(64, 8, 3, 1), (64, 8, 2, 1), (32, 4, 2, 1), (16, 4, 2, 1)],
        (16, 576, 64): [(64, 8, 2, 1), (32, 8, 2, 1), (16, 8, 2, 1)],
        (19, 128, 64): [(32, 4, 3, 1), (32, 4, 2, 1), (16, 4, 2, 1)],
        (19, 256, 32): [(32, 4, 2, 1), (16, 4, 2, 1)],
        (19, 576, 16): [(16, 4, 2, 1), (16, 4, 1, 1)],
        (32, 128, 32): [(32, 4, 2, 2), (16, 4, 2, 1)],
        (32, 256, 16): [(16, 4, 2, 1), (16, 4, 1, 1)],
        (32, 576, 16): [(16, 4, 1, 1)],
    }.items()
}  # fmt: skip
# Keys that a CTA has at least, if there are as many: merging takes as long as some blocks.
MIN_KEYS = 256


@lru_cache(maxsize=1024)
def tile_rows_for(operand_bits: int, width: int, queries: int) -> int:
    """Return the rows of a tile: the fewest that hold the queries of a group, or the most."""
    key = min(key for key in _TILE_ROWS if key[0] == operand_bits and key[1] >= width)
    return next((rows for rows in _TILE_ROWS[key] if rows >= queries), _TILE_ROWS[key][-1])


def launch_configs(operand_bits: int, width: int, tile_rows: int) -> tuple[LaunchConfig, ...]:
    """Return the configs for tiles of some rows, best first.

    - `operand_bits`: of the operands of a product: 16, 19 (tf32) or 32.
    """
    fits = lambda key: key[0] == operand_bits and key[1] >= width and key[2] >= tile_rows
    return _CONFIGS[min(filter(fits, _CONFIGS))]
