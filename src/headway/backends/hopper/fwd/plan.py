"""The plan of a forward: tile shape, order of work, descriptors, and the launch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....blocks import TILE
from ....types import Spec
from ...base import Call, split
from ...gpu.runtime.call_plan import TileSchedules, consecutive
from ...gpu.runtime.launcher import KernelLauncher
from ...gpu.runtime.tile_counter import zeroed_counter
from ..bias_tables import BiasTables
from ..config import FWD_TILE_SHAPES, FwdKernelConfig, FwdTileShape, first_fit, ptxas_options
from ..device import mma
from ..launch_plan import DEVICE, HopperPlan
from ..tma import matrix_tiles
from . import combine, epilogue, half_blocks, kernel, producer, scheduler
from .half_block_table import HalfBlocks, half_block_table
from .kernel import forward as forward_kernel
from .stream_k import StreamKShares
from .tile_table import TileTable

ROWS = mma.ROWS.value  # queries of a consumer

# Three consumers may have this many queries past the end, for each one that exists.
PADDING = 1 / 16


class ForwardPlan(HopperPlan):
    """The plan of the forward for calls of one kind."""

    sources = *DEVICE, scheduler, producer, half_blocks, epilogue, combine, kernel
    uses_distance_sign = True

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]
    ) -> None:
        super().__init__(spec, call, wanted, matrices)
        self.tile_shape = shape = first_fit(filter(self.suits, FWD_TILE_SHAPES), self.d, self.dv)
        self.block = min(shape.block, 64) if self.gathers_per_pair else shape.block
        self.tile_rows = ROWS * shape.consumers  # of a work tile
        if self.tile_rows != TILE[0] and self.tile is not None and spec.tiles is None:
            self.tile = self.tile_rows, min(self.block, self.tile[1])
        self._order_work()
        self._share_work()
        self._describe_operands()
        options = {
            "SCORE": self.function("score"), "MASK": self.function("mask"),
            "CONFIG": self._config(call),
        }  # fmt: skip
        options |= ptxas_options(shape.registers[0], shape.register_usage_level)
        self.kernel = KernelLauncher(forward_kernel, self.device, options, self.ctas, self.arrange)

    def _order_work(self) -> None:
        """Choose the order of work tiles, and the tables that describe them to the kernel."""
        shape = self.tile_shape
        # Without a mask, CTAs of one head side by side read the same keys at the same time, which
        # multiprocessors that are close to each other then get at once.
        # Under masks that leave tile rows of any length, several waves leave shorter work tiles for
        # the end (documents are 4 % faster with four than with two). Of causal ones the shortest
        # come last anyway (8k takes 0.97 of the time at 64 columns, 0.993 at 128).
        waves = 1 if self.is_causal() and shape.consumers > 1 else 4
        swizzle = self.hq // self.hk
        if self.mask is not None:
            swizzle = self.head_swizzle(self.hq, -(-self.q_len // self.tile_rows), waves)
        self.schedules = TileSchedules(self, queries=True, block=self.tile_rows, swizzle=swizzle)
        self.tile_table = TileTable(self.schedules, self.kv_len, self.block, self.tile_rows)
        self.bias_tables = BiasTables(self, self.schedules, queries=True)
        self.tiles_per_head = self.schedules.tile_rows * self.schedules.sub
        self.max_logit_parts = shape.consumers * self.tiles_per_head  # of one head

    def _share_work(self) -> None:
        """Count tickets, and stream-K's shares of the last work tiles."""
        shape = self.tile_shape
        ctas = shape.ctas * self.processors
        blocks = max(-(-self.kv_len // self.block), 1) if self.mask is None else 0
        tiles = self.tiles_per_head * self.b * self.hq
        self.shares = shares = StreamKShares.of(tiles, blocks, ctas, shape)
        parts = shares.tickets - shares.whole_tiles
        # Numbers of all parts: a row of acc, then m, l, max_s and moment.
        self.partials = parts * shape.consumers * ROWS * (sum(shape.dv) + 4)
        # Of a causal mask, the shortest quarter of all tile rows comes after those of all heads.
        shortest_last = self.is_causal() and (shape.consumers > 1 or self.is_long())
        last_rows = int(shortest_last) * self.tiles_per_head // 4
        tickets, *stream_k = shares
        self.scheduler_args = tickets, last_rows, *stream_k
        self.ctas = min(tickets, ctas)

    def _describe_operands(self) -> None:
        """Describe the operands: TMA descriptors, and sizes."""
        shape = self.tile_shape
        self.sizes = (
            self.hq, self.hq // self.hk, self.q_len, self.kv_len, self.dv, self.spec.scale,
        )  # fmt: skip
        out_columns = (shape.out_columns,) if shape.out_columns else shape.dv
        self.q, self.out = matrix_tiles(ROWS, shape.d), matrix_tiles(ROWS, out_columns)
        self.k, self.v = matrix_tiles(self.block, shape.d), matrix_tiles(self.block, shape.dv)
        self.wide = self.spec.out_dtype(self.dtype) != self.dtype  # out is float32, without TMA
        # TMA stores need rows of whole 16 bytes.
        self.padding_columns = 0 if self.wide else -self.dv % 8

    def _config(self, call: Call) -> FwdKernelConfig:
        """Return the configuration that the kernel is compiled for."""
        shape, spec = self.tile_shape, self.spec
        return FwdKernelConfig(
            block=self.block, stages=shape.stages, subtiles=self.schedules.sub,
            index_type=self.index_type, straight=self.straight, positive_scale=spec.scale > 0,
            even_kv=self.kv_len % self.block == 0,
            v_stages=shape.v_stages, q_stages=shape.q_stages,
            early_q_release=shape.early_q_release, q_in_registers=shape.q_in_registers,
            slope_mma=shape.slope_mma, named_barriers=shape.named_barriers,
            first_block_in_loop=shape.first_block_in_loop, stream_k=self.shares.share_blocks > 0,
            consumers=shape.consumers, registers=shape.registers[1],
            half_blocks=self.coverage(call),
            scarce_smem=shape.ctas == 2,  # 244 bytes are left of a CTA's half
            track_max=spec.max_logit and spec.score is not None,
            relative_biases=len(self.bias_tables.depends), in_sixteens=self.in_sixteens,
            **self.affine, **self.hoisted,
        )  # fmt: skip

    # -- which tile shape -------------------------------------------------------------------------

    def suits(self, shape: FwdTileShape) -> bool:
        """Return whether a tile shape is for such calls."""
        if shape.consumers == 3:
            return self.wants_three_consumers() and not self.spec.dropout
        if shape.consumers == 1:
            return self.wants_one_consumer(sum(shape.d))
        if shape.slope_mma:
            return self.has_slope()
        if shape.q_in_registers:
            return self.spec.score is None and self.mask is None and not self.spec.dropout
        return not shape.named_barriers or self.spec.score is not None  # a mask alone loses 1 %

    def has_slope(self) -> bool:
        """Return whether a score is a multiple of S and a straight line, and S alone is not asked
        for: no register holds it then."""
        line = bool(self.affine) and self.affine["monotone"] and self.generated.slope_only
        return line and not self.spec.max_logit

    def wants_one_consumer(self, width: int) -> bool:
        """Return whether a work tile has 64 queries, in one of several CTAs of a multiprocessor.

        It does under a mask, where blocks of 64 keys leave out more, and where tile rows are short,
        so that most instructions are fetched and not repeated. Timed on an H200: 64 wide, causal
        256 and 512 take 0.7 of the time of two consumers, 2k and a window in 8k 0.96; without a
        mask 1.0 to 1.3. 128 wide, causal 512 0.92, documents of 700 0.76, causal 1k 1.05, a window
        1.1."""
        masked = self.spec.score is None and self.mask is not None and not self.gathers_per_pair
        return masked and (width <= 64 or self.kv_len <= 512 or self.compares_captures())

    def wants_three_consumers(self) -> bool:
        """Return whether a work tile has 192 queries: few are past the end, no score wants
        registers, and tile rows are long (timed on an H200: 8k causal gains 7 %, 1k loses half)."""
        length = self.q_len
        long = self.spec.score is None and self.is_long(2048 if self.mask is None else 8192)
        return long and -length % 192 <= PADDING * length

    def coverage(self, call: Call) -> HalfBlocks:
        """Return the half-block coverage of partial blocks, if it is known ahead of a work tile.

        It is for masks that compare positions and are the same for all calls of the kind, where
        mask tiles are blocks of two consumers."""
        compares = self.spec.tiles is None and self.hoisted["mask_pairs"] is not None
        captured = split(self.spec, call.captured)[1]
        fixed = not (captured.tensors or captured.floats) and consecutive(call.coords)
        rows = ROWS * self.tile_shape.consumers
        blocks = self.tile == (rows, self.block) == TILE and self.kv_len % self.block == 0
        if not (compares and fixed and blocks):
            return ()
        if self.tile_shape.first_block_in_loop or self.bias_tables.depends:
            return ()
        assert self.mask is not None
        call_shape = self.b, self.hq, self.q_len, self.kv_len
        return half_block_table(self.mask, captured, call_shape, TILE, call.coords)

    # -- a call -----------------------------------------------------------------------------------

    def launch(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        row_max: Tensor | None, max_logit: Tensor | None, entropy: Tensor | None,
    ) -> None:  # fmt: skip
        """Write out and lse; and, where they are not None, row_max, the entropy, and the largest
        logit of every consumer's part of every work tile."""
        sink = None if call.sink is None else call.sink.contiguous()
        padded = out
        if self.padding_columns:
            padded = out.new_empty((*out.shape[:3], self.dv + self.padding_columns))[..., : self.dv]
        call_args = self.known_arguments(self.schedules) or self.call_arguments(
            call, self.schedules, *self.seed_of(call), schedule=self.tile_table(call)
        )
        tables = self.bias_tables.fill(call_args)
        counter, partials = zeroed_counter(self.device), self.new_partials()
        operands = (
            q, k, v, padded, lse, row_max, max_logit, entropy, sink, counter, partials, *tables,
        )  # fmt: skip
        self.launch_kernel(operands, call_args)
        if padded is not out:
            out.copy_(padded)

    def new_partials(self) -> Tensor | None:
        """Allocate memory for stream-K's parts of work tiles."""
        if not self.partials:
            return None
        return torch.empty(self.partials, dtype=torch.float32, device=self.device)

    def arrange(
        self, operands: Sequence[Any], tensors: Sequence[Any], floats: Sequence[float]
    ) -> tuple:
        """Return the arguments of the kernel."""
        (
            q, k, v, out, lse, row_max, max_logit, entropy, sink, counter, partials, *bias_tables,
        ) = operands  # fmt: skip
        tables, *_ = self.bias_tables.kernel_args(bias_tables)
        coords, schedule, captured, seed = self.arranged(self.schedules, tensors, floats)
        outputs = (None, None, out) if self.wide else (*self.out(out), None)
        dropout = self.dropout_of(seed)
        if dropout is not None and self.in_sixteens and self.dtype == torch.bfloat16:
            dropout = dropout._replace(factor=dropout.factor * 2**7)  # `drop_pairs` has 2^-7
        return (
            *self.q(q), *self.k(k), *self.v(v), *outputs, lse, row_max, max_logit, entropy, sink,
            counter, *self.scheduler_args, partials, *self.sizes, coords, dropout,
            schedule, tables, *captured,
        )  # fmt: skip
