"""Runs of consecutive tiles, and the arithmetic on them: merge, select, cut, combine.

Everything here is in proportion to the number of runs, never to rows times columns. A run is also
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
        return self.offsets.shape[0] - 1

    def row(self) -> Tensor:
        """The row of every run, int64 `(runs,)`."""
        return _repeat(torch.diff(self.offsets).long())

    def keys(self, width: int) -> Tensor:
        """The key of every run, int64 `(runs,)`."""
        return self.row() * (width + 1) + self.start

    def per_row(self) -> Tensor:
        """Number of tiles in every row, int64 `(rows,)`."""
        return torch.diff(pick(_sums(self.count, torch.int64), self.offsets))

    def ends(self) -> Tensor:
        """Where the last run of every row ends, int64 `(rows,)`; 0 where there is none."""
        stop = torch.cat([self.start.new_zeros(1), self.start + self.count]).long()
        return pick(stop, torch.where(torch.diff(self.offsets) > 0, self.offsets[1:], 0))

    def tiles(self) -> Tensor:
        """The index of every tile, row after row, int32 `(sum of per_row(),)`."""
        count = self.count.long()
        run = _repeat(count)
        before = count.cumsum(0) - count
        within = torch.arange(len(run), device=run.device) - pick(before, run)
        return (pick(self.start, run) + within).to(torch.int32)

    def dense(self, width: int) -> Tensor:
        """Bool `(rows, width)`: which tiles are covered. It waits for no device."""
        n = torch.arange(len(self.start), device=self.start.device)
        row = torch.searchsorted(self.offsets[1:].contiguous(), n, right=True, out_int32=False)
        first, one = row * (width + 1) + self.start, torch.ones_like(self.start)
        change = torch.zeros(self.rows * (width + 1), dtype=torch.int32, device=n.device)
        change.index_add_(0, first, one).index_add_(0, first + self.count, -one)
        return change.view(self.rows, width + 1)[:, :width].cumsum(1, dtype=torch.int32) > 0

    def take(self, rows: Tensor) -> "Runs":
        """The runs of some rows, int64 `(n,)`, in that order."""
        first = pick(self.offsets, rows).long()
        lengths = pick(self.offsets, rows + 1) - first
        ends = lengths.cumsum(0)
        row = _repeat(lengths)
        within = torch.arange(len(row), device=rows.device) - pick(ends - lengths, row)
        run = pick(first, row) + within
        offsets = _sums(lengths, torch.int32)
        return Runs(offsets, pick(self.start, run), pick(self.count, run))

    def cut(self, low: int, high: int) -> "Runs":
        """The part within tiles `low` up to `high`, which are numbered from 0 again."""
        start = self.start.clamp(low, high)
        count = (self.start + self.count).clamp(low, high) - start
        live = count > 0
        offsets = pick(_sums(live, torch.int32), self.offsets)
        return Runs(offsets, pick(start - low, live), pick(count, live))

    @staticmethod
    def of_keys(key: Tensor, count: Tensor, rows: int, width: int) -> "Runs":
        """From keys and counts of runs that do not overlap, int64 `(n,)` in any order."""
        return Runs._of_sorted(*merge(key, count), rows, width)

    @staticmethod
    def _of_sorted(key: Tensor, count: Tensor, rows: int, width: int) -> "Runs":
        row = key // (width + 1)
        start = (key - row * (width + 1)).to(torch.int32)
        offsets = _sums(torch.bincount(row, minlength=rows), torch.int32)
        return Runs(offsets, start, count.to(torch.int32))


def of_dense(state: "np.ndarray", device: torch.device) -> tuple[Runs, Runs, Tensor]:
    """The runs of full and of partial tiles, and the rows by falling number of live ones.

    `state` is uint8 `(rows, width)`: 0 empty, 1 partial, 2 full. This runs on the host: of a small
    square a step costs its call, and NumPy's calls cost less than PyTorch's.
    """
    import numpy as np  # where it is needed: a copy on the Hugging Face Hub imports only PyTorch

    rows, width = state.shape
    # One line of keys, with a gap after every row: it changes where a run starts or stops.
    line = np.zeros(rows * (width + 1) + 1, np.uint8)
    line[1:].reshape(rows, width + 1)[:, :width] = state
    (edge,) = (line[1:] != line[:-1]).nonzero()
    kind, count = line[edge[1:]], edge[1:] - edge[:-1]
    row, start = np.divmod(edge[:-1], width + 1)
    parts = []
    for n in (2, 1):
        (here,) = (kind == n).nonzero()
        parts += [row[here].searchsorted(np.arange(rows + 1)), start[here], count[here]]
    work = np.bincount(row, count * (kind > 0), minlength=rows)
    parts.append((-work).argsort(kind="stable"))
    found = [torch.from_numpy(x.astype(np.int32)).to(device) for x in parts]
    return Runs(*found[:3]), Runs(*found[3:6]), found[6]


def cover(
    line: "np.ndarray", start: "np.ndarray", stop: "np.ndarray", lines: int, width: int
) -> "np.ndarray":
    """How many runs `start` up to `stop` cover each tile of each line, int32 `(lines, width)`. On
    the host, as `of_dense`."""
    import numpy as np

    change = np.zeros(lines * (width + 1), np.int32)
    first = line * (width + 1)
    # One index, and numbers of its own dtype: else this takes NumPy fifty times as long.
    np.add.at(change, first + start, np.int32(1))
    np.add.at(change, first + stop, np.int32(-1))
    return change.reshape(lines, width + 1)[:, :width].cumsum(1, dtype=np.int32)


def merge(key: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Sort runs that do not overlap, and join those that touch."""
    key, order = key.sort()
    stop = key + pick(count, order)
    if not len(key):
        return key, count
    apart = key[1:] != stop[:-1]
    one = apart.new_ones(1)
    key = pick(key, torch.cat([one, apart]))
    return key, pick(stop, torch.cat([apart, one])) - key


