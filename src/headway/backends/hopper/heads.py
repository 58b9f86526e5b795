"""Which visits of a block of queries are the first and the last of its head, for kernels whose CTAs
take whole heads (kernel_backward_heads.py)."""

import torch
from torch import Tensor

from ...blocks.runs import Runs
from ..base import Call
from ..kernels.plan import Walk, Walks
from . import kernel_backward_heads as kernel
from . import tile

ROWS = tile.ROWS.value  # queries of a block
VISIT, FIRST, LAST = kernel.VISIT.value, kernel.FIRST.value, kernel.LAST.value


class Heads:
    """The walks of a plan, with the kinds of their visits.

    - `length`: of queries.
    """

    def __init__(self, walks: Walks, length: int) -> None:
        self.walks, self.length = walks, length
        self.made: tuple[Walk, Tensor, bool] | None = None

    def __call__(self, call: Call) -> tuple[Walk, Tensor, bool]:
        """The walk for a call, its kinds, and whether every block is visited."""
        walk = self.walks(call)
        if self.made is None or self.made[0] is not walk:
            found = kinds(walk, self.walks.sub, self.length, self.walks.plan.device)
            self.made = walk, found, bool((found >= LAST).any(1).all())
        return self.made


def kinds(walk: Walk, sub: int, length: int, device: torch.device) -> Tensor:
    """Of every rank of a head and block of queries, int32 `(heads of the mask, ranks, blocks)`: 0,
    or VISIT, and FIRST and LAST in the order of ranks. A line with no live tile visits its first.

    - `sub`: ranks of a line; `length`: of queries.
    """
    tiles, blocks = -(-length // walk.step), -(-length // ROWS)
    if walk.full is None:
        seen = torch.ones(walk.lines, tiles, dtype=torch.bool, device=device)
    else:
        seen = Runs(*walk.full).dense(tiles) | Runs(*walk.partial).dense(tiles)
        seen[:, 0] |= ~seen.any(1)
    seen = seen.view(-1, walk.lines, tiles).repeat_interleave(sub, 1)
    seen = seen.repeat_interleave(walk.step // ROWS, 2)[..., :blocks].int()
    so_far = seen.cumsum(1)
    first, last = so_far == 1, so_far == so_far[:, -1:]
    return (seen * (VISIT + FIRST * first + LAST * last)).to(torch.int32)
