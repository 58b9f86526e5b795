"""The work-tile table of a block mask, computed once. The forward's scheduler reads one row of it
for a work tile, and need not follow offsets to runs while the other partitions wait.
"""

import torch
from torch import Tensor

from ...base import Call
from ...gpu.runtime.call_plan import TileSchedule, TileSchedules
from ...gpu.runtime.device_guard import keep_alive, outside_capture
from . import context

COLUMNS, RUNS = context.TABLE_COLUMNS.value, context.TABLE_RUNS.value


class TileTable:
    """The schedules of a plan, with a work-tile table in the place of their `order`.

    - `kv_len`, `block`, `rows`: as for `tile_table`.
    """

    def __init__(self, schedules: TileSchedules, kv_len: int, block: int, rows: int) -> None:
        self.schedules, self.sizes = schedules, (kv_len, block, rows)
        self.cached: tuple[TileSchedule, TileSchedule] | None = (
            None  # a schedule, without and with its table
        )

    def __call__(self, call: Call) -> TileSchedule:
        """Return the schedule for a call."""
        schedule = self.schedules(call)
        if schedule.full is None:
            return schedule
        device = self.schedules.plan.device
        if self.cached is None or self.cached[0] is not schedule:
            table = outside_capture(device, lambda: self._table(schedule))
            self.cached = schedule, schedule._replace(order=table)
        schedule_with_table = self.cached[1]
        keep_alive(device, [schedule_with_table.order])
        return schedule_with_table

    def _table(self, schedule: TileSchedule) -> Tensor:
        """Make the table. On a GPU a process would load 20 of PyTorch's kernels for it, 0.2 s of a
        first call; where one table is enough for all calls, it is made on the CPU."""
        device = self.schedules.plan.device
        if device.type == "cuda" and self.schedules.plan.constant_tiles:
            schedule, _ = schedule.of([tensor.cpu() for tensor in schedule.tensors()])
        return tile_table(schedule, self.schedules.sub, *self.sizes).to(device)


def tile_table(schedule: TileSchedule, sub: int, kv_len: int, block: int, rows: int) -> Tensor:
    """Return all work tiles in the order of work, int32 `(tiles, COLUMNS)`: `context.TableEntry`,
    and from column RUNS on `KVRuns` (device/work_tile.py).

    The last block of a kind is visited first: of the partial tiles, so that no full block is masked
    in vain; but where blocks may reach past the end, of the full ones, since then only this block
    does. A row with no live tile visits its first block, which the mask empties.

    - `sub`: work tiles of one tile of the mask; `rows`: queries of a work tile.
    - `block`: keys of a KV block.
    """
    (full_offsets, *full), (partial_offsets, *partial) = schedule.full, schedule.partial
    # All runs, and one more for rows that have none.
    start = torch.cat([full[0], partial[0], full[0].new_zeros(1)])
    count = torch.cat([full[1], partial[1], full[1].new_ones(1)])
    first = start * schedule.step
    blocks = ((first + count * schedule.step).clamp_max(kv_len) - first + block - 1) // block
    blocks[-1] = 1
    blocks_before = blocks.cumsum(0) - blocks
    tile_row = schedule.order.long()
    offsets = torch.stack([full_offsets, partial_offsets + len(full[0])])
    begin, end = offsets[:, tile_row], offsets[:, tile_row + 1]
    runs = end - begin
    visited = (blocks_before[end] - blocks_before[begin]).sum(0).clamp_min(1)
    last_run = torch.where(runs > 0, end - 1, len(start) - 1)
    from_full = runs[1] == 0 if kv_len % block == 0 else runs[0] > 0
    last_full, last_partial = (first + (blocks - 1) * block)[last_run]
    first_block = torch.where(from_full, last_full, last_partial)
    end[1] -= len(full[0])
    tile, mask_head = tile_row % schedule.tile_rows, tile_row // schedule.tile_rows
    head, batch = mask_head % schedule.h, mask_head // schedule.h
    entry = context.TableEntry(
        tile * sub, tile * schedule.size, head, batch, first_block, visited
    )  # fmt: skip
    columns = [*entry, *[torch.zeros_like(tile_row)] * (RUNS - len(entry))]
    runs_of_rows = end, runs, start[last_run], count[last_run]
    columns += [x[kind] for kind in (0, 1) for x in runs_of_rows]
    subtile = torch.arange(sub, device=tile_row.device)[:, None]
    subtile_offsets = torch.cat([subtile, subtile * rows, subtile.new_zeros(sub, COLUMNS - 2)], 1)
    return (torch.stack(columns, 1)[:, None] + subtile_offsets).to(torch.int32).view(-1, COLUMNS)
