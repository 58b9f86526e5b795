"""The plan of a backward: which kernel, the order of work, memory for dQ, descriptors, launches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....mods.evaluation.derivative import joint
from ....types import Spec
from ...base import Call, graphs
from ...gpu.codegen.dependence import finite_past_the_end
from ...gpu.outputs import memory_for
from ...gpu.preprocess import BackwardWorkspace
from ...gpu.runtime.call_plan import TileSchedules
from ...gpu.runtime.launcher import KernelLauncher
from ...gpu.runtime.tile_counter import zeroed_counter
from ..bias_tables import BiasTables
from ..config import (
    BWD_START_REGISTERS,
    BWD_TILE_SHAPES,
    WIDE_START_REGISTERS,
    BwdKernelConfig,
    BwdTileShape,
    first_fit,
    ptxas_options,
)
from ..launch_plan import DEVICE, HopperPlan
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
from .common import CHUNK, CHUNK_SIZE, COUNTERS, postprocess_dq
from .document_order import WAVES, DocumentSchedules
from .dq_semaphore import DqSemaphore, MaskedDqSemaphore, OrderedSchedules
from .dq_zero import ZERO_ROWS
from .kernel import backward as backward_kernel
from .segment_table import MAX_BLOCKS, ROWS, Segments, SegmentSchedule
from .wide import backward_wide

# Bytes of dQ-accum of all CTAs that own segments; with what else is read, the L2 has 50 MB. (Timed
# on an H200: 17 MB 0.79 of the time without segments, 34 MB 1.12; causal, which visits half, 34 MB
# 0.92, 69 MB 1.16.)
SEGMENT_ACCUM_BYTES = 20 << 20
# How much longer CTAs that own segments may take than if all ended at once.
SEGMENT_IDLE = 1 / 8


class BackwardPlan(HopperPlan):
    """The plan of the backward for calls of one kind."""

    # In this order Triton works out the keys of its cache.
    sources = (
        *DEVICE, common, dq, mainloop, dq_zero, dq_reduce, epilogue, segments, producer, kernel,
        wide_dq, wide,
    )  # fmt: skip
    owned_segments: SegmentSchedule | None = None  # where CTAs own segments
    segment_plan: "SegmentPlan"  # where some calls of the kind have segments that suit

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]
    ) -> None:
        super().__init__(spec, call, wanted, matrices)
        shape = self._tile_shape(spec)
        self.is_wide = shape.keys == 64  # bwd/wide.py
        self._plan_heads(spec)
        self._plan_schedules(spec, shape, wanted)
        self._plan_segments(spec, shape)
        self._plan_grid(spec)
        self._plan_arguments(spec, shape)
        self._plan_launches(spec, shape, wanted)

    def _tile_shape(self, spec: Spec) -> BwdTileShape:
        """Return the tile shape of the kernel."""
        faster = self.gathers_per_pair if max(self.d, self.dv) > 64 else self.is_long()
        # Dropout needs registers, too.
        pipelined = spec.score is None and faster and not spec.dropout
        shapes = (shape for shape in BWD_TILE_SHAPES if pipelined or not shape.pipelined)
        return first_fit(shapes, self.d, self.dv)

    def _plan_heads(self, spec: Spec) -> None:
        """Choose which query heads share dK and dV, and the shapes of these."""
        group = self.hq // self.hk
        # The query heads of a key head stay in one CTA, if all have the same mask.
        self.share = group if self.heads_share_mask else 1
        self.heads = self.hq // self.share  # of dK and dV
        self.float32_out = spec.partial or spec.exact_kv or self.share < group
        widths = [w if self.float32_out else -(-w // 8) * 8 for w in (self.d, self.dv)]
        self.grads = [(self.b, self.heads, self.kv_len, n) for n in widths]
        self.grads_dtype = torch.float32 if self.float32_out else self.dtype
        # Whether they are the results as they are.
        self.exact = not self.float32_out and widths == [self.d, self.dv]

    def _plan_schedules(self, spec: Spec, shape: BwdTileShape, wanted: tuple[int, ...]) -> None:
        """Choose the tile columns, and what they visit."""
        waves, schedules_class = 1, TileSchedules
        if self.tile is not None and self.compares_captures():
            waves, schedules_class = WAVES, DocumentSchedules
            if spec.tiles is None:
                # Where documents begin anywhere, finer tiles leave out more.
                self.tile = shape.block, self.tile[1]
        swizzle = self.head_swizzle(self.heads, -(-self.kv_len // shape.keys), waves)
        self.schedules = (
            schedules_class(self, queries=False, block=shape.keys, swizzle=swizzle)
            if self.owned_segments is None
            else self.owned_segments.schedules
        )
        self.bias_tables = BiasTables(self, self.schedules, wanted, queries=False)
        self.q_rows = -(-self.q_len // shape.block) * shape.block
        self.columns = sum(shape.d)

    def _plan_segments(self, spec: Spec, shape: BwdTileShape) -> None:
        """Find out whether CTAs may own segments, and how long those may be."""
        owns = self.owned_segments is not None
        # Their dQ-accum is to stay in the cache.
        block_bytes = 4 * self.share * ROWS * self.columns * self.processors
        budget = SEGMENT_ACCUM_BYTES if self.mask is None else 2 * SEGMENT_ACCUM_BYTES
        self.max_blocks = min(budget // block_bytes, MAX_BLOCKS)
        able = not (owns or self.is_wide or shape.pipelined or spec.partial) and len(shape.d) == 1
        heads = self.b * self.heads
        self.segments = (
            SegmentSchedule(self.schedules, heads, self.q_len, self.suits) if able else None
        )

    def _plan_grid(self, spec: Spec) -> None:
        """Count the work tiles, and choose in which order CTAs take them and add to dQ."""
        ordered = spec.deterministic and self.owned_segments is None
        self.ordered = OrderedSchedules(self.schedules, self.q_len) if ordered else None
        tiles_per_head = self.schedules.tile_rows * self.schedules.sub
        work_tiles = self.b * self.heads * tiles_per_head
        self.ctas = work_tiles if self.is_wide else min(work_tiles, self.processors)
        # Those that CTAs take from a counter.
        self.work_tiles = None if self.is_wide else work_tiles
        # The shortest columns come last: 8k takes 0.986 of the time at 64 columns, 0.992 at 128, 5k
        # 0.975. A fourth of all for a sixth: 5k 0.95, but 1k 1.03, where many add to the same dQ at
        # once.
        shortest_last = self.is_causal() and not spec.deterministic
        self.last_columns = int(shortest_last) * tiles_per_head // 6

    def _plan_arguments(self, spec: Spec, shape: BwdTileShape) -> None:
        """Make the descriptors, and the numbers that the kernel takes."""
        # A known gain multiplies dK and dQ, and not every pair.
        self.rate = spec.scale if self.score_gain is None else self.score_gain * spec.scale
        self.scalars = (
            self.hq, self.hq // self.hk, self.share, self.q_len, self.q_rows, self.kv_len, self.d,
            self.dv, spec.scale, self.rate,
        )  # fmt: skip
        self.q, self.dout = matrix_tiles(shape.block, shape.d), matrix_tiles(shape.block, shape.dv)
        self.k, self.v, self.dk, self.dv_ = (matrix_tiles(ROWS, w) for w in (shape.d, shape.dv) * 2)
        self.lse, self.neg_delta, self.neg_dentropy = (row_vectors(shape.block) for _ in range(3))
        # Pieces of dQ-accum as a consumer stores them, 64 x 64 numbers or half of them. The wide
        # kernel needs no descriptor.
        first_rows = shape.block * min(self.columns, 128) // 512
        self.dq_accum = (
            (lambda x: (x, None))
            if self.is_wide
            else dq_tiles(first_rows, 8 if len(shape.d) == 2 else 0)
        )
        # Where there is shared memory for it, the kernel itself zeroes dQ-accum.
        owns = self.owned_segments is not None
        zeroing = not (owns or self.is_wide) and len(shape.d) == 1
        self.zero_rows = dq_tiles(ZERO_ROWS.value) if zeroing else None
        rows = min(self.q_rows, self.max_blocks * ROWS)
        self.segment_accum = self.ctas * self.share * rows * self.columns  # numbers
        self.segment_dq = matrix_tiles(shape.block, (self.columns // 2,))

    def _plan_launches(self, spec: Spec, shape: BwdTileShape, wanted: tuple[int, ...]) -> None:
        """Make the launchers of the three kernels: before, the backward itself, and after."""
        owns = self.owned_segments is not None
        out_shape, columns = (self.b, self.hq, self.q_len, self.dv), 0 if owns else self.columns
        self.workspace = BackwardWorkspace(
            out_shape, self.q_rows, columns, self.device, self.zero_rows is not None,
            negative=True, entropy=spec.entropy,
        )  # fmt: skip
        options = {
            "DERIVATIVE": self.function("derivative"), "SCATTER": self.function("scatter"),
            "MASK": self.function("mask"), "CONFIG": self._config(spec, shape, wanted),
        }  # fmt: skip
        kernel, registers = (
            (backward_wide, WIDE_START_REGISTERS)
            if self.is_wide
            else (backward_kernel, BWD_START_REGISTERS)
        )
        options |= ptxas_options(registers, shape.register_usage_level)
        self.kernel = KernelLauncher(kernel, self.device, options, self.ctas, self.arrange)
        strips = self.columns // CHUNK.value
        chunks = self.b * self.hq * self.q_rows * self.columns // CHUNK_SIZE.value
        self.postprocess = KernelLauncher(
            postprocess_dq, self.device, {"STRIPS": strips}, chunks, self.arrange_postprocess
        )

    def _config(self, spec: Spec, shape: BwdTileShape, wanted: tuple[int, ...]) -> BwdKernelConfig:
        """Return the configuration that the kernel is compiled for."""
        return BwdKernelConfig(
            block=shape.block, stages=shape.stages, subtiles=self.schedules.sub,
            index_type=self.index_type, straight=self.straight,
            even_kv=self.kv_len % (shape.keys * self.schedules.sub) == 0,
            dp_after_p=self.gathers_per_pair,
            scarce_smem=len(shape.d) == 2, deterministic=self.ordered is not None,
            pipelined=shape.pipelined, owns_segment=self.owned_segments is not None,
            named_barriers=shape.named_barriers, constant_dscore=self.score_gain is not None,
            unbounded_dscore=spec.score is not None and joint(spec.score, wanted).unbounded,
            entropy=spec.entropy, score_past_end=self._undefined_past_the_end(shape.block),
            relative_biases=len(self.bias_tables.depends), in_sixteens=self.in_sixteens,
            bias_grads=self.bias_tables.grad_tables, exact_width=self.exact_sums.width,
            **self.affine, **self.hoisted,
        )  # fmt: skip

    def _undefined_past_the_end(self, block: int) -> bool:
        """Return whether there are queries past the end, for which the score may be NaN."""
        score, _ = graphs(self.spec)
        return score is not None and self.q_len % block > 0 and not finite_past_the_end(score)

    def suits(self, segments: Segments) -> bool:
        """Return whether CTAs shall own segments: their dQ-accum stays in the cache, and few CTAs
        idle."""
        fits = segments.span <= self.max_blocks
        return fits and segments.balanced(self.processors, SEGMENT_IDLE)

    def with_segments(self, spec: Spec, call: Call, *arguments: Any) -> "BackwardPlan":
        """Return the plan for a call whose segments suit, or this plan."""
        if self.segments is None or self.segments(call) is None:
            return self
        if not hasattr(self, "segment_plan"):
            self.segment_plan = SegmentPlan(self.segments, spec, call, *arguments)
        return self.segment_plan

    def new_key_grads(self, call: Call) -> tuple[Tensor, Tensor]:
        """Allocate dK and dV, with spare columns where TMA needs rows of whole 16 bytes."""
        dk, dv = self.grads
        return memory_for(call, 1, dk, self.grads_dtype), memory_for(call, 2, dv, self.grads_dtype)

    def launch(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, workspace: Tensor,
        dk: Tensor, dv: Tensor, grads: tuple,
    ) -> Tensor:  # fmt: skip
        """Write dK and dV (from `new_key_grads`), and add to `grads`. **Returns:** dQ."""
        segment: tuple[Tensor, ...] = ()
        seed = self.seed_of(call)
        if self.owned_segments is not None:
            work = self.owned_segments(call)
            assert work is not None
            call_args = self.call_arguments(
                call, self.schedules, *seed, work.visit_bits, work.items, schedule=work.schedule
            )
            shape = *q.shape[:3], -(-self.d // 8) * 8
            dq = memory_for(call, 0, shape, self.dtype)
            if not work.everywhere:
                dq.zero_()
            segment = torch.empty(self.segment_accum, dtype=torch.float32, device=self.device), dq
        elif self.ordered is None:
            call_args = self.known_arguments(self.schedules) or self.call_arguments(
                call, self.schedules, *seed
            )
        else:
            chunks = self.b * self.hq * self.q_rows // CHUNK.value
            counters = workspace.new_zeros(chunks * COUNTERS.value, dtype=torch.int32)
            schedule, semaphore = self.ordered(call, counters)
            call_args = self.call_arguments(
                call, self.schedules, *seed, *semaphore, schedule=schedule
            )
        counter = () if self.work_tiles is None else (zeroed_counter(self.device),)
        bands, sums = self.bias_tables.fill(call_args), self.bias_tables.new_sums()
        operands = q, k, v, dout, workspace, dk, dv, *counter, *segment, *bands, *sums, *grads
        self.launch_kernel(operands, call_args)
        self.bias_tables.collect(sums, grads, call_args)
        if segment:
            return segment[1]
        dtype, _ = self.spec.grad_dtypes(self.dtype)
        dq = memory_for(call, 0, tuple(q.shape), dtype)
        self.postprocess((workspace, dq))
        return dq

    def arrange(
        self, operands: Sequence[Any], tensors: Sequence[Any], floats: Sequence[float]
    ) -> tuple:
        """Return the arguments of the kernel."""
        q, k, v, dout, workspace, dk, dv, *others = operands
        coords, schedule, captured, order_tensors = self.arranged(self.schedules, tensors, floats)
        dropout = self.dropout_of(order_tensors)
        neg_delta, lse2, dq_accum, zeroed_blocks, neg_dentropy = self.workspace.split(workspace)
        dentropy = (None,) if neg_dentropy is None else self.neg_dentropy(neg_dentropy)
        # The wide kernel has no parameters for segments, zeros and work tiles.
        counter: tuple[Any, ...] = ()
        segment: tuple[Any, ...] = ()
        zeros: tuple[Any, ...] = ()
        if self.work_tiles is not None:
            counter = others.pop(0), self.work_tiles, self.last_columns
            segment, zeros = (None, None, None), (None, None)
        semaphore = None
        if self.owned_segments is not None:
            dq_accum, dq, *others = others
            segment = self.segment_dq(dq[..., : self.d])[0], *order_tensors
        elif len(order_tensors) == 1:
            semaphore = DqSemaphore(*order_tensors)
        elif order_tensors:
            semaphore = MaskedDqSemaphore(*order_tensors)
        assert dq_accum is not None
        if self.zero_rows is not None:
            zeros = self.zero_rows(dq_accum)[0], zeroed_blocks
        bands, sums, grads = self.bias_tables.kernel_args(others)
        if self.float32_out:
            key_grads: tuple[Any, ...] = (None, None, None, dk, dv)
        else:
            key_grads = (*self.dk(dk[..., : self.d]), self.dv_(dv[..., : self.dv])[0], None, None)
        return (
            *self.q(q), *self.k(k), self.v(v)[0], self.dout(dout)[0], *self.lse(lse2),
            *self.neg_delta(neg_delta), *dentropy, *self.dq_accum(dq_accum), *segment, *zeros,
            *key_grads, grads, bands, sums, *counter, *self.scalars, coords, dropout, schedule,
            semaphore, *captured,
        )  # fmt: skip

    def arrange_postprocess(self, operands: Sequence[Any], *_: object) -> tuple:
        """Return the arguments of the kernel that makes dQ of dQ-accum."""
        workspace, dq = operands
        dq_accum = self.workspace.split(workspace)[2]
        return dq_accum, dq, self.rate, self.q_len, self.q_rows, self.d


class SegmentPlan(BackwardPlan):
    """The plan of the backward by CTAs that own segments."""

    def __init__(self, segments: SegmentSchedule, *arguments: Any) -> None:
        self.owned_segments = segments
        super().__init__(*arguments)
