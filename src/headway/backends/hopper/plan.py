"""What the plans of a kind of call (`kernels.plan`) have in common for these kernels, forward
(plan_forward.py) and backward (plan_backward.py): how they are compiled, the order of work,
descriptors, launches."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ...errors import BackendRefused
from ...mods.graph import Graph
from ...types import Spec
from ..base import Call, graphs, plainly_masked
from ..kernels import diagonals, gradients, maths, rows
from ..kernels.direct import Direct, Given
from ..kernels.function import not_spread
from ..kernels.plan import BasePlan, plan_of
from ..kernels.varies import variation
from . import diagonals as of_diagonals
from . import (
    gluon_api,
    kernel_backward,
    kernel_backward_adder,
    kernel_backward_deal,
    kernel_backward_dq,
    kernel_backward_islands,
    kernel_backward_keys,
    kernel_backward_lagged,
    kernel_backward_parts,
    kernel_backward_wide,
    kernel_backward_wide_dq,
    kernel_backward_zeros,
    kernel_forward,
    kernel_forward_loader,
    kernel_forward_mask,
    kernel_forward_out,
    kernel_forward_parts,
    kernel_forward_scheduler,
    linear,
    pipeline,
    sides,
    tile,
    walk,
)
from .config import turns
from .descriptors import fits, followed
from .gluon_api import gl

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
        of_diagonals, kernel_forward_scheduler, kernel_forward_loader, kernel_forward_mask,
        kernel_forward_out, kernel_forward_parts, kernel_forward, kernel_backward_parts,
        kernel_backward_dq, kernel_backward_lagged, kernel_backward_zeros,
        kernel_backward_adder, kernel_backward_keys, kernel_backward_islands, kernel_backward_deal,
        kernel_backward, kernel_backward_wide_dq, kernel_backward_wide,
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
        self.processors = processors(matrices[0].device)
        super().__init__(
            spec, call, wanted, matrices, diagonals=False, rough=half, apart=True, sides=True,
            spread=True, sided=self.sided,
        )  # fmt: skip
        self.index = gl.int32 if self.text.narrow else gl.int64
        self.alike = self.tiles(call)[2] == 1  # the mask is one for all heads
        apart = self.function("linear")
        # By how much T grows with S everywhere, where that is known.
        self.gain: float | None = 1.0 if spec.score is None else getattr(self.given, "known", None)
        self.linear: dict[str, Any] = {} if apart is None else {
            "linear": apart, "bent": self.given.bent, "lone": self.given.lone,
            "rising": (self.gain or 0.0) > 1e-6 and spec.scale > 1e-6,
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

    def causal(self) -> bool:
        """Whether the mask is `causal()`: lines are of all lengths."""
        return self.mask is not None and plainly_masked(self.spec)

    def near(self, heads: int, ranks: int, rounds: int = 1) -> int:
        """Heads that take turns, of `heads` with so many ranks each, in so many rounds of CTAs."""
        if not self.alike:
            return 1
        return turns(heads, heads // self.hk, ranks, rounds * self.processors)


@lru_cache
def processors(device: torch.device) -> int:
    """CTAs that run at once: each takes the shared memory of a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count
