"""The work-tile table of a block mask, computed once: the forward's scheduler reads one row of it,
where it would follow offsets to runs while the other partitions wait.
"""

import torch
from torch import Tensor

from ...base import Call
from ...gpu.runtime.call_plan import Walk, Walks
from ...gpu.runtime.device_guard import keep_alive, outside_capture
from . import context

COLUMNS, RUNS = context.TABLE_COLUMNS.value, context.TABLE_RUNS.value


class TileTable:
    """The walks of a plan, with a work-tile table (`table`) in the place of their `order`.

    - `length`, `block`, `rows`: as for `table`.
    """

    def __init__(self, walks: Walks, length: int, block: int, rows: int) -> None:
        self.walks, self.sizes = walks, (length, block, rows)
        self.made: tuple[Walk, Walk] | None = None  # a walk, and that with its table

    def __call__(self, call: Call) -> Walk:
        """The walk for a call."""
        walk = self.walks(call)
        if walk.full is None:
            return walk
        device = self.walks.plan.device
        if self.made is None or self.made[0] is not walk:
            made = outside_capture(device, lambda: table(walk, self.walks.sub, *self.sizes))
            self.made = walk, walk._replace(order=made)
        found = self.made[1]
        keep_alive(device, [found.order])
        return found


def table(walk: Walk, sub: int, length: int, block: int, rows: int) -> Tensor:
    """Every work tile in the order of work, int32 `(tiles, COLUMNS)`: `context.TableEntry`, and
    from column RUNS on `KVRuns` (device/work_tile.py).

    The last block of a kind is visited first: of the partial tiles, so that no full block is masked
    in vain; but where blocks may reach past the end, of the full ones, since then only this block
    does. A row with no live tile visits its first block, which the mask empties.

    - `sub`: work tiles of one tile of the mask; `rows`: queries of a work tile.
    - `length`: of keys; `block`: keys of a KV block.
    """
    (of_full, *full), (of_partial, *partial) = walk.full, walk.partial
    # All runs, and one more for rows that have none.
    start = torch.cat([full[0], partial[0], full[0].new_zeros(1)])
    count = torch.cat([full[1], partial[1], full[1].new_ones(1)])
    first = start * walk.step
    blocks = ((first + count * walk.step).clamp_max(length) - first + block - 1) // block
    blocks[-1] = 1
    before = blocks.cumsum(0) - blocks
    tile_row = walk.order.long()
    offsets = torch.stack([of_full, of_partial + len(full[0])])
    begin, end = offsets[:, tile_row], offsets[:, tile_row + 1]
    runs = end - begin
    visited = (before[end] - before[begin]).sum(0).clamp_min(1)
    last = torch.where(runs > 0, end - 1, len(start) - 1)
    from_full = runs[1] == 0 if length % block == 0 else runs[0] > 0
    last_full, last_partial = (first + (blocks - 1) * block)[last]
    first_block = torch.where(from_full, last_full, last_partial)
    end[1] -= len(full[0])
    tile, of_mask = tile_row % walk.tile_rows, tile_row // walk.tile_rows
    head, batch = of_mask % walk.h, of_mask // walk.h
    entry = context.TableEntry(
        tile * sub, tile * walk.size, head, batch, first_block, visited
    )  # fmt: skip
    found = [*entry, *[torch.zeros_like(tile_row)] * (RUNS - len(entry))]
    found += [x[kind] for kind in (0, 1) for x in (end, runs, start[last], count[last])]
    subtile = torch.arange(sub, device=tile_row.device)[:, None]
    of_sub = torch.cat([subtile, subtile * rows, subtile.new_zeros(sub, COLUMNS - 2)], 1)
    return (torch.stack(found, 1)[:, None] + of_sub).to(torch.int32).view(-1, COLUMNS)
