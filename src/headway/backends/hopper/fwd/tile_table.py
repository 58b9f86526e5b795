"""What the forward's scheduler has to know of a rank, worked out once for a block mask: it then
reads one row of a table, where it would follow offsets to runs while others wait for what it finds.
"""

import torch
from torch import Tensor

from ...base import Call
from ...gpu.runtime.call_plan import Walk, Walks
from ...gpu.runtime.device_guard import keep_alive, outside_capture

COLUMNS = 16


class TileTable:
    """The walks of a plan, with a table of ranks (`table`) for their `order`.

    - `length`, `block`, `rows`: as for `table`.
    """

    def __init__(self, walks: Walks, length: int, block: int, rows: int) -> None:
        self.walks, self.sizes = walks, (length, block, rows)
        self.made: tuple[Walk, Walk] | None = None

    def __call__(self, call: Call) -> Walk:
        """The walk for a call."""
        walk = self.walks(call)
        if walk.full is None:
            return walk
        device = self.walks.plan.device
        if self.made is None or self.made[0] is not walk:
            ranks = outside_capture(device, lambda: table(walk, self.walks.sub, *self.sizes))
            self.made = walk, walk._replace(order=ranks)
        found = self.made[1]
        keep_alive(device, [found.order])
        return found


def table(walk: Walk, sub: int, length: int, block: int, rows: int) -> Tensor:
    """Of every rank, in the order of work, int32 `(ranks, COLUMNS)`: its number among the tiles of
    its head, first row, head and batch row of the mask, the first row of the block of keys that is
    visited first, how many blocks are, two zeros; of the full tiles, then of the partial ones, the
    end of their runs, how many there are, and start and count of the last.

    The last block of a kind is visited first: of the partial ones, so that no full one is masked
    in vain; but where blocks may reach past the end, of the full ones, since then only this one
    does. Of a line with no live tile it is the first block, which the mask empties.

    - `sub`: ranks of a line; `length`: of keys; `block`: keys of a block; `rows`: of a rank.
    """
    (of_full, *full), (of_partial, *partial) = walk.full, walk.partial
    # One run more, which a line without runs has.
    start = torch.cat([full[0], partial[0], full[0].new_zeros(1)])
    count = torch.cat([full[1], partial[1], full[1].new_ones(1)])
    first = start * walk.step
    blocks = ((first + count * walk.step).clamp_max(length) - first + block - 1) // block
    blocks[-1] = 1
    before = blocks.cumsum(0) - blocks
    line = walk.order.long()
    offsets = torch.stack([of_full, of_partial + len(full[0])])
    begin, end = offsets[:, line], offsets[:, line + 1]
    runs = end - begin
    visited = (before[end] - before[begin]).sum(0).clamp_min(1)
    last = torch.where(runs > 0, end - 1, len(start) - 1)
    from_full = runs[1] == 0 if length % block == 0 else runs[0] > 0
    of_full, of_partial = (first + (blocks - 1) * block)[last]
    row = torch.where(from_full, of_full, of_partial)
    end[1] -= len(full[0])
    tile, group, zero = line % walk.tile_rows, line // walk.tile_rows, torch.zeros_like(line)
    of_head = group % walk.h, group // walk.h
    found = [tile * sub, tile * walk.size, *of_head, row, visited, zero, zero]
    found += [x[kind] for kind in (0, 1) for x in (end, runs, start[last], count[last])]
    several = torch.arange(sub, device=line.device)[:, None]
    of_sub = torch.cat([several, several * rows, several.new_zeros(sub, COLUMNS - 2)], 1)
    return (torch.stack(found, 1)[:, None] + of_sub).to(torch.int32).view(-1, COLUMNS)
