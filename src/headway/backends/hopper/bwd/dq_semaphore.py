"""The dQ semaphore: the order in which CTAs add to dQ, for gradients that are bit-equal run after
run.

A sum of float32 depends on the order of its terms. Where `deterministic=True`, each block of
queries has a counter in global memory, and each work tile that visits the block has a **ticket**:
how many other work tiles add to it first. A reduce warp waits until the counter reaches its ticket,
adds, and increments the counter. (As FlashAttention-3's deterministic backward does.)

There is no deadlock, in whatever order a work tile visits its blocks. CTAs take work tiles (or are
launched, one for each) in the order of the tickets, so those that one waits for are running or have
ended; and of those that run, the one with the smallest tickets waits for no other CTA. (Where its
last piece is stored with the next work tile, that waits for loads of inputs.)

How long they wait does depend on the order. Every tile column visits its blocks from the first to
the last, full and partial ones together, and columns are launched shortest first: behind a causal
mask or a window, where the keys of a later column are seen by later queries, a column then comes to
every block a little after the column before it did.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....blocks.runs import Runs
from ...base import Call
from ...gpu.runtime.call_plan import TileSchedule, TileSchedules
from ...gpu.runtime.device_guard import keep_alive, outside_capture


class DqSemaphore(NamedTuple):
    """The semaphore of a kernel without a block mask: the ticket of a tile column is its number."""

    counters: Any  # int32, 4 for each 64 queries: how many have added (a part of) a block


class MaskedDqSemaphore(NamedTuple):
    """The semaphore of a kernel with a block mask."""

    counters: Any
    first: Any  # int64: where the tickets of a tile column begin
    tickets: Any  # int32: of every tile of a column, in the order in which they are visited


class OrderedSchedules:
    """The schedules of a plan, whose tile columns visit their blocks in ascending order.

    - `length`: queries, whose blocks tile columns visit.
    """

    def __init__(self, schedules: TileSchedules, length: int) -> None:
        self.schedules, self.width = schedules, -(-length // schedules.step)
        self.cached: tuple[TileSchedule, tuple[TileSchedule, Tensor, Tensor]] | None = None

    def __call__(
        self, call: Call, counters: Tensor
    ) -> tuple[TileSchedule, DqSemaphore | MaskedDqSemaphore]:
        """Return the schedule for a call, and its semaphore, with counters that are 0."""
        schedule = self.schedules(call)
        if schedule.full is None:
            return schedule, DqSemaphore(counters)
        device = self.schedules.plan.device
        if self.cached is None or self.cached[0] is not schedule:
            self.cached = (
                schedule,
                outside_capture(device, lambda: ordered_schedule(schedule, self.width)),
            )
        in_order, first, tickets = self.cached[1]
        keep_alive(device, [*in_order.tensors(), first, tickets])
        return in_order, MaskedDqSemaphore(counters, first, tickets)


def ordered_schedule(schedule: TileSchedule, width: int) -> tuple[TileSchedule, Tensor, Tensor]:
    """Return a schedule whose n-th runs of partial and of full tiles come one after the other, in
    ascending order; where the tickets of a column begin; and the tickets (`MaskedDqSemaphore`): 4
    bytes for each live tile. Every column has a tile: one with no live tile its first, which the
    mask empties.

    - `width`: tiles of a column.
    """
    full, partial = Runs(*schedule.full), Runs(*schedule.partial)
    columns, device = full.rows, full.start.device
    (empty,) = (full.per_row() + partial.per_row() == 0).nonzero(as_tuple=True)
    key = torch.cat([full.keys(width), partial.keys(width), empty * (width + 1)])
    count = torch.cat([full.count, partial.count, torch.ones_like(empty, dtype=torch.int32)])
    key, order = key.sort()
    count, is_full = count[order], order < len(full.start)
    column, start = key // (width + 1), (key % (width + 1)).to(torch.int32)

    # Full tiles that follow partial ones, in a column, share their number.
    shares = (column[1:] == column[:-1]) & is_full[1:] & ~is_full[:-1]
    opens = torch.cat([shares.new_ones(1), ~shares])
    number = opens.cumsum(0) - 1
    offsets = _offsets(column[opens], columns).to(torch.int32)

    def runs_of(kind: Tensor) -> Runs:
        zeros = torch.zeros(int(number[-1]) + 1, dtype=torch.int32, device=device)
        index = (number[kind],)
        return Runs(
            offsets, zeros.index_put(index, start[kind]), zeros.index_put(index, count[kind])
        )

    launch_order = schedule.order.flip(0)
    # All tiles, column after column: which row of tiles, and when the column is launched.
    tiles = Runs(_offsets(column, columns), start, count)
    per_column = tiles.per_row()
    column = torch.repeat_interleave(torch.arange(columns, device=device), per_column)
    when = torch.empty_like(launch_order, dtype=torch.int64)
    when[launch_order.long()] = torch.arange(columns, device=device)
    tile_row = column // schedule.tile_rows * width + tiles.tiles()
    tile_row, order = (tile_row * columns + when[column]).sort()
    tile_row //= columns
    nth = torch.arange(len(order), device=device)
    begins = torch.cat([tile_row.new_ones(1, dtype=torch.bool), tile_row[1:] != tile_row[:-1]])
    tickets = torch.empty(len(order), dtype=torch.int32, device=device)
    tickets[order] = (nth - torch.where(begins, nth, 0).cummax(0).values).to(torch.int32)
    schedule = schedule._replace(
        full=tuple(runs_of(is_full)), partial=tuple(runs_of(~is_full)), order=launch_order
    )
    return schedule, per_column.cumsum(0) - per_column, tickets


def _offsets(column: Tensor, columns: int) -> Tensor:
    """Return where each of some sorted columns begins, and where the last ends."""
    ends = torch.bincount(column, minlength=columns).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])
