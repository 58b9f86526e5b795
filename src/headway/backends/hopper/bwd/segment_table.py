"""Find segments, for the kernels whose CTAs own them (bwd/segments.py), and which visits of a block
of queries are its first and its last.

A segment is a run of tile columns whose queries no other column of their head visits. It is at most
a head; a document that begins and ends with tiles is one too."""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....blocks.runs import cover
from ...base import Call
from ...gpu.runtime.call_plan import TileSchedule, TileSchedules
from ...gpu.runtime.device_guard import keep_alive, outside_capture
from ..device import mma
from . import segments as kernel
from .context import SegmentHeader, SegmentItem

ROWS = mma.ROWS.value  # queries of a block
MAX_BLOCKS = 32  # blocks of a segment: a bit each
VISIT, FIRST, LAST = kernel.VISIT.value, kernel.FIRST.value, kernel.LAST.value


class SegmentWork(NamedTuple):
    """The tensors of some segments that a kernel reads."""

    schedule: TileSchedule
    items: Tensor  # `Segments.items`
    visit_bits: Tensor  # `Segments.visit_bits`
    everywhere: bool  # every block of queries is visited


class Segments:
    """The segments of a schedule.

    - `sub`: work tiles of a tile column.
    - `heads`: heads of dK and dV, times batch rows; `length`: queries.
    """

    def __init__(self, schedule: TileSchedule, sub: int, heads: int, length: int) -> None:
        self.schedule, self.sub, self.blocks = schedule, sub, -(-length // ROWS)
        self.columns = schedule.tile_rows * schedule.b * schedule.h
        self.equal_heads = heads // (schedule.b * schedule.h)  # that have the same mask
        tiles, per_tile = -(-length // schedule.step), schedule.step // ROWS
        column, start, count = _runs(schedule, tiles)
        low, high = np.full(self.columns, tiles), np.zeros(self.columns, int)
        np.minimum.at(low, column, start)
        np.maximum.at(high, column, start + count)
        # A column with no live tile visits its first.
        (empty,) = (high == 0).nonzero()
        low[empty], high[empty] = 0, 1
        column = np.concatenate([column, empty])
        start = np.concatenate([start, np.zeros_like(empty)])
        count = np.concatenate([count, np.ones_like(empty)])
        # A segment begins where all columns before have ended, and none after comes back.
        by_head = -1, schedule.tile_rows
        end_so_far = np.maximum.accumulate(high.reshape(by_head), 1)
        start_from_here = np.minimum.accumulate(low.reshape(by_head)[:, ::-1], 1)[:, ::-1]
        opens = np.ones(end_so_far.shape, bool)
        opens[:, 1:] = end_so_far[:, :-1] <= start_from_here[:, 1:]
        self.first = np.flatnonzero(opens)  # column
        self.end = np.append(self.first[1:], self.columns)
        self.block = np.minimum.reduceat(low, self.first) * per_tile
        end_block = np.minimum(np.maximum.reduceat(high, self.first) * per_tile, self.blocks)
        self.span = int((end_block - self.block).max())  # blocks of the longest segment
        self.runs = column, start * per_tile, (start + count) * per_tile

    @property
    def total(self) -> int:
        """Return how many segments all heads have."""
        return len(self.first) * self.equal_heads

    @cached_property
    def visits(self) -> np.ndarray:
        """Return which blocks of its segment a column visits, `(columns, span)`."""
        column, start, end = self.runs
        block = np.repeat(self.block, self.end - self.first)[column]
        end = np.minimum(end, self.blocks)
        return cover(column, start - block, end - block, self.columns, self.span)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Return how many blocks the columns of every segment visit."""
        return np.add.reduceat(self.visits.sum(1), self.first)

    def balanced(self, processors: int, idle: float) -> bool:
        """Return whether processors that each take the next segment when they are done take at
        most `1 + idle` times as long as processors that share every segment."""
        sizes = np.sort(self.sizes)[::-1].repeat(self.equal_heads)
        rounds = sizes[::processors].sum()  # none is longer than its first segment
        return bool(rounds * processors <= sizes.sum() * (1 + idle))

    @cached_property
    def kinds(self) -> np.ndarray:
        """Return the kind of visit of every work tile and block of its segment, int32 `(work tiles,
        span)`: 0, or VISIT, and FIRST and LAST in the order of work tiles."""
        visited = self.visits.repeat(self.sub, 0)
        first, end = self.first * self.sub, self.end * self.sub
        so_far = np.concatenate([np.zeros_like(visited[:1]), visited.cumsum(0)])
        before, after = (so_far[tile].repeat(end - first, 0) for tile in (first, end))
        is_first, is_last = so_far[1:] == before + 1, so_far[1:] == after
        return (visited * (VISIT + FIRST * is_first + LAST * is_last)).astype(np.int32)

    def visit_bits(self) -> np.ndarray:
        """Return two numbers for every work tile, int32 `(work tiles, 2)`: which blocks of its
        segment are FIRST, and which LAST, a bit for each; of segments of at most `MAX_BLOCKS`."""
        bits = 1 << np.arange(self.span)
        first_and_last = [(self.kinds & kind > 0) @ bits for kind in (FIRST, LAST)]
        return np.stack(first_and_last, 1).astype(np.uint32).view(np.int32)

    def items(self) -> np.ndarray:
        """Return a `SegmentHeader`, then a `SegmentItem` for every segment, those with most work
        first: int32."""
        order = (-self.sizes).argsort(kind="stable")
        columns = SegmentItem(
            first_tile=self.first * self.sub,
            tiles=(self.end - self.first) * self.sub,
            first_block=self.block,
        )
        items = np.stack(columns, 1)[order].flatten()
        header = SegmentHeader(self.total, self.equal_heads, self.span)
        return np.concatenate([header, items]).astype(np.int32)

    def work(self, device: torch.device) -> SegmentWork:
        """Return the tensors that a kernel reads."""
        everywhere = (self.kinds >= LAST).sum() == self.schedule.b * self.schedule.h * self.blocks
        items, bits = (torch.from_numpy(x).to(device) for x in (self.items(), self.visit_bits()))
        return SegmentWork(self.schedule, items, bits, bool(everywhere))


def _runs(schedule: TileSchedule, tiles: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all runs of live tiles: column, start, count."""
    if schedule.full is None:
        return (
            np.arange(schedule.tile_rows),
            np.zeros(schedule.tile_rows, int),
            np.full(schedule.tile_rows, tiles),
        )
    parts = [*schedule.full, *schedule.partial]
    ends = np.cumsum([len(x) for x in parts])[:-1]
    arrays = np.split(torch.cat(parts).cpu().numpy().astype(int), ends)  # the host waits once
    columns = [np.arange(len(x) - 1).repeat(np.diff(x)) for x in arrays[::3]]
    return (
        np.concatenate(columns), np.concatenate(arrays[1::3]), np.concatenate(arrays[2::3])
    )  # fmt: skip


class SegmentSchedule:
    """The segments of a plan's schedules as kernels read them, found once for the tiles of a block
    mask.

    - `heads`: heads of dK and dV, times batch rows; `length`: queries.
    - `suits`: returns whether a plan shall use some segments.
    """

    def __init__(
        self, schedules: TileSchedules, heads: int, length: int, suits: Callable[[Segments], bool]
    ) -> None:
        self.schedules, self.heads, self.length, self.suits = schedules, heads, length, suits
        self.cached: tuple[TileSchedule, SegmentWork | None] | None = None

    def __call__(self, call: Call) -> SegmentWork | None:
        """Return the segments of a call; None where the plan shall not use them."""
        schedule, device = self.schedules(call), self.schedules.plan.device
        if self.cached is None or self.cached[0] is not schedule:
            self.cached = schedule, outside_capture(device, lambda: self._work(schedule, device))
        work = self.cached[1]
        if work is not None:
            keep_alive(device, [work.items, work.visit_bits])
        return work

    def _work(self, schedule: TileSchedule, device: torch.device) -> SegmentWork | None:
        segments = Segments(schedule, self.schedules.sub, self.heads, self.length)
        return segments.work(device) if self.suits(segments) else None
