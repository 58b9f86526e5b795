"""What the plans of a kind of call (gpu/runtime/call_plan.py) have in common for these kernels,
forward (fwd/plan.py) and backward (bwd/plan.py): how they are compiled, launched and refused."""

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
from ..gpu import preprocess
from ..gpu.codegen.dependence import variation
from ..gpu.codegen.function import not_spread
from ..gpu.device import diagonals, gradients, maths
from ..gpu.runtime.call_plan import BasePlan, plan_of
from ..gpu.runtime.launcher import Direct, Given
from .config import head_swizzle
from .device import (
    affine_score,
    gluon_compat,
    hoisted,
    mma,
    pipeline,
    relative_bias,
    work_tile,
)  # fmt: skip
from .device.gluon_compat import gl
from .tma import strides_fit, with_tma_strides

# Fields of `How` and the generated functions that they hold (gpu/codegen/hoist.py).
HOISTED = {
    "mask_shared": "shared", "mask_of_q": "of_q", "mask_of_kv": "of_kv", "mask_steps": "steps",
    "mask_pairs": "pairs", "score_shared": "score_shared", "score_of_q": "score_of_q",
    "score_of_kv": "score_of_kv",
}  # fmt: skip

# The device modules of every kernel here; a plan adds its own (`BasePlan.sources`).
DEVICE = (
    maths, diagonals, gradients, preprocess, gluon_compat, pipeline, work_tile, mma, affine_score,
    hoisted, relative_bias,
)  # fmt: skip

P = TypeVar("P", bound="Plan")


def plan_for(
    kind: type[P], spec: Spec, call: Call, wanted: tuple[int, ...], *matrices: Tensor
) -> P:
    """The plan for a call; `matrices` are q, k, v and, for a backward, dout."""
    return plan_of((kind,), spec, call, wanted, matrices, kind)


class Plan(BasePlan):
    """What forward and backward have in common."""

    # Whether an absolute distance is looked at with the mask (`linear.side`): of causal ALiBi the
    # forward takes 47 instructions less per block, and the backward runs out of registers.
    abs_by_mask = False
    kernel: Direct

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]
    ) -> None:
        half = matrices[0].dtype == torch.bfloat16
        self.strides_fit = all(map(strides_fit, matrices))
        self.processors = processors(matrices[0].device)
        super().__init__(
            spec, call, wanted, matrices, diagonals=False, rough=half, apart=True, sides=True,
            spread=True, sided=self.abs_by_mask,
        )  # fmt: skip
        self.index_type = gl.int32 if self.text.narrow else gl.int64
        self.heads_share_mask = self.tiles(call)[2] == 1  # the mask is one for all heads
        apart = self.function("linear")
        # By how much T grows with S everywhere, where that is known.
        self.score_gain: float | None = (
            1.0 if spec.score is None else getattr(self.given, "known", None)
        )
        self.affine: dict[str, Any] = {} if apart is None else {
            "affine": apart, "has_abs": self.given.bent, "abs_only": self.given.lone,
            "monotone": (self.score_gain or 0.0) > 1e-6 and spec.scale > 1e-6,
        }  # fmt: skip
        self.hoisted: dict[str, Any] = {
            field: self.function(name) for field, name in HOISTED.items()
        }
        # Every pair reads a number of its own: registers for as many addresses.
        self.gathers_per_pair = any(
            variation(graph, graph.nodes[n].args[1:]) in ("pairs", "diagonals")
            for graph in graphs(spec)
            if graph is not None
            for n in self.own_gathers(graph)
        )

    def own_gathers(self, graph: Graph) -> list[int]:
        """Those that a kernel itself makes."""
        if graph.kind != "mask" and self.text.spread:
            return not_spread(graph)
        return [n for n, _ in graph.gathers]

    def is_long(self, length: int = 2048) -> bool:
        """Whether lines are of so many rows, and few of their tiles are partial, for all that is
        known before the tiles are."""
        long = min(self.q_len, self.kv_len) >= length
        return long and not self.gathers_per_pair and plainly_masked(self.spec)

    def compares_captures(self) -> bool:
        """Whether the mask compares captured numbers of queries with those of keys, as documents
        do: most lines are short."""
        mask = graphs(self.spec)[1]
        if mask is None:
            return False
        kinds = {variation(mask, mask.nodes[n].args[1:]) for n in self.own_gathers(mask)}
        return {"rows", "cols"} <= kinds

    def launch_kernel(self, own: Sequence[Tensor | None], given: Given) -> None:
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

    def tma_readable(self, matrices: Sequence[Tensor]) -> Sequence[Tensor]:
        """The matrices as the copy engine can read them."""
        return matrices if self.strides_fit else list(map(with_tma_strides, matrices))

    def is_causal(self) -> bool:
        """Whether the mask is `causal()`: lines are of all lengths."""
        return self.mask is not None and plainly_masked(self.spec)

    def head_swizzle(self, heads: int, ranks: int, rounds: int = 1) -> int:
        """Heads that take turns, of `heads` with so many ranks each, in so many rounds of CTAs."""
        if not self.heads_share_mask:
            return 1
        return head_swizzle(heads, heads // self.hk, ranks, rounds * self.processors)


@lru_cache
def processors(device: torch.device) -> int:
    """CTAs that run at once: each takes the shared memory of a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count
