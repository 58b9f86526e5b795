"""The plan of a backward: which kernel, the order of work, memory for dq, descriptors, launches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....mods.derivative import joint
from ....types import Spec
from ...base import Call
from ...gpu.preprocess import BackwardWorkspace
from ...gpu.runtime.call_plan import Walks
from ...gpu.runtime.launcher import KernelLauncher
from ..bias_tables import BiasTables
from ..config import BACKWARD, How, first_fit, ptxas_options
from ..launch_plan import DEVICE, Plan
from ..tile_counter import zeroed_counter
from ..tma import dq_tiles, matrix_tiles, row_vectors
from . import (
    common,
    dq,
    dq_reduce,
    dq_zero,
    epilogue,
    kernel,
    mainloop,
    producer,
    segments,
    wide,
    wide_dq,
)  # fmt: skip
from .common import finish
from .dq_semaphore import Alike, Ordered, Turns
from .dq_zero import LINES
from .kernel import backward as backward_kernel
from .segment_table import MARKED, ROWS, Segments, SegmentWalk
from .wide import backward_wide

# Registers that every thread of a kernel starts with; the loader's share goes to the consumers.
_SPECIALISED = 168
_ALONE = 128  # with a third consumer

# Bytes of the parts of dq of all CTAs that take whole islands; with what else is read, the L2 has
# 50 MB. (Timed on an H200: 17 MB 0.79 of the time without, 34 MB 1.12; causal, which visits half,
# 34 MB 0.92, 69 MB 1.16.)
PARTS = 20 << 20
IDLE = 1 / 8  # how much longer CTAs that take islands may be at work than if all ended at once


class BackwardPlan(Plan):
    """The backward."""

    sources = (
        *DEVICE, common, dq, mainloop, dq_zero, dq_reduce, epilogue, segments, producer, kernel,
        wide_dq, wide,
    )  # fmt: skip
    by_island: SegmentWalk | None = None  # where CTAs take whole ones
    other: "IslandPlan"  # where some calls of the kind have islands that suit

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]
    ) -> None:
        super().__init__(spec, call, wanted, matrices)
        group = self.hq // self.hk
        lagged = spec.score is None and (
            self.gathers_per_pair if max(self.d, self.dv) > 64 else self.is_long()
        )
        rows = BACKWARD if lagged else tuple(row for row in BACKWARD if not row.pipelined)
        how = first_fit(rows, self.d, self.dv)
        # The query heads of a key head stay in one CTA, where a mask is alike for them.
        share = group if self.heads_share_mask else 1
        self.heads = self.hq // share  # of dk and dv
        self.wide = spec.partial or share < group
        columns = [w if self.wide else -(-w // 8) * 8 for w in (self.d, self.dv)]
        self.grads = [(self.b, self.heads, self.kv_len, n) for n in columns]
        self.grads_dtype = torch.float32 if self.wide else self.dtype
        # Whether they are the results as they are.
        self.exact = not self.wide and columns == [self.d, self.dv]
        near = self.head_swizzle(self.heads, -(-self.kv_len // how.keys))
        if self.tile is not None and spec.tiles is None and self.compares_captures():
            # Where documents begin anywhere, finer tiles leave out more.
            self.tile = how.block, self.tile[1]
        whole = self.by_island is not None
        self.walks = (
            Walks(self, queries=False, block=how.keys, swizzle=near)
            if self.by_island is None
            else self.by_island.walks
        )
        self.bias_tables = BiasTables(self, self.walks, wanted, queries=False)
        self.q_rows = -(-self.q_len // how.block) * how.block
        self.columns = sum(how.d)
        heads, alone = self.b * self.heads, how.keys == 64
        # How many blocks of queries an island may have: their parts stay in the cache.
        each = 4 * share * ROWS * self.columns * self.processors
        self.room = min((PARTS if self.mask is None else 2 * PARTS) // each, MARKED)
        able = not (whole or alone or how.pipelined or spec.partial) and len(how.d) == 1
        self.islands = SegmentWalk(self.walks, heads, self.q_len, self.suits) if able else None
        self.ordered = Ordered(self.walks, self.q_len) if spec.deterministic and not whole else None
        ranks = heads * self.walks.tile_rows * self.walks.sub
        self.grid = (ranks if alone else min(ranks, self.processors), 1, 1)
        self.ranks = None if alone else ranks  # of a kernel whose CTAs take them from a counter
        # The shortest lines: 8k takes 0.986 of the time at 64 columns, 0.992 at 128, 5k 0.975. A
        # fourth of all for a sixth: 5k 0.95, but 1k 1.03, where many add to the same dq at once.
        last = self.is_causal() and not spec.deterministic
        self.last = int(last) * self.walks.tile_rows * self.walks.sub // 6
        # A known gain multiplies dk and dq, and not every pair.
        self.rate = spec.scale if self.score_gain is None else self.score_gain * spec.scale
        self.numbers = (
            self.hq, group, share, self.q_len, self.q_rows, self.kv_len, self.d, self.dv,
            spec.scale, self.rate,
        )  # fmt: skip
        self.q, self.dout = matrix_tiles(how.block, how.d), matrix_tiles(how.block, how.dv)
        self.k, self.v, self.dk, self.dv_ = (matrix_tiles(64, w) for w in (how.d, how.dv) * 2)
        self.lse, self.less_delta = row_vectors(how.block), row_vectors(how.block)
        # Pieces of dq as a consumer hands them over, 64 x 64 numbers or half of them; one for dq
        # alone needs no descriptor.
        first = how.block * min(self.columns, 128) // 512
        rows = min(self.q_rows, self.room * ROWS)
        self.numbers_of_parts = self.grid[0] * share * rows * self.columns
        self.dq = matrix_tiles(how.block, (self.columns // 2,))
        # Where there is shared memory for it, the kernel writes the zeros that dq is added to.
        zeroing = not (whole or alone) and len(how.d) == 1
        self.lines = dq_tiles(LINES.value) if zeroing else None
        self.parts = (
            (lambda x: (x, None)) if alone else dq_tiles(first, 8 if len(how.d) == 2 else 0)
        )
        options = {
            "DERIVATIVE": self.function("derivative"), "SCATTER": self.function("scatter"),
            "MASK": self.function("mask"),
            "HOW": How(
                how.block, how.stages, self.walks.sub, self.index_type,
                even_kv=self.kv_len % (how.keys * self.walks.sub) == 0,
                dp_after_p=self.gathers_per_pair, scarce_smem=len(how.d) == 2,
                deterministic=self.ordered is not None, pipelined=how.pipelined,
                owns_segment=whole, named_barriers=how.named_barriers,
                constant_dscore=self.score_gain is not None,
                unbounded_dscore=spec.score is not None and joint(spec.score, wanted).unbounded,
                relative_biases=len(self.bias_tables.depends),
                bias_grads=self.bias_tables.grad_tables,
                **self.affine, **self.hoisted,
            ),
        }  # fmt: skip
        kernel, each = (backward_wide, _ALONE) if alone else (backward_kernel, _SPECIALISED)
        options |= ptxas_options(each, how.register_usage_level)
        self.kernel = KernelLauncher(kernel, self.device, options, self.grid, self.arrange)
        shape = self.b, self.hq, self.q_len, self.dv
        columns, counted = 0 if whole else self.columns, self.lines is not None
        self.workspace = BackwardWorkspace(
            shape, self.q_rows, columns, self.device, counted, negative=True
        )
        strips = self.columns // 64
        grid = self.b * self.hq * self.q_rows * strips // 64, 1, 1
        self.finish = KernelLauncher(
            finish, self.device, {"STRIPS": strips}, grid, self.arrange_finish
        )

    def suits(self, islands: Segments) -> bool:
        """Whether CTAs take whole islands: what they add up stays in the cache, and few idle."""
        return islands.span <= self.room and islands.balanced(self.processors, IDLE)

    def suited(self, spec: Spec, call: Call, *given: Any) -> "BackwardPlan":
        """This plan, or the one for a call whose islands suit."""
        if self.islands is None or self.islands(call) is None:
            return self
        if not hasattr(self, "other"):
            self.other = IslandPlan(self.islands, spec, call, *given)
        return self.other

    def new(self) -> tuple[Tensor, Tensor]:
        """dk and dv, with spare columns where copies need rows of whole 16 bytes."""
        (dk, dv), dtype, device = self.grads, self.grads_dtype, self.device
        return (
            torch.empty(*dk, dtype=dtype, device=device),
            torch.empty(*dv, dtype=dtype, device=device),
        )

    def launch(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, workspace: Tensor,
        dk: Tensor, dv: Tensor, grads: tuple,
    ) -> Tensor:  # fmt: skip
        """Write dk and dv (from `new`), and add to `grads`. **Returns:** dq."""
        whole: tuple[Tensor, ...] = ()
        if self.by_island is not None:
            work = self.by_island(call)
            assert work is not None
            given = self.call_arguments(call, self.walks, work.marks, work.items, walk=work.walk)
            shape = *q.shape[:3], -(-self.d // 8) * 8
            dq = (torch.empty if work.everywhere else torch.zeros)(
                shape, dtype=self.dtype, device=self.device
            )
            whole = torch.empty(self.numbers_of_parts, dtype=torch.float32, device=self.device), dq
        elif self.ordered is None:
            given = self.known_arguments(self.walks) or self.call_arguments(call, self.walks)
        else:
            added = workspace.new_zeros(self.b * self.hq * self.q_rows // 16, dtype=torch.int32)
            walk, turns = self.ordered(call, added)
            given = self.call_arguments(call, self.walks, *turns, walk=walk)
        counter = () if self.ranks is None else (zeroed_counter(self.device),)
        bands, sums = self.bias_tables.fill(given), self.bias_tables.new_sums()
        own = q, k, v, dout, workspace, dk, dv, *counter, *whole, *bands, *sums, *grads
        self.launch_kernel(own, given)
        self.bias_tables.collect(sums, grads, given)
        if whole:
            return whole[1]
        dtype = torch.float32 if self.spec.partial else self.dtype
        dq = torch.empty(*q.shape, dtype=dtype, device=self.device)
        self.finish((workspace, dq))
        return dq

    def arrange(self, own: Sequence[Any], tensors: Sequence[Any], floats: Sequence[float]) -> tuple:
        """The arguments of the kernel."""
        q, k, v, dout, workspace, dk, dv, *rest = own
        ranks = () if self.ranks is None else (rest.pop(0), self.ranks, self.last)
        coords, walk, captured, added = self.arranged(self.walks, tensors, floats)
        less_delta, lse2, parts, zeroed = self.workspace.split(workspace)
        turns, whole = None, () if self.ranks is None else (None, None, None)
        zeros: tuple = () if self.ranks is None else (None, None)
        if self.by_island is not None:
            parts, dq, *rest = rest
            whole = self.dq(dq[..., : self.d])[0], *added
        elif added:
            turns = Alike(*added) if len(added) == 1 else Turns(*added)
        assert parts is not None
        if self.lines is not None:
            zeros = self.lines(parts)[0], zeroed
        bands, sums, grads = self.bias_tables.kernel_args(rest)
        if self.wide:
            to: tuple[Any, ...] = (None, None, None, dk, dv)
        else:
            to = (*self.dk(dk[..., : self.d]), self.dv_(dv[..., : self.dv])[0], None, None)
        return (
            *self.q(q), *self.k(k), self.v(v)[0], self.dout(dout)[0], *self.lse(lse2),
            *self.less_delta(less_delta), *self.parts(parts), *whole, *zeros, *to, grads, bands,
            sums, *ranks, *self.numbers, coords, walk, turns, *captured,
        )  # fmt: skip

    def arrange_finish(self, own: Sequence[Any], *_: object) -> tuple:
        """The arguments of the kernel that makes dq of its parts."""
        workspace, dq = own
        parts = self.workspace.split(workspace)[2]
        return parts, dq, self.rate, self.q_len, self.q_rows, self.d


class IslandPlan(BackwardPlan):
    """The backward by CTAs that take whole islands."""

    def __init__(self, islands: SegmentWalk, *given: Any) -> None:
        self.by_island = islands
        super().__init__(*given)
