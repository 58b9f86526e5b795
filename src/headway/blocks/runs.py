"""Compute with runs of consecutive tiles: merge, select, cut, combine.

Every cost here follows the number of runs, never rows times columns. A run is also
written as a key, `row * (width + 1) + start`, and a count: sorted keys are row after row, and a run
that ends where the next one starts touches it only within the same row.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np


class Runs(NamedTuple):
    """Runs of consecutive tiles, row after row (compressed rows).

    Row r's runs are `offsets[r]:offsets[r + 1]`; run n covers tiles `start[n]` up to
    `start[n] + count[n]`, in ascending order within a row. All int32.
    """

    offsets: Tensor  # (rows + 1,)
    start: Tensor  # (runs,)
    count: Tensor  # (runs,)

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.offsets.shape[0] - 1

    def row(self) -> Tensor:
        """Return the row of every run, int64 `(runs,)`."""
        return _repeat(torch.diff(self.offsets).long())

    def keys(self, width: int) -> Tensor:
        """Return the key of every run, int64 `(runs,)`."""
        return self.row() * (width + 1) + self.start

    def per_row(self) -> Tensor:
        """Return the number of tiles in every row, int64 `(rows,)`."""
        return torch.diff(pick(_sums(self.count, torch.int64), self.offsets))

    def ends(self) -> Tensor:
        """Return the end of the last run of every row, int64 `(rows,)`; 0 where there is none."""
        stop = torch.cat([self.start.new_zeros(1), self.start + self.count]).long()
        return pick(stop, torch.where(torch.diff(self.offsets) > 0, self.offsets[1:], 0))

    def tiles(self) -> Tensor:
        """Return the index of every tile, row after row, int32 `(sum of per_row(),)`."""
        count = self.count.long()
        run = _repeat(count)
        before = count.cumsum(0) - count
        within = torch.arange(len(run), device=run.device) - pick(before, run)
        return (pick(self.start, run) + within).to(torch.int32)

    def dense(self, width: int) -> Tensor:
        """Return which tiles are covered, bool `(rows, width)`, without waiting for the device."""
        run_idx = torch.arange(len(self.start), device=self.start.device)
        row = torch.searchsorted(self.offsets[1:].contiguous(), run_idx, right=True)
        first_tile, ones = row * (width + 1) + self.start, torch.ones_like(self.start)
        change = torch.zeros(self.rows * (width + 1), dtype=torch.int32, device=run_idx.device)
        change.index_add_(0, first_tile, ones).index_add_(0, first_tile + self.count, -ones)
        return change.view(self.rows, width + 1)[:, :width].cumsum(1, dtype=torch.int32) > 0

    def take(self, rows: Tensor) -> "Runs":
        """Return the runs of some rows, int64 `(n,)`, in that order."""
        first_run = pick(self.offsets, rows).long()
        lengths = pick(self.offsets, rows + 1) - first_run
        ends = lengths.cumsum(0)
        out_row = _repeat(lengths)
        within_row = torch.arange(len(out_row), device=rows.device) - pick(ends - lengths, out_row)
        run_idx = pick(first_run, out_row) + within_row
        offsets = _sums(lengths, torch.int32)
        return Runs(offsets, pick(self.start, run_idx), pick(self.count, run_idx))

    def cut(self, low: int, high: int) -> "Runs":
        """Return the part within tiles `low` up to `high`, renumbered from 0."""
        start = self.start.clamp(low, high)
        count = (self.start + self.count).clamp(low, high) - start
        live = count > 0
        offsets = pick(_sums(live, torch.int32), self.offsets)
        return Runs(offsets, pick(start - low, live), pick(count, live))

    @staticmethod
    def of_keys(key: Tensor, count: Tensor, rows: int, width: int) -> "Runs":
        """Return the runs of keys and counts that do not overlap, int64 `(n,)` in any order."""
        return Runs._of_sorted(*merge(key, count), rows, width)

    @staticmethod
    def _of_sorted(key: Tensor, count: Tensor, rows: int, width: int) -> "Runs":
        row = key // (width + 1)
        start = (key - row * (width + 1)).to(torch.int32)
        offsets = _sums(torch.bincount(row, minlength=rows), torch.int32)
        return Runs(offsets, start, count.to(torch.int32))


def of_dense(state: "np.ndarray", device: torch.device) -> tuple[Runs, Runs, Tensor]:
    """Return the runs of full and of partial tiles, and the rows by falling number of live ones.

    `state` is uint8 `(rows, width)`: 0 empty, 1 partial, 2 full. This runs on the host: in a small
    grid a step costs its call, and NumPy's calls cost less than PyTorch's.
    """
    import numpy as np  # imported here: a copy on the Hugging Face Hub imports only PyTorch

    rows, width = state.shape
    # All rows in one array, with a gap after each: it changes where a run starts or stops.
    cells = np.zeros(rows * (width + 1) + 1, np.uint8)
    cells[1:].reshape(rows, width + 1)[:, :width] = state
    (edges,) = (cells[1:] != cells[:-1]).nonzero()
    states, count = cells[edges[1:]], edges[1:] - edges[:-1]
    row, start = np.divmod(edges[:-1], width + 1)
    arrays = []
    for state_value in (2, 1):
        (selected,) = (states == state_value).nonzero()
        offsets = row[selected].searchsorted(np.arange(rows + 1))
        arrays += [offsets, start[selected], count[selected]]
    work = np.bincount(row, count * (states > 0), minlength=rows)
    arrays.append((-work).argsort(kind="stable"))
    tensors = [torch.from_numpy(x.astype(np.int32)).to(device) for x in arrays]
    return Runs(*tensors[:3]), Runs(*tensors[3:6]), tensors[6]


def cover(
    tile_row: "np.ndarray", start: "np.ndarray", stop: "np.ndarray", row_count: int, width: int
) -> "np.ndarray":
    """Return how many runs cover each tile of each row, int32 `(row_count, width)`, on the host."""
    import numpy as np

    row_start, cells = tile_row * (width + 1), row_count * (width + 1)
    change = np.bincount(row_start + start, minlength=cells)
    change -= np.bincount(row_start + stop, minlength=cells)
    return change.reshape(row_count, width + 1)[:, :width].cumsum(1, dtype=np.int32)


def merge(key: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Sort runs that do not overlap, and join those that touch."""
    # Keys differ, so any sort will do: on the CPU NumPy's takes a quarter of the time.
    on_cpu = key.device.type == "cpu"
    order = torch.from_numpy(key.numpy().argsort()) if on_cpu else key.argsort()
    key = pick(key, order)
    stop = key + pick(count, order)
    if not len(key):
        return key, count
    starts_run = key[1:] != stop[:-1]
    true = starts_run.new_ones(1)
    key = pick(key, torch.cat([true, starts_run]))
    return key, pick(stop, torch.cat([starts_run, true])) - key


