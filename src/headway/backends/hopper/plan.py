"""The plans of a kind of call (`kernels.plan`) for these kernels: how they are compiled, the order
of work, descriptors, launches."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ...errors import BackendRefused
from ...mods.derivative import joint
from ...mods.graph import Graph
from ...types import Spec
from ..base import Call, graphs, plainly_masked
from ..kernels import diagonals, gradients, maths, rows
from ..kernels.direct import Direct, Given
from ..kernels.function import not_spread
from ..kernels.plan import BasePlan, Walks, plan_of
from ..kernels.rows import Terms
from ..kernels.varies import variation
from . import diagonals as of_diagonals
from . import (
    gluon_api,
    kernel_backward,
    kernel_backward_adder,
    kernel_backward_deal,
    kernel_backward_dq,
    kernel_backward_heads,
    kernel_backward_keys,
    kernel_backward_lagged,
    kernel_backward_parts,
    kernel_backward_wide,
    kernel_forward,
    kernel_forward_loader,
    kernel_forward_out,
    kernel_forward_scheduler,
    linear,
    pipeline,
    sides,
    tile,
    walk,
)
from .bands import Bands
from .config import BACKWARD, FORWARD, TILE, Backward, Forward, How, fitting, turns
from .counter import zero
from .descriptors import chunks, fits, followed, matrix, numbers
from .gluon_api import gl
from .heads import Heads
from .kernel_backward import backward as backward_kernel
from .kernel_backward_parts import finish
from .kernel_backward_wide import backward_wide
from .kernel_forward import forward as forward_kernel
from .order import Alike, Ordered, Turns
from .ranks import Ranked

# Of a backward kernel: warps of the first partition, and the registers that every thread starts
# with, from which the loader's share goes to the consumers.
_SPECIALISED = {"num_warps": 4, "maxnreg": 168}
_ALONE = {"num_warps": 4, "maxnreg": 128}  # with a third consumer

PARTS = 20 << 20  # bytes of the parts of dq of all CTAs; with what else is read, the L2 has 50 MB
IDLE = 1 / 8  # CTAs that have no head when the last ones are taken, for each one that had
LOSS = 1 / 16  # queries past the end, for each one that there is, which three consumers may have

# Generated functions of what is worked out before pairs are; None where a call has none.
SIDES = (
    "shared", "of_q", "of_kv", "steps", "pairs", "score_shared", "score_of_q", "score_of_kv",
)  # fmt: skip

P = TypeVar("P", bound="Plan")


def planned(kind: type[P], spec: Spec, call: Call, wanted: tuple[int, ...], *matrices: Tensor) -> P:
    """The plan for a call; `matrices` are q, k, v and, for a backward, dout."""
    return plan_of((kind,), spec, call, wanted, matrices, kind)


class Plan(BasePlan):
    """What forward and backward have in common."""

    sources = (
        maths, diagonals, gradients, rows, gluon_api, pipeline, walk, tile, linear, sides,
        of_diagonals, kernel_forward_scheduler, kernel_forward_loader, kernel_forward_out,
        kernel_forward, kernel_backward_parts, kernel_backward_dq, kernel_backward_lagged,
        kernel_backward_adder, kernel_backward_keys, kernel_backward_heads, kernel_backward_deal,
        kernel_backward, kernel_backward_wide,
    )  # fmt: skip

    # Whether an absolute distance is looked at with the mask (`linear.side`): of causal ALiBi the
    # forward takes 47 instructions less per block, and the backward runs out of registers.
    sided = False
    kernel: Direct

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]
    ) -> None:
        half = matrices[0].dtype == torch.bfloat16
        self.fits = all(map(fits, matrices))
        super().__init__(
            spec, call, wanted, matrices, diagonals=False, rough=half, apart=True, sides=True,
            spread=True, sided=self.sided,
        )  # fmt: skip
        self.index = gl.int32 if self.text.narrow else gl.int64
        self.alike = self.tiles(call)[2] == 1  # the mask is one for all heads
        apart = self.function("linear")
        self.linear: dict[str, Any] = {} if apart is None else {
            "linear": apart, "bent": self.given.bent, "lone": self.given.lone,
            "rising": self.given.rising and spec.scale > 1e-6,
        }  # fmt: skip
        self.sides: dict[str, Any] = {name: self.function(name) for name in SIDES}
        # Every pair reads a number of its own: registers for as many addresses.
        self.heavy = any(
            variation(graph, graph.nodes[n].args[1:]) in ("pairs", "diagonals")
            for graph in graphs(spec)
            if graph is not None
            for n in self.gathers(graph)
        )

    def gathers(self, graph: Graph) -> list[int]:
        """Those that a kernel itself makes."""
        if graph.kind != "mask" and self.text.spread:
            return not_spread(graph)
        return [n for n, _ in graph.gathers]

    def long(self, length: int = 2048) -> bool:
        """Whether lines are of so many rows, and few of their tiles are partial, for all that is
        known before the tiles are."""
        long = min(self.q_len, self.kv_len) >= length
        return long and not self.heavy and plainly_masked(self.spec)

    def compares(self) -> bool:
        """Whether the mask compares captured numbers of queries with those of keys, as documents
        do: most lines are short."""
        mask = graphs(self.spec)[1]
        if mask is None:
            return False
        kinds = {variation(mask, mask.nodes[n].args[1:]) for n in self.gathers(mask)}
        return {"rows", "cols"} <= kinds

    def run(self, own: Sequence[Tensor | None], given: Given) -> None:
        """Launch the kernel. Whether there is shared memory for what a score or a mask needs beside
        the tiles, the compiler says, before anything runs."""
        try:
            self.kernel(own, given)
        except OutOfResources as error:
            raise BackendRefused(
                "backend='hopper' has not enough shared memory for this score or mask at widths "
                f"d = {self.d}, dv = {self.dv}: {error.required} bytes of {error.limit}; "
                "use backend='triton', whose tiles get smaller"
            ) from error

    def follow(self, matrices: Sequence[Tensor]) -> Sequence[Tensor]:
        """The matrices as the copy engine can read them."""
        return matrices if self.fits else list(map(followed, matrices))

    def near(self, heads: int, ranks: int, rounds: int = 1) -> int:
        """Heads that take turns, of `heads` with so many ranks each, in so many rounds of CTAs."""
        if not self.alike:
            return 1
        return turns(heads, heads // self.hk, ranks, rounds * processors(self.device))


class ForwardPlan(Plan):
    """The forward."""

    sided = True

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]
    ) -> None:
        super().__init__(spec, call, wanted, matrices)
        how, group = fitting(filter(self.suits, FORWARD), self.d, self.dv), self.hq // self.hk
        each, registers = how.registers
        block = min(how.block, 64) if self.heavy else how.block
        rows = 64 * how.consumers
        if rows != TILE[0] and self.tile is not None and spec.tiles is None:
            self.tile = rows, min(block, self.tile[1])
        # Several rounds leave shorter ranks for the end (documents are 3 % faster, causal is not).
        # Without a mask, CTAs of one head side by side read the same keys at the same time, which
        # multiprocessors that are close to each other then get at once.
        near = group if self.mask is None else self.near(self.hq, -(-self.q_len // rows), rounds=4)
        self.walks = Walks(self, queries=True, block=rows, near=near)
        self.ranked = Ranked(self.walks, self.kv_len, block, rows)
        self.bands = Bands(self, self.walks, queries=True)
        ranks = self.walks.lines * self.walks.sub * self.b * self.hq
        self.slots = how.consumers * self.walks.lines * self.walks.sub  # of one head
        self.grid = (min(ranks, how.ctas * processors(self.device)), 1, 1)
        self.numbers = (
            ranks, self.hq, group, self.q_len, self.kv_len, self.dv, spec.scale,
        )  # fmt: skip
        out = (how.out,) if how.out else how.dv
        self.q, self.out = matrix(64, how.d), matrix(64, out)
        self.k, self.v = matrix(block, how.d), matrix(block, how.dv)
        # Copies need rows of whole 16 bytes.
        self.spare = 0 if spec.partial else -self.dv % 8
        options = {
            "SCORE": self.function("score"), "MASK": self.function("mask"),
            "HOW": How(
                block, how.stages, self.walks.sub, self.index, positive=spec.scale > 0,
                even=self.kv_len % block == 0,
                queries=how.queries, held=how.held, merged=how.merged, consumers=how.consumers,
                registers=registers,
                largest=spec.max_logit and spec.score is not None, bands=len(self.bands.own),
                **self.linear, **self.sides,
            ),
        }  # fmt: skip
        options |= {"num_warps": 4, "maxnreg": each}
        self.kernel = Direct(forward_kernel, self.device, options, self.grid, self.arrange)

    def suits(self, how: Forward) -> bool:
        """Whether a row of the table is for such a call."""
        if how.consumers == 3:
            return self.in_threes()
        if how.consumers == 1:
            return self.in_ones(sum(how.d))
        return not how.held or (self.spec.score is None and self.mask is None)

    def in_ones(self, width: int) -> bool:
        """Whether a rank is of 64 queries, in one of several CTAs of a multiprocessor: under a
        mask, where blocks of 64 keys leave out more, and where ranks are short, so that most of
        their instructions are fetched and not repeated. Timed on an H200: 64 wide, causal 256 and
        512 take 0.7 of the time of two consumers, 2k and a window in 8k 0.96; without a mask 1.0 to
        1.3. 128 wide, causal 512 0.92, documents of 700 0.76, causal 1k 1.05, a window 1.1."""
        masked = self.spec.score is None and self.mask is not None and not self.heavy
        return masked and (width <= 64 or self.kv_len <= 512 or self.compares())

    def in_threes(self) -> bool:
        """Whether a rank is of 192 queries: few are past the end, no score wants registers, and
        lines are long (timed on an H200: 8k causal gains 7 %, 1k loses half)."""
        length = self.q_len
        long = self.spec.score is None and self.long(2048 if self.mask is None else 8192)
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
        given = self.walks.given or self.given_by(call, self.walks, walk=self.ranked(call))
        bands = self.bands.new(given)
        own = q, k, v, padded, lse, row_max, top, sink, zero(self.device), *bands
        self.run(own, given)
        if padded is not out:
            out.copy_(padded)

    def arrange(self, own: Sequence[Any], tensors: Sequence[Any], floats: Sequence[float]) -> tuple:
        """The arguments of the kernel."""
        q, k, v, out, *pointers = own
        bands, *_ = self.bands.arranged(pointers[5:])
        coords, walk, captured, _ = self.arranged(self.walks, tensors, floats)
        to = (None, None, out) if self.spec.partial else (*self.out(out), None)
        return (
            *self.q(q), *self.k(k), *self.v(v), *to, *pointers[:5], *self.numbers, coords, walk,
            bands, *captured,
        )  # fmt: skip


class BackwardPlan(Plan):
    """The backward."""

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]
    ) -> None:
        super().__init__(spec, call, wanted, matrices)
        group = self.hq // self.hk
        lagged = spec.score is None and (self.heavy if max(self.d, self.dv) > 64 else self.long())
        rows = BACKWARD if lagged else tuple(row for row in BACKWARD if not row.lagged)
        how = fitting(rows, self.d, self.dv)
        # The query heads of a key head stay in one CTA, where a mask is alike for them.
        share = group if self.alike else 1
        self.heads = self.hq // share  # of dk and dv
        self.wide = spec.partial or share < group
        columns = [w if self.wide else -(-w // 8) * 8 for w in (self.d, self.dv)]
        self.grads = [(self.b, self.heads, self.kv_len, n) for n in columns]
        self.grads_dtype = torch.float32 if self.wide else self.dtype
        # Whether they are the results as they are.
        self.exact = not self.wide and columns == [self.d, self.dv]
        near = self.near(self.heads, -(-self.kv_len // how.keys))
        if self.tile is not None and spec.tiles is None and self.compares():
            # Where documents begin anywhere, finer tiles leave out more.
            self.tile = how.block, self.tile[1]
        self.walks = Walks(self, queries=False, block=how.keys, near=near)
        self.bands = Bands(self, self.walks, wanted, queries=False)
        self.q_rows = -(-self.q_len // how.block) * how.block
        self.columns = sum(how.d)
        ranks = self.b * self.heads
        whole = self.whole(how, ranks, share * self.q_rows * self.columns)
        self.by_head = Heads(self.walks, self.q_len) if whole else None
        self.ordered = Ordered(self.walks, self.q_len) if spec.deterministic and not whole else None
        if not whole:
            ranks *= self.walks.lines * self.walks.sub
        alone = how.keys == 64
        self.grid = (ranks if alone else min(ranks, processors(self.device)), 1, 1)
        self.ranks = None if alone else ranks  # of a kernel whose CTAs take them from a counter
        self.numbers = (
            self.hq, group, share, self.q_len, self.q_rows, self.kv_len, self.d, self.dv,
            spec.scale,
        )  # fmt: skip
        self.q, self.dout = matrix(how.block, how.d), matrix(how.block, how.dv)
        self.k, self.v, self.dk, self.dv_ = (matrix(64, w) for w in (how.d, how.dv) * 2)
        self.lse, self.delta = numbers(how.block), numbers(how.block)
        # Pieces of dq as a consumer hands them over, 64 x 64 numbers or half of them; one for dq
        # alone needs no descriptor.
        first = how.block * min(self.columns, 128) // 512
        self.numbers_of_parts = self.grid[0] * share * self.q_rows * self.columns
        self.dq = matrix(how.block, (self.columns // 2,))
        self.parts = (lambda x: (x, None)) if alone else chunks(first, 8 if len(how.d) == 2 else 0)
        options = {
            "DERIVATIVE": self.function("derivative"), "SCATTER": self.function("scatter"),
            "MASK": self.function("mask"),
            "HOW": How(
                how.block, how.stages, self.walks.sub, self.index, even=self.kv_len % how.keys == 0,
                late=self.heavy, short=len(how.d) == 2, ordered=self.ordered is not None,
                lagged=how.lagged, whole=whole,
                unbounded=spec.score is not None and joint(spec.score, wanted).unbounded,
                bands=len(self.bands.own), summed=self.bands.summed,
                **self.linear, **self.sides,
            ),
        }  # fmt: skip
        kernel, more = (backward_wide, _ALONE) if alone else (backward_kernel, _SPECIALISED)
        self.kernel = Direct(kernel, self.device, options | more, self.grid, self.arrange)
        shape = self.b, self.hq, self.q_len, self.dv
        self.terms = Terms(shape, self.q_rows, 0 if whole else self.columns, self.device)
        strips = self.columns // 64
        grid = self.b * self.hq * self.q_rows * strips // 64, 1, 1
        self.finish = Direct(finish, self.device, {"STRIPS": strips}, grid, self.arrange_finish)

    def whole(self, how: Backward, heads: int, parts: int) -> bool:
        """Whether a CTA takes whole heads, of which there are so many with so many numbers of dq
        each: what it adds up stays in the cache, and few idle at the end. (Timed on an H200: 17 MB
        0.79 of the time, 34 MB 1.12; causal, which visits half, 34 MB 0.92, 69 MB 1.16.)"""
        at_once = processors(self.device)
        plain = how.keys == 128 and len(how.d) == 1 and not how.lagged and not self.spec.partial
        fits = 4 * parts * min(heads, at_once) <= (PARTS if self.mask is None else 2 * PARTS)
        return plain and fits and -heads % at_once <= IDLE * heads

    def new(self) -> tuple[Tensor, Tensor]:
        """dk and dv, with spare columns where copies need rows of whole 16 bytes."""
        (dk, dv), dtype, device = self.grads, self.grads_dtype, self.device
        return (
            torch.empty(*dk, dtype=dtype, device=device),
            torch.empty(*dv, dtype=dtype, device=device),
        )

    def launch(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, terms: Tensor,
        dk: Tensor, dv: Tensor, grads: tuple,
    ) -> Tensor:  # fmt: skip
        """Write dk and dv (from `new`), and add to `grads`. **Returns:** dq."""
        whole: tuple[Tensor, ...] = ()
        if self.by_head is not None:
            walk, kinds, all_visited = self.by_head(call)
            given = self.given_by(call, self.walks, kinds, walk=walk)
            shape = *q.shape[:3], -(-self.d // 8) * 8
            dq = (torch.empty if all_visited else torch.zeros)(
                shape, dtype=self.dtype, device=self.device
            )
            whole = torch.empty(self.numbers_of_parts, device=self.device), dq
        elif self.ordered is None:
            given = self.walks.given or self.given_by(call, self.walks)
        else:
            added = terms.new_zeros(self.b * self.hq * self.q_rows // 16, dtype=torch.int32)
            walk, turns = self.ordered(call, added)
            given = self.given_by(call, self.walks, *turns, walk=walk)
        counter = () if self.ranks is None else (zero(self.device),)
        bands, sums = self.bands.new(given), self.bands.sums()
        own = q, k, v, dout, terms, dk, dv, *counter, *whole, *bands, *sums, *grads
        self.run(own, given)
        self.bands.collect(sums, grads, given)
        if whole:
            return whole[1]
        dtype = torch.float32 if self.spec.partial else self.dtype
        dq = torch.empty(*q.shape, dtype=dtype, device=self.device)
        self.finish((terms, dq))
        return dq

    def arrange(self, own: Sequence[Any], tensors: Sequence[Any], floats: Sequence[float]) -> tuple:
        """The arguments of the kernel."""
        q, k, v, dout, terms, dk, dv, *rest = own
        ranks = () if self.ranks is None else (rest.pop(0), self.ranks)
        coords, walk, captured, added = self.arranged(self.walks, tensors, floats)
        delta, lse2, parts = self.terms.split(terms)
        turns, whole = None, () if self.ranks is None else (None, None)
        if self.by_head is not None:
            parts, dq, *rest = rest
            whole = self.dq(dq[..., : self.d])[0], *added
        elif added:
            turns = Alike(*added) if len(added) == 1 else Turns(*added)
        assert parts is not None
        bands, sums, grads = self.bands.arranged(rest)
        if self.wide:
            to: tuple[Any, ...] = (None, None, None, dk, dv)
        else:
            to = (*self.dk(dk[..., : self.d]), self.dv_(dv[..., : self.dv])[0], None, None)
        return (
            *self.q(q), *self.k(k), self.v(v)[0], self.dout(dout)[0], *self.lse(lse2),
            *self.delta(delta), *self.parts(parts), *whole, *to, grads, bands, sums, *ranks,
            *self.numbers, coords, walk, turns, *captured,
        )  # fmt: skip

    def arrange_finish(self, own: Sequence[Any], *_: object) -> tuple:
        """The arguments of the kernel that makes dq of its parts."""
        terms, dq = own
        parts = self.terms.split(terms)[2]
        return parts, dq, self.spec.scale, self.q_len, self.q_rows, self.d


@lru_cache
def processors(device: torch.device) -> int:
    """CTAs that run at once: each takes the shared memory of a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count
