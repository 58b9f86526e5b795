"""The order in which CTAs take the tile columns of documents.

Longest column first (LPT) would put columns of many documents side by side, each with queries of
its own, which then are read from memory and not from the L2 cache. So documents come one after the
other, the one with the longest column first: their columns are those whose queries end together.
Then as many heads as eight waves hold may be interleaved, and short documents of all of them come
last.
"""

import torch
from torch import Tensor

from ....blocks import Tiles
from ....blocks.runs import Runs, pick
from ...gpu.runtime.call_plan import TileSchedule, TileSchedules

WAVES = 8  # of CTAs, whose heads are interleaved


class DocumentSchedules(TileSchedules):
    """The schedules of a plan whose mask has documents."""

    def _of(self, tiles: Tiles, b: int, h: int) -> TileSchedule:
        schedule = super()._of(tiles, b, h)
        return schedule._replace(order=by_documents(schedule, self.plan.q_len))


def by_documents(schedule: TileSchedule, q_len: int) -> Tensor:
    """Return the tile columns of a schedule, document after document, int32."""
    full, partial = Runs(*schedule.full), Runs(*schedule.partial)
    width = -(-q_len // schedule.step) + 1
    work = full.per_row() + partial.per_row()
    end = torch.maximum(full.ends(), partial.ends())
    groups = full.rows // schedule.tile_rows * width
    group = torch.arange(full.rows, device=end.device) // schedule.tile_rows * width + end
    longest = work.new_zeros(groups).scatter_reduce(0, group, work, "amax")
    key = (pick(longest, group) * groups + groups - 1 - group) * width + work
    return key.argsort(descending=True, stable=True).to(torch.int32)
