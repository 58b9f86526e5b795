"""The order in which CTAs add to dq, for gradients that are bit-equal run after run.

A sum of float32 depends on the order of its terms. Where `deterministic=True`, a rank adds to a
block of queries in its **turn**: after all those with smaller numbers that visit the block. (As
FlashAttention-3's deterministic backward does.)

None waits for ever, in whatever order it visits its blocks: CTAs take ranks (or are launched, one
for each) in the order of their numbers, so those that one waits for are under way or have ended;
and of those under way, the one with the smallest number waits for nobody outside. (Where its last
piece is handed over with the next rank, that waits for copies of inputs.)

How long they wait does depend on the order. Every line visits its blocks from the first to the
last, full and partial ones together, and lines are launched shortest first: behind a causal mask or
a window, where the keys of a later line are seen by later queries, a line then comes to every block
a little after the line before it did.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....blocks.runs import Runs
from ...base import Call
from ...gpu.runtime.call_plan import Walk, Walks
from ...gpu.runtime.device_guard import keep_alive, outside_capture


class Alike(NamedTuple):
    """What a kernel needs to add in turn, with no block mask: the turn of a line is its number."""

    added: Any  # int32, 4 for each 64 queries: how many have added (a part of) a block


class Turns(NamedTuple):
    """What it needs with a block mask."""

    added: Any
    first: Any  # int64: where the turns of a line begin
    turn: Any  # int32: of every tile of a line, in the order in which they are visited


class Ordered:
    """The walks of a plan, in this order.

    - `length`: of the other side, whose blocks lines visit.
    """

    def __init__(self, walks: Walks, length: int) -> None:
        self.walks, self.width = walks, -(-length // walks.step)
        self.made: tuple[Walk, tuple[Walk, Tensor, Tensor]] | None = None

    def __call__(self, call: Call, added: Tensor) -> tuple[Walk, Alike | Turns]:
        """The walk for a call, and its turns by counters that are 0."""
        walk = self.walks(call)
        if walk.full is None:
            return walk, Alike(added)
        device = self.walks.plan.device
        if self.made is None or self.made[0] is not walk:
            self.made = walk, outside_capture(device, lambda: ordered(walk, self.width))
        in_order, first, turn = self.made[1]
        keep_alive(device, [*in_order.tensors(), first, turn])
        return in_order, Turns(added, first, turn)


def ordered(walk: Walk, width: int) -> tuple[Walk, Tensor, Tensor]:
    """A walk whose n-th runs of partial and of full tiles come one after the other, in ascending
    order; where the turns of a line begin; and the turns (`Turns`): 4 bytes for each live tile.
    Every line has a tile: one with no live ones its first, which the mask empties.

    - `width`: tiles of the other side.
    """
    full, partial = Runs(*walk.full), Runs(*walk.partial)
    lines, device = full.rows, full.start.device
    (nothing,) = (full.per_row() + partial.per_row() == 0).nonzero(as_tuple=True)
    key = torch.cat([full.keys(width), partial.keys(width), nothing * (width + 1)])
    count = torch.cat([full.count, partial.count, torch.ones_like(nothing, dtype=torch.int32)])
    key, at = key.sort()
    count, whole = count[at], at < len(full.start)
    line, start = key // (width + 1), (key % (width + 1)).to(torch.int32)

    # Full tiles that follow partial ones, in a line, share their number.
    shares = (line[1:] == line[:-1]) & whole[1:] & ~whole[:-1]
    opens = torch.cat([shares.new_ones(1), ~shares])
    number = opens.cumsum(0) - 1
    offsets = _offsets(line[opens], lines).to(torch.int32)

    def of_kind(mine: Tensor) -> Runs:
        nothing = torch.zeros(int(number[-1]) + 1, dtype=torch.int32, device=device)
        at = (number[mine],)
        return Runs(offsets, nothing.index_put(at, start[mine]), nothing.index_put(at, count[mine]))

    order = walk.order.flip(0)
    # All tiles, line after line: which line of the other side, and when the line is launched.
    tiles = Runs(_offsets(line, lines), start, count)
    many = tiles.per_row()
    line = torch.repeat_interleave(torch.arange(lines, device=device), many)
    when = torch.empty_like(order, dtype=torch.int64)
    when[order.long()] = torch.arange(lines, device=device)
    other = line // walk.tile_rows * width + tiles.tiles()
    other, at = (other * lines + when[line]).sort()
    other //= lines
    rank = torch.arange(len(at), device=device)
    begins = torch.cat([other.new_ones(1, dtype=torch.bool), other[1:] != other[:-1]])
    turn = torch.empty(len(at), dtype=torch.int32, device=device)
    turn[at] = (rank - torch.where(begins, rank, 0).cummax(0).values).to(torch.int32)
    walk = walk._replace(full=tuple(of_kind(whole)), partial=tuple(of_kind(~whole)), order=order)
    return walk, many.cumsum(0) - many, turn


def _offsets(line: Tensor, lines: int) -> Tensor:
    """Where each line begins, of sorted ones, and where the last ends."""
    ends = torch.bincount(line, minlength=lines).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])
