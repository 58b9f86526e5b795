"""What the plans of the forward (fwd/plan.py) and of the backward (bwd/plan.py) share: how kernels
are compiled, launched and refused (gpu/runtime/call_plan.py has what is not Hopper's)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ...dropout import kept_factor, threshold
from ...errors import BackendRefused
from ...mods.graph import Graph
from ...types import Spec
from ..base import Call, graphs, plainly_masked
from ..gpu import preprocess
from ..gpu.codegen.dependence import dependence_of, gathers_in_kernel
from ..gpu.device import diagonals, exact_sums, gradients, maths
from ..gpu.named_card import named_card
from ..gpu.runtime.call_plan import BasePlan, plan_of
from ..gpu.runtime.launcher import CallArguments, KernelLauncher
from .config import head_swizzle
from .device import (
    affine_score,
    dropout,
    gluon_compat,
    hoisted,
    mma,
    pipeline,
    relative_bias,
    work_tile,
)  # fmt: skip
from .device.gluon_compat import gl
from .tma import strides_fit, with_tma_strides

# Fields of `config.KernelConfig` for hoisted operands, and the generated functions that they hold
# (gpu/codegen/hoist.py); None where a call has none.
HOISTED = {
    "mask_shared": "shared", "mask_of_q": "of_q", "mask_of_kv": "of_kv", "mask_steps": "steps",
    "mask_pairs": "pairs", "score_shared": "score_shared", "score_of_q": "score_of_q",
    "score_of_kv": "score_of_kv",
}  # fmt: skip

# The modules with the device code of both kernels; a plan adds its own (`BasePlan.sources`).
DEVICE = (
    maths, diagonals, exact_sums, gradients, preprocess, gluon_compat, pipeline, work_tile, mma,
    affine_score, hoisted, relative_bias, dropout,
)  # fmt: skip

P = TypeVar("P", bound="HopperPlan")


def plan_for(
    plan_class: type[P], spec: Spec, call: Call, wanted: tuple[int, ...], *matrices: Tensor
) -> P:
    """Return the plan for a call; `matrices` are q, k, v and, for a backward, dout."""
    return plan_of((plan_class,), spec, call, wanted, matrices, plan_class)


class HopperPlan(BasePlan):
    """A plan of the Hopper backend: what forward and backward have in common."""

    # Whether an absolute distance is simplified by the side of the diagonal that the mask keeps
    # (`side` of gpu/codegen/affine.py). For causal ALiBi the forward takes 47 instructions less per
    # block, and the backward runs out of registers.
    uses_distance_sign = False
    kernel: KernelLauncher

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]
    ) -> None:
        half = matrices[0].dtype == torch.bfloat16
        self.strides_fit = all(map(strides_fit, matrices))
        self.processors = processors(matrices[0].device)
        super().__init__(
            spec, call, wanted, matrices, diagonals=False, approx_tanh=half, affine=True,
            hoist=True, bias_tables=True, uses_distance_sign=self.uses_distance_sign,
        )  # fmt: skip
        self.index_type = gl.int32 if self.codegen_spec.narrow else gl.int64
        self.heads_share_mask = self.tiles(call)[2] == 1  # the mask is one for all heads
        affine = self.function("affine")
        # By how much T grows with S everywhere, where that is known.
        self.score_gain: float | None = (
            1.0 if spec.score is None else getattr(self.generated, "constant_gain", None)
        )
        self.affine: dict[str, Any] = {} if affine is None else {
            "affine": affine,
            "has_abs": self.generated.has_abs, "abs_only": self.generated.abs_only,
            "monotone": (self.score_gain or 0.0) > 1e-6 and spec.scale > 1e-6,
        }  # fmt: skip
        in_order = call.coords.q_pos is None is call.coords.kv_pos
        starts_even = call.coords.q % 16 == 0 == call.coords.kv % 16
        drops_by_pairs = 0 < threshold(spec.dropout) <= dropout.INFINITY
        self.in_sixteens = drops_by_pairs and starts_even and (in_order or self.straight)
        self.hoisted: dict[str, Any] = {
            field: self.function(name) for field, name in HOISTED.items()
        }
        # Every pair reads a value of its own, which takes registers for as many addresses.
        self.gathers_per_pair = any(
            dependence_of(graph, graph.nodes[n].args[1:]) in ("pairs", "diagonals")
            for graph in graphs(spec)
            if graph is not None
            for n in self.kernel_gathers(graph)
        )

    def kernel_gathers(self, graph: Graph) -> list[int]:
        """Return the gathers that a kernel itself makes."""
        if graph.kind != "mask" and self.codegen_spec.bias_tables:
            return gathers_in_kernel(graph)
        return [n for n, _ in graph.gathers]

    def is_long(self, length: int = 2048) -> bool:
        """Return whether tile rows span `length` rows and few of their tiles are partial, as far as
        can be said before the tiles are known."""
        spans = min(self.q_len, self.kv_len) >= length
        return spans and not self.gathers_per_pair and plainly_masked(self.spec)

    def compares_captures(self) -> bool:
        """Return whether the mask compares what it captures of queries with what it captures of
        keys, as documents do: most tile rows are short."""
        mask = graphs(self.spec)[1]
        if mask is None:
            return False
        kinds = {dependence_of(mask, mask.nodes[n].args[1:]) for n in self.kernel_gathers(mask)}
        return {"rows", "cols"} <= kinds

    def launch_kernel(self, operands: Sequence[Tensor | None], call_args: CallArguments) -> None:
        """Launch the kernel. The compiler says, before anything runs, whether shared memory holds
        what a score or a mask needs beside the tiles.

        Raises `BackendRefused` where it does not.
        """
        try:
            self.kernel(operands, call_args)
        except OutOfResources as error:
            raise BackendRefused(
                "backend='hopper' has not enough shared memory for this score or mask at widths "
                f"d = {self.d}, dv = {self.dv}: {error.required} bytes of {error.limit}; "
                "use backend='triton', whose tiles get smaller"
            ) from error

    def tma_readable(self, matrices: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the matrices as TMA can read them: a copy where strides do not fit."""
        return matrices if self.strides_fit else list(map(with_tma_strides, matrices))

    def seed_of(self, call: Call) -> list[Tensor]:
        """Return the seed, where there is dropout."""
        if self.spec.dropout == 0:
            return []
        assert call.seed is not None
        return [call.seed.to(self.device)]

    def dropout_of(self, seed: list[Any]) -> dropout.DropoutArgs | None:
        """Return the arguments of dropout, taking what `seed_of` gave from the front of a list of
        tensors."""
        p = self.spec.dropout
        if p == 0:
            return None
        limit = min(threshold(p), 0x7FFF)  # where nothing is kept, the factor is 0
        return dropout.DropoutArgs(seed.pop(0), limit * 0x10001, kept_factor(p))

    def is_causal(self) -> bool:
        """Return whether the mask is `causal()`: tile rows are of all lengths."""
        return self.mask is not None and plainly_masked(self.spec)

    def head_swizzle(self, heads: int, tiles: int, waves: int = 1) -> int:
        """Return how many of `heads` heads the scheduler interleaves (`config.head_swizzle`).

        - `tiles`: work tiles of a head; `waves`: of CTAs, whose heads share the L2 cache.
        """
        if not self.heads_share_mask:
            return 1
        return head_swizzle(heads, heads // self.hk, tiles, waves * self.processors)


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    card = named_card()
    return _processors(device) if card is None else card.processors


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
