"""What consumers of the forward see of partial blocks, worked out once for a mask whose tiles are
blocks: a **quarter** of one is the queries of one of two consumers, and the left or the right half
of the keys. Where all lines are alike in this, as behind `causal() & sliding_window(1024)`, kernels
are compiled for it (fwd/half_blocks.py).
"""

import numpy as np
import torch

from ....blocks import Runs, Tiles, build
from ....mods.graph import Graph
from ....types import Captured, Coords
from . import half_blocks as kernel

EMPTY, MIXED, FULL = kernel.EMPTY.value, kernel.MIXED.value, kernel.FULL.value
MOST = 1 << 15  # partial tiles that are looked at

HalfBlocks = tuple[tuple[int, int], ...]  # `config.How.quarters`


def half_block_table(
    mask: Graph, captured: Captured, shape: tuple[int, int, int, int], tile: tuple[int, int],
    coords: Coords,
) -> HalfBlocks:  # fmt: skip
    """What is seen of the left and the right half: by the first and the second consumer of the
    block that a rank visits first (`ranks.table`), then by them of all other partial ones. Empty,
    where nothing is the same in all lines.

    - `mask`: one that captures whole numbers alone.
    - `shape`: b, heads, queries, and keys, in whole tiles. (With others it would be the last full
      tile that is visited first, and lengths that differ would make kernels of their own.)
    """
    host = torch.device("cpu")
    tiles, *_ = build(mask, captured, shape, tile, host, coords)
    if tiles.rows_partial.per_row().sum() > MOST:
        return ()
    fine, *_ = build(mask, captured, shape, (tile[0] // 2, tile[1] // 2), host, coords)
    rows, columns = (-(-n * 2 // side) for n, side in zip(shape[2:], tile, strict=True))
    full, partial = _last(tiles.rows_full), _last(tiles.rows_partial)
    first = np.where(partial >= 0, partial, full).clip(0)
    line = tiles.rows_partial.row().numpy().repeat(tiles.rows_partial.count)
    at = tiles.rows_partial.tiles().numpy()
    rest = at != first[line]
    lines = -(-shape[2] // tile[0])
    found = []
    for of_line, of_tile in ((np.arange(len(first)), first), (line[rest], at[rest])):
        for consumer in (0, 1):
            row = 2 * (of_line % lines) + consumer
            there = row < rows  # of queries past the end nothing is kept
            row = (of_line // lines * rows + row)[there]
            left, right = (2 * of_tile[there] + n for n in (0, 1))
            found.append((_common(fine, row, left, columns), _common(fine, row, right, columns)))
    return tuple(found) if any(x != MIXED for pair in found for x in pair) else ()


def _last(runs: Runs) -> np.ndarray:
    """The last tile of every line; -1 where there is none."""
    end = (runs.start + runs.count).numpy()
    offsets = runs.offsets.numpy()
    there = offsets[1:] > offsets[:-1]
    return np.where(there, np.append(end, 0)[offsets[1:] - 1] - 1, -1)


def _common(tiles: Tiles, row: np.ndarray, column: np.ndarray, width: int) -> int:
    """What all of some tiles are (and none would be FULL), or MIXED."""
    full = _inside(tiles.rows_full, row, column, width)
    if full.all():
        return FULL
    if (full | _inside(tiles.rows_partial, row, column, width)).any():
        return MIXED
    return EMPTY


def _inside(runs: Runs, row: np.ndarray, column: np.ndarray, width: int) -> np.ndarray:
    """Whether tiles are of a run."""
    keys = runs.keys(width).numpy()
    if not len(keys):
        return np.zeros(len(row), bool)
    key = row.astype(np.int64) * (width + 1) + column
    n = keys.searchsorted(key, "right") - 1
    return (n >= 0) & (key < keys[n] + runs.count.numpy()[n])
