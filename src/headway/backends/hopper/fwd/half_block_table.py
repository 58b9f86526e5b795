"""Half-block coverage: what each of two consumers sees of the left and of the right half of partial
blocks, for a mask whose tiles are blocks. Where it is the same in all tile rows, as behind
`causal() & sliding_window(1024)`, kernels are compiled for it (fwd/half_blocks.py).
"""

import numpy as np
import torch

from ....blocks import Runs, Tiles, build
from ....mods.graph import Graph
from ....types import Captured, Coords
from . import half_blocks as kernel

EMPTY, MIXED, FULL = kernel.EMPTY.value, kernel.MIXED.value, kernel.FULL.value
MAX_TILES = 1 << 15  # partial tiles that are examined

HalfBlocks = tuple[tuple[int, int], ...]  # `config.FwdKernelConfig.half_blocks`


def half_block_table(
    mask: Graph, captured: Captured, shape: tuple[int, int, int, int], tile: tuple[int, int],
    coords: Coords,
) -> HalfBlocks:  # fmt: skip
    """Return what is seen of the left and of the right half: EMPTY, MIXED or FULL. It is seen by
    the first and by the second consumer, of the block that a work tile visits first
    (`tile_table.tile_table`); then by both, of all other partial blocks. `()` where nothing is the
    same in all tile rows.

    - `mask`: captures integers only.
    - `shape`: batch rows, heads, queries, and keys, in whole tiles. (With other lengths the last
      full tile would be visited first, and each length would make a kernel of its own.)
    """
    host = torch.device("cpu")
    tiles, *_ = build(mask, captured, shape, tile, host, coords)
    if tiles.rows_partial.per_row().sum() > MAX_TILES:
        return ()
    half_tiles, *_ = build(mask, captured, shape, (tile[0] // 2, tile[1] // 2), host, coords)
    rows, columns = (-(-n * 2 // side) for n, side in zip(shape[2:], tile, strict=True))
    # The last tile of every row; -1 where there is none.
    full, partial = (x.ends().numpy() - 1 for x in (tiles.rows_full, tiles.rows_partial))
    first = np.where(partial >= 0, partial, full).clip(0)
    tile_row = tiles.rows_partial.row().numpy().repeat(tiles.rows_partial.count)
    column = tiles.rows_partial.tiles().numpy()
    others = column != first[tile_row]
    tile_rows = -(-shape[2] // tile[0])
    coverage = []
    first_blocks, other_blocks = (np.arange(len(first)), first), (tile_row[others], column[others])
    for block_rows, block_columns in (first_blocks, other_blocks):
        for consumer in (0, 1):
            row = 2 * (block_rows % tile_rows) + consumer
            exists = row < rows  # queries past the end keep nothing
            row = (block_rows // tile_rows * rows + row)[exists]
            halves = (2 * block_columns[exists] + n for n in (0, 1))
            left, right = (_common(half_tiles, row, half, columns) for half in halves)
            coverage.append((left, right))
    return tuple(coverage) if any(x != MIXED for pair in coverage for x in pair) else ()


def _common(tiles: Tiles, row: np.ndarray, column: np.ndarray, width: int) -> int:
    """Return what all of some tiles are (no tiles are FULL), or MIXED."""
    full = _inside(tiles.rows_full, row, column, width)
    if full.all():
        return FULL
    if (full | _inside(tiles.rows_partial, row, column, width)).any():
        return MIXED
    return EMPTY


def _inside(runs: Runs, row: np.ndarray, column: np.ndarray, width: int) -> np.ndarray:
    """Return which tiles belong to a run."""
    keys = runs.keys(width).numpy()
    if not len(keys):
        return np.zeros(len(row), bool)
    key = row.astype(np.int64) * (width + 1) + column
    n = keys.searchsorted(key, "right") - 1
    return (n >= 0) & (key < keys[n] + runs.count.numpy()[n])
