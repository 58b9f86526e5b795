"""The plan of a forward: which row of the table, the order of work, descriptors, the launch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....types import Spec
from ...base import Call, split
from ...gpu.runtime.call_plan import Walks, straight
from ...gpu.runtime.launcher import Direct
from ..bias_tables import BiasTables
from ..config import FORWARD, TILE, Forward, How, first_fit, ptxas_options
from ..launch_plan import DEVICE, Plan
from ..tile_counter import zeroed_counter
from ..tma import matrix_tiles
from . import combine, epilogue, half_blocks, kernel, producer, scheduler
from .half_block_table import HalfBlocks, half_block_table
from .kernel import forward as forward_kernel
from .stream_k import Shares
from .tile_table import TileTable

LOSS = 1 / 16  # queries past the end, for each one that there is, which three consumers may have


class ForwardPlan(Plan):
    """The forward."""

    sources = *DEVICE, scheduler, producer, half_blocks, epilogue, combine, kernel
    abs_by_mask = True

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]
    ) -> None:
        super().__init__(spec, call, wanted, matrices)
        how, group = first_fit(filter(self.suits, FORWARD), self.d, self.dv), self.hq // self.hk
        each, registers = how.registers
        block = min(how.block, 64) if self.gathers_per_pair else how.block
        rows = 64 * how.consumers
        if rows != TILE[0] and self.tile is not None and spec.tiles is None:
            self.tile = rows, min(block, self.tile[1])
        # Without a mask, CTAs of one head side by side read the same keys at the same time, which
        # multiprocessors that are close to each other then get at once.
        # Under masks that leave lines of any length several rounds leave shorter ranks for the end
        # (documents are 4 % faster with four than with two); of causal ones the shortest are dealt
        # last (8k takes 0.97 of the time at 64 columns, 0.993 at 128).
        rounds = 1 if self.is_causal() and how.consumers > 1 else 4
        near = (
            group
            if self.mask is None
            else self.head_swizzle(self.hq, -(-self.q_len // rows), rounds)
        )
        self.walks = Walks(self, queries=True, block=rows, near=near)
        self.ranked = TileTable(self.walks, self.kv_len, block, rows)
        self.bias_tables = BiasTables(self, self.walks, queries=True)
        ranks = self.walks.lines * self.walks.sub * self.b * self.hq
        self.slots = how.consumers * self.walks.lines * self.walks.sub  # of one head
        ctas = how.ctas * self.processors
        blocks = max(-(-self.kv_len // block), 1) if self.mask is None else 0
        shares = Shares.of(ranks, blocks, ctas, how)
        parts = shares.tickets - shares.whole
        self.part = parts * how.consumers * 64 * (sum(how.dv) + 4)  # numbers of all parts
        late = self.is_causal() and (how.consumers > 1 or self.is_long())
        last = int(late) * self.walks.lines * self.walks.sub // 4  # lines
        self.dealt = shares.tickets, last, *shares[1:]
        self.grid = (min(shares.tickets, ctas), 1, 1)
        self.numbers = (self.hq, group, self.q_len, self.kv_len, self.dv, spec.scale)
        out = (how.out_columns,) if how.out_columns else how.dv
        self.q, self.out = matrix_tiles(64, how.d), matrix_tiles(64, out)
        self.k, self.v = matrix_tiles(block, how.d), matrix_tiles(block, how.dv)
        # Copies need rows of whole 16 bytes.
        self.wide = spec.out_dtype(self.dtype) != self.dtype
        self.spare = 0 if self.wide else -self.dv % 8
        options = {
            "SCORE": self.function("score"), "MASK": self.function("mask"),
            "HOW": How(
                block, how.stages, self.walks.sub, self.index_type, positive_scale=spec.scale > 0,
                even_kv=self.kv_len % block == 0,
                v_stages=how.v_stages, q_stages=how.q_stages,
                early_q_release=how.early_q_release, q_in_registers=how.q_in_registers,
                slope_mma=how.slope_mma, named_barriers=how.named_barriers,
                first_block_in_loop=how.first_block_in_loop, stream_k=shares.share > 0,
                consumers=how.consumers, registers=registers,
                half_blocks=self.quarters(call, how, block),
                scarce_smem=how.ctas == 2,  # 244 bytes are left of a CTA's half
                track_max=spec.max_logit and spec.score is not None,
                relative_biases=len(self.bias_tables.depends),
                **self.affine, **self.hoisted,
            ),
        }  # fmt: skip
        options |= ptxas_options(each, how.register_usage_level)
        self.kernel = Direct(forward_kernel, self.device, options, self.grid, self.arrange)

    def suits(self, how: Forward) -> bool:
        """Whether a row of the table is for such a call."""
        if how.consumers == 3:
            return self.in_threes()
        if how.consumers == 1:
            return self.in_ones(sum(how.d))
        if how.slope_mma:
            return self.slanted()
        if how.q_in_registers:
            return self.spec.score is None and self.mask is None
        return not how.named_barriers or self.spec.score is not None  # of a mask alone it costs 1 %

    def slanted(self) -> bool:
        """Whether a score is S times a number, and a straight line; and S alone is not asked for,
        which no register has then."""
        line = bool(self.affine) and self.affine["monotone"] and self.given.straight
        return line and not self.spec.max_logit

    def quarters(self, call: Call, how: Forward, block: int) -> HalfBlocks:
        """What is known of partial blocks before a rank: of masks that compare positions, and are
        the same for all calls of the kind, where tiles are blocks of two consumers."""
        own = self.spec.tiles is None and self.hoisted["mask_pairs"] is not None
        captured = split(self.spec, call.captured)[1]
        fixed = not (captured.tensors or captured.floats) and straight(call.coords)
        blocks = self.tile == (64 * how.consumers, block) == TILE and self.kv_len % block == 0
        if not (own and fixed and blocks) or how.first_block_in_loop or self.bias_tables.depends:
            return ()
        assert self.mask is not None
        shape = self.b, self.hq, self.q_len, self.kv_len
        return half_block_table(self.mask, captured, shape, TILE, call.coords)

    def in_ones(self, width: int) -> bool:
        """Whether a rank is of 64 queries, in one of several CTAs of a multiprocessor: under a
        mask, where blocks of 64 keys leave out more, and where ranks are short, so that most of
        their instructions are fetched and not repeated. Timed on an H200: 64 wide, causal 256 and
        512 take 0.7 of the time of two consumers, 2k and a window in 8k 0.96; without a mask 1.0 to
        1.3. 128 wide, causal 512 0.92, documents of 700 0.76, causal 1k 1.05, a window 1.1."""
        masked = self.spec.score is None and self.mask is not None and not self.gathers_per_pair
        return masked and (width <= 64 or self.kv_len <= 512 or self.compares_captures())

    def in_threes(self) -> bool:
        """Whether a rank is of 192 queries: few are past the end, no score wants registers, and
        lines are long (timed on an H200: 8k causal gains 7 %, 1k loses half)."""
        length = self.q_len
        long = self.spec.score is None and self.is_long(2048 if self.mask is None else 8192)
        return long and -length % 192 <= LOSS * length

    def launch(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        row_max: Tensor | None, top: Tensor | None,
    ) -> None:  # fmt: skip
        """Write out and lse, and row_max and the largest logits of all slots where they are."""
        sink = None if call.sink is None else call.sink.contiguous()
        padded = out
        if self.spare:
            padded = out.new_empty((*out.shape[:3], self.dv + self.spare))[..., : self.dv]
        given = self.known(self.walks) or self.given_by(call, self.walks, walk=self.ranked(call))
        bands = self.bias_tables.fill(given)
        own = (
            q,
            k,
            v,
            padded,
            lse,
            row_max,
            top,
            sink,
            zeroed_counter(self.device),
            self.memory(),
            *bands,
        )
        self.launch_kernel(own, given)
        if padded is not out:
            out.copy_(padded)

    def memory(self) -> Tensor | None:
        """For the parts of ranks that are shared out."""
        if not self.part:
            return None
        return torch.empty(self.part, dtype=torch.float32, device=self.device)

    def arrange(self, own: Sequence[Any], tensors: Sequence[Any], floats: Sequence[float]) -> tuple:
        """The arguments of the kernel."""
        q, k, v, out, *pointers = own
        bands, *_ = self.bias_tables.kernel_args(pointers[6:])
        coords, walk, captured, _ = self.arranged(self.walks, tensors, floats)
        to = (None, None, out) if self.wide else (*self.out(out), None)
        return (
            *self.q(q), *self.k(k), *self.v(v), *to, *pointers[:5], *self.dealt, pointers[5],
            *self.numbers, coords, walk, bands, *captured,
        )  # fmt: skip