def sweep(key: Tensor, stop: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut overlapping runs into pieces: key, count and the sum of the weights that cover it."""
    at, order = torch.cat([key, stop]).sort()
    cover = pick(torch.cat([weight, -weight]), order).cumsum(0)
    count = torch.diff(at)
    piece = count > 0
    return pick(at[:-1], piece), pick(count, piece), pick(cover[:-1], piece)


def combine(runs: list[Runs], width: int) -> Callable[[Callable[[list[Tensor]], Tensor]], Runs]:
    """Set algebra on several runs over the same rows.

    The result makes runs of the tiles for which `keep(covered) -> bool` holds, where `covered[n]`
    says whether the n-th runs cover a piece: `combine([a, b], width)(lambda c: c[0] & ~c[1])`.
    """
    keys = [r.keys(width) for r in runs]
    weights = [torch.full_like(key, 1 << n) for n, key in enumerate(keys)]
    stops = [key + r.count for key, r in zip(keys, runs, strict=True)]
    key, count, cover = sweep(torch.cat(keys), torch.cat(stops), torch.cat(weights))
    covered = [(cover >> n) & 1 == 1 for n in range(len(runs))]

    def where(keep: Callable[[list[Tensor]], Tensor]) -> Runs:
        kept = keep(covered)
        return Runs.of_keys(pick(key, kept), pick(count, kept), runs[0].rows, width)

    return where


def rectangles(r0: Tensor, r1: Tensor, c0: Tensor, c1: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Keys and counts of the rows of rectangles: rows r0 up to r1, tiles c0 up to c1; int64."""
    height = r1 - r0
    if len(height) and int(height.max()) > 1:
        which = _repeat(height)
        before = height.cumsum(0) - height
        row = pick(r0 - before, which) + torch.arange(len(which), device=r0.device)
        return row * (width + 1) + pick(c0, which), pick(c1 - c0, which)
    return r0 * (width + 1) + c0, c1 - c0


def pick(x: Tensor, at: Tensor) -> Tensor:
    """`x[at]` for 1-d tensors, at integers or where a bool is True."""
    # PyTorch's own indexing wakes every thread for a few thousand numbers, and so do
    # repeat_interleave and searchsorted: on a busy machine each waits for its turn on a core.
    return x.masked_select(at) if at.dtype == torch.bool else x.index_select(0, at)


def _sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """0, x[0], x[0] + x[1], ...: one more than x has."""
    sums = torch.zeros(len(x) + 1, dtype=dtype, device=x.device)
    torch.cumsum(x, 0, dtype=dtype, out=sums[1:])
    return sums


def _repeat(times: Tensor) -> Tensor:
    """0 repeated times[0], 1 repeated times[1], ...; int64."""
    ends = times.cumsum(0)
    total = int(ends[-1]) if len(times) else 0
    return torch.bincount(ends, minlength=total + 1)[:total].cumsum(0)


def coarser(
    full: Runs, partial: Runs, grid: tuple[int, int], by: tuple[int, int]
) -> tuple[Runs, Runs]:
    """Full and partial runs on a grid coarser by whole factors.

    `grid` is `(rows, width)` of one batch and head. A coarse tile is full if all its tiles are.
    """
    (rows, width), (by_row, by_col) = grid, by
    lines, cols = -(-rows // by_row), -(-width // by_col)

    def pieces(runs: Runs, inner: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Coarse tiles covered wholly (inner) or partly, and by how many rows."""
        row = runs.row()
        line = row // rows * lines + row % rows // by_row
        start, stop = runs.start.long(), (runs.start + runs.count).long()
        if inner:
            start = -(-start // by_col)
            stop = torch.where(stop == width, cols, stop // by_col)
        else:
            start, stop = start // by_col, -(-stop // by_col)
        key = line * (cols + 1)
        some = stop > start
        key, stop = pick(key + start, some), pick(key + stop, some)
        return sweep(key, stop, torch.ones_like(key))

    groups = full.rows // rows if rows else 0
    key, count, cover = pieces(full, inner=True)
    line = key // (cols + 1) % lines if lines else key
    whole = cover == (rows - line * by_row).clamp_max(by_row)
    all_full = Runs.of_keys(pick(key, whole), pick(count, whole), groups * lines, cols)
    live = []
    for runs in (full, partial):
        key, count, cover = pieces(runs, inner=False)
        some = cover > 0
        live.append(Runs.of_keys(pick(key, some), pick(count, some), groups * lines, cols))
    where = combine([all_full, *live], cols)
    return all_full, where(lambda c: ~c[0] & (c[1] | c[2]))