def sweep(key: Tensor, stop: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut overlapping runs into pieces: key, count and the sum of the weights that cover it."""
    edges, order = torch.cat([key, stop]).sort()
    cover = pick(torch.cat([weight, -weight]), order).cumsum(0)
    count = torch.diff(edges)
    piece = count > 0
    return pick(edges[:-1], piece), pick(count, piece), pick(cover[:-1], piece)


def combine(runs: list[Runs], width: int) -> Callable[[Callable[[list[Tensor]], Tensor]], Runs]:
    """Compute set algebra on several runs over the same rows.

    **Returns:** a function that selects the tiles for which `keep(covered) -> bool` holds, where
    `covered[n]` says whether the n-th runs cover a piece:
    `combine([a, b], width)(lambda covered: covered[0] & ~covered[1])`.
    """
    keys = [r.keys(width) for r in runs]
    weights = [torch.full_like(key, 1 << n) for n, key in enumerate(keys)]
    stops = [key + r.count for key, r in zip(keys, runs, strict=True)]
    key, count, cover = sweep(torch.cat(keys), torch.cat(stops), torch.cat(weights))
    covered = [(cover >> n) & 1 == 1 for n in range(len(runs))]

    def select_runs(keep: Callable[[list[Tensor]], Tensor]) -> Runs:
        keep_mask = keep(covered)
        return Runs.of_keys(pick(key, keep_mask), pick(count, keep_mask), runs[0].rows, width)

    return select_runs


def rectangles(r0: Tensor, r1: Tensor, c0: Tensor, c1: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return keys and counts of the rows of rectangles: rows r0 up to r1, tiles c0 up to c1."""
    height = r1 - r0
    if len(height) and int(height.max()) > 1:
        rectangle = _repeat(height)
        rows_before = height.cumsum(0) - height
        row = pick(r0 - rows_before, rectangle) + torch.arange(len(rectangle), device=r0.device)
        return row * (width + 1) + pick(c0, rectangle), pick(c1 - c0, rectangle)
    return r0 * (width + 1) + c0, c1 - c0


def pick(values: Tensor, index: Tensor) -> Tensor:
    """Return `values[index]` for 1-d tensors, at integers or where a bool is True."""
    # PyTorch's own indexing wakes every thread for a few thousand numbers, and so do
    # repeat_interleave and searchsorted: on a busy machine each waits for its turn on a core.
    return (
        values.masked_select(index) if index.dtype == torch.bool else values.index_select(0, index)
    )


def _sums(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0, counts[0], counts[0] + counts[1], ...: one number more than `counts` has."""
    sums = torch.zeros(len(counts) + 1, dtype=dtype, device=counts.device)
    torch.cumsum(counts, 0, dtype=dtype, out=sums[1:])
    return sums


def _repeat(counts: Tensor) -> Tensor:
    """Return 0 repeated counts[0] times, 1 repeated counts[1] times, ...; int64."""
    ends = counts.cumsum(0)
    total = int(ends[-1]) if len(counts) else 0
    return torch.bincount(ends, minlength=total + 1)[:total].cumsum(0)


def coarser(
    full: Runs, partial: Runs, grid: tuple[int, int], factors: tuple[int, int]
) -> tuple[Runs, Runs]:
    """Return full and partial runs on a grid that is coarser by integer factors.

    `grid` is `(rows, width)` of one batch and head. A coarse tile is full if all its tiles are.
    """
    (rows, width), (by_row, by_col) = grid, factors
    coarse_rows, coarse_cols = -(-rows // by_row), -(-width // by_col)

    def coarse_cover(runs: Runs, inner: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return coarse tiles covered completely (inner) or partly, and by how many rows."""
        row = runs.row()
        coarse_row = row // rows * coarse_rows + row % rows // by_row
        start, stop = runs.start.long(), (runs.start + runs.count).long()
        if inner:
            start = -(-start // by_col)
            stop = torch.where(stop == width, coarse_cols, stop // by_col)
        else:
            start, stop = start // by_col, -(-stop // by_col)
        key = coarse_row * (coarse_cols + 1)
        nonempty = stop > start
        key, stop = pick(key + start, nonempty), pick(key + stop, nonempty)
        return sweep(key, stop, torch.ones_like(key))

    groups = full.rows // rows if rows else 0
    key, count, cover = coarse_cover(full, inner=True)
    coarse_row = key // (coarse_cols + 1) % coarse_rows if coarse_rows else key
    all_rows = cover == (rows - coarse_row * by_row).clamp_max(by_row)
    sizes = groups * coarse_rows, coarse_cols
    all_full = Runs.of_keys(pick(key, all_rows), pick(count, all_rows), *sizes)
    live = []
    for runs in (full, partial):
        key, count, cover = coarse_cover(runs, inner=False)
        nonempty = cover > 0
        live.append(Runs.of_keys(pick(key, nonempty), pick(count, nonempty), *sizes))
    select_runs = combine([all_full, *live], coarse_cols)
    return all_full, select_runs(lambda c: ~c[0] & (c[1] | c[2]))
