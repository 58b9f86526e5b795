"""Define the tiles of a block mask, as runs of live tiles.

A tile is empty (no pair kept: skipped), full (every pair kept: the mask is not evaluated) or
partial (the mask is evaluated inside). Live tiles of a row are mostly contiguous, so a row holds
runs `(start, count)`: a causal million tokens has 33.6 million live tiles of 128 in 16 thousand
runs. A kernel walks the runs of its row in one flat loop.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .runs import Runs, of_dense

if TYPE_CHECKING:
    import numpy as np


class Tiles(NamedTuple):
    """The tensors of a block mask, as kernels take them.

    Rows are numbered `(b * h_size + h) * tile_rows + row`, over query tiles in `rows_*` (for the
    forward and dq) and over key tiles in `cols_*` (their transpose, for dk and dv). `row_order`
    and `col_order` list them by falling number of live tiles: the longest work starts first.
    As counts and indices: `rows_full.per_row()` and, row after row, `rows_full.tiles()`.
    """

    rows_full: Runs
    rows_partial: Runs
    cols_full: Runs
    cols_partial: Runs
    row_order: Tensor  # int32 (rows,)
    col_order: Tensor  # int32 (columns,)

    def flatten(self) -> list[Tensor]:
        """Return all tensors, in the order that `unflatten` takes."""
        return [*self.rows_full, *self.rows_partial, *self.cols_full, *self.cols_partial,
                self.row_order, self.col_order]  # fmt: skip

    @staticmethod
    def unflatten(tensors: list[Tensor]) -> "Tiles":
        """Return the tiles that `flatten` turned into a list."""
        a, b, c, d = (Runs(*tensors[n : n + 3]) for n in (0, 3, 6, 9))
        return Tiles(a, b, c, d, *tensors[12:])

    def dense(self, cols: int) -> Tensor:
        """Return uint8 `(rows, cols)`: 0 empty, 1 partial, 2 full."""
        return self.rows_full.dense(cols).to(torch.uint8) * 2 + self.rows_partial.dense(cols)

    @staticmethod
    def of_runs(
        rows_full: Runs, rows_partial: Runs, cols_full: Runs, cols_partial: Runs
    ) -> "Tiles":
        """Complete the four kinds of runs with the orders of work."""
        orders = []
        for full, partial in ((rows_full, rows_partial), (cols_full, cols_partial)):
            work = full.per_row() + partial.per_row()
            orders.append(work.argsort(descending=True, stable=True).to(torch.int32))
        return Tiles(rows_full, rows_partial, cols_full, cols_partial, *orders)

    @staticmethod
    def of_dense(state: "np.ndarray", device: torch.device) -> "Tiles":
        """Return the tiles of uint8 `(groups, tile_rows, tile_cols)`, as `from_dense` takes it."""
        groups, rows, cols = state.shape
        by_row = of_dense(state.reshape(groups * rows, cols), device)
        by_col = of_dense(state.transpose(0, 2, 1).reshape(groups * cols, rows), device)
        return Tiles(*by_row[:2], *by_col[:2], by_row[2], by_col[2])
