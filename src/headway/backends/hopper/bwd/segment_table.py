"""Islands: consecutive lines of keys whose queries no other line of their head visits. A head is
one at most; a document that begins and ends with tiles is one too. Kernels whose CTAs take whole
islands (bwd/segments.py) are told here which there are, and which visits of a block of
queries are its first and its last."""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...base import Call
from ...gpu.runtime.call_plan import Walk, Walks
from ...gpu.runtime.device_guard import keep_alive, outside_capture
from ..device import mma
from . import segments as kernel

ROWS = mma.ROWS.value  # queries of a block
MARKED = 32  # blocks of an island: a bit each
VISIT, FIRST, LAST = kernel.VISIT.value, kernel.FIRST.value, kernel.LAST.value


class Work(NamedTuple):
    """What a kernel is given of some islands."""

    walk: Walk
    items: Tensor  # `Islands.items`
    marks: Tensor  # `Islands.marks`
    everywhere: bool  # every block of queries is visited


class Segments:
    """The islands of a walk over so many heads and `length` queries.

    - `sub`: ranks of a line.
    """

    def __init__(self, walk: Walk, sub: int, heads: int, length: int) -> None:
        self.walk, self.sub, self.blocks = walk, sub, -(-length // ROWS)
        self.lines = walk.tile_rows * walk.b * walk.h
        self.heads = heads // (walk.b * walk.h)  # that the mask does not tell apart
        tiles, per = -(-length // walk.step), walk.step // ROWS
        line, start, count = _runs(walk, tiles)
        low, high = np.full(self.lines, tiles), np.zeros(self.lines, int)
        np.minimum.at(low, line, start)
        np.maximum.at(high, line, start + count)
        # A line with no live tile visits its first.
        (nothing,) = (high == 0).nonzero()
        low[nothing], high[nothing] = 0, 1
        line = np.concatenate([line, nothing])
        start = np.concatenate([start, np.zeros_like(nothing)])
        count = np.concatenate([count, np.ones_like(nothing)])
        # An island begins where all lines before have ended, and none after comes back.
        of_head = -1, walk.tile_rows
        ended = np.maximum.accumulate(high.reshape(of_head), 1)
        begun = np.minimum.accumulate(low.reshape(of_head)[:, ::-1], 1)[:, ::-1]
        opens = np.ones(ended.shape, bool)
        opens[:, 1:] = ended[:, :-1] <= begun[:, 1:]
        self.first = np.flatnonzero(opens)  # line
        self.end = np.append(self.first[1:], self.lines)
        self.block = np.minimum.reduceat(low, self.first) * per
        last = np.minimum(np.maximum.reduceat(high, self.first) * per, self.blocks)
        self.span = int((last - self.block).max())  # blocks of the longest
        self.runs = line, start * per, (start + count) * per

    @property
    def ranks(self) -> int:
        """How many islands there are of all heads."""
        return len(self.first) * self.heads

    @cached_property
    def visits(self) -> np.ndarray:
        """Which blocks of its island a line visits, `(lines, span)`."""
        line, start, end = self.runs
        block = np.repeat(self.block, self.end - self.first)[line]
        edges = np.zeros((self.lines, self.span + 1), int)
        np.add.at(edges, (line, start - block), 1)
        np.add.at(edges, (line, np.minimum(end, self.blocks) - block), -1)
        return edges[:, :-1].cumsum(1)

    @cached_property
    def sizes(self) -> np.ndarray:
        """How many blocks the lines of every island visit."""
        return np.add.reduceat(self.visits.sum(1), self.first)

    def balanced(self, processors: int, idle: float) -> bool:
        """Whether so many processors, each of which takes the next when it is done, take so much
        longer at most than if they could share every island."""
        sizes = np.sort(self.sizes)[::-1].repeat(self.heads)
        rounds = sizes[::processors].sum()  # none is longer than its first island
        return bool(rounds * processors <= sizes.sum() * (1 + idle))

    @cached_property
    def kinds(self) -> np.ndarray:
        """Of every rank and block of its island, int32 `(ranks, span)`: 0, or VISIT, and FIRST and
        LAST in the order of ranks."""
        seen = self.visits.repeat(self.sub, 0)
        first, end = self.first * self.sub, self.end * self.sub
        so_far = np.concatenate([np.zeros_like(seen[:1]), seen.cumsum(0)])
        before, all_of_it = (so_far[at].repeat(end - first, 0) for at in (first, end))
        is_first, is_last = so_far[1:] == before + 1, so_far[1:] == all_of_it
        return (seen * (VISIT + FIRST * is_first + LAST * is_last)).astype(np.int32)

    def marks(self) -> np.ndarray:
        """The same in two numbers for every rank, int32 `(ranks, 2)`: which blocks of its island
        are FIRST, and which LAST, a bit for each; of islands of `MARKED` blocks at most."""
        bits = 1 << np.arange(self.span)
        marks = [(self.kinds & kind > 0) @ bits for kind in (FIRST, LAST)]
        return np.stack(marks, 1).astype(np.uint32).view(np.int32)

    def items(self) -> np.ndarray:
        """int32: how many islands there are of all heads, heads that the mask does not tell apart,
        span; and of every island its first rank, ranks, first block, those with most work first."""
        order = (-self.sizes).argsort(kind="stable")
        own = self.first * self.sub, (self.end - self.first) * self.sub, self.block
        items = np.stack(own, 1)[order].flatten()
        return np.concatenate([(self.ranks, self.heads, self.span), items]).astype(np.int32)

    def work(self, device: torch.device) -> Work:
        """As a kernel is given them."""
        everywhere = (self.kinds >= LAST).sum() == self.walk.b * self.walk.h * self.blocks
        items, marks = (torch.from_numpy(x).to(device) for x in (self.items(), self.marks()))
        return Work(self.walk, items, marks, bool(everywhere))


def _runs(walk: Walk, tiles: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All runs of live tiles: line, start, count."""
    if walk.full is None:
        return (
            np.arange(walk.tile_rows),
            np.zeros(walk.tile_rows, int),
            np.full(walk.tile_rows, tiles),
        )
    parts = [*walk.full, *walk.partial]
    ends = np.cumsum([len(x) for x in parts])[:-1]
    found = np.split(torch.cat(parts).cpu().numpy().astype(int), ends)  # the host waits once
    lines = [np.arange(len(x) - 1).repeat(np.diff(x)) for x in found[::3]]
    return (
        np.concatenate(lines), np.concatenate(found[1::3]), np.concatenate(found[2::3])
    )  # fmt: skip


class SegmentWalk:
    """What kernels are given of the islands of a plan's walks, found once for the tiles of a block
    mask; None where a plan does better without.

    - `heads`: of dk and dv, of all batch rows; `length`: of queries.
    - `suit`: whether a plan takes them.
    """

    def __init__(
        self, walks: Walks, heads: int, length: int, suit: Callable[[Segments], bool]
    ) -> None:
        self.walks, self.heads, self.length, self.suit = walks, heads, length, suit
        self.made: tuple[Walk, Work | None] | None = None

    def __call__(self, call: Call) -> Work | None:
        walk, device = self.walks(call), self.walks.plan.device
        if self.made is None or self.made[0] is not walk:
            self.made = walk, outside_capture(device, lambda: self._work(walk, device))
        work = self.made[1]
        if work is not None:
            keep_alive(device, [work.items, work.marks])
        return work

    def _work(self, walk: Walk, device: torch.device) -> Work | None:
        found = Segments(walk, self.walks.sub, self.heads, self.length)
        return found.work(device) if self.suit(found) else None
