"""The plan of a kind of call (`gpu.runtime.call_plan`) for these kernels: tile sizes, constants,
launchers."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

import triton

from ...blocks import TILE
from ...dropout import kept_factor, threshold
from ...errors import BackendRefused
from ...types import Spec
from ..base import Call
from ..gpu import preprocess
from ..gpu.device import diagonals, exact_sums, gradients, maths, softmax, tiles
from ..gpu.preprocess import BackwardWorkspace
from ..gpu.products import bits_of, product_precision
from ..gpu.runtime.call_plan import BasePlan, TileSchedules, plan_of, unspecialized
from ..gpu.runtime.launcher import KernelLauncher
from . import kernel_backward, kernel_forward, kernel_tangent, main_loop, saved, tile
from .config import LEARNED, Tiling, call_kind, passes, pieces, tilings


def planned(spec: Spec, call: Call, wanted: tuple[int, ...], *matrices: Tensor) -> "Plan":
    """Return the plan for a call; `matrices` are q, k, v and, for a backward, dout."""
    variant = Plan, product_precision(matrices[0].dtype)
    return plan_of(variant, spec, call, wanted, matrices, Plan)


def planned_along(
    spec: Spec, call: Call, moving: tuple[int, ...], *matrices: Tensor | None
) -> "Plan":
    """Return the plan for a call with tangents: `matrices` are q, k, v and their tangents, `moving`
    the tensors of the score that have one. `call` captures theirs, too, and so does `spec`."""
    present = [x for x in matrices if x is not None]
    still = tuple(x is None for x in matrices)
    variant = Plan, product_precision(present[0].dtype), still, moving
    return plan_of(variant, spec, call, (), present, partial(Plan, moving=moving))


class Plan(BasePlan):
    """The plan of one kind of calls."""

    sources = (
        maths, diagonals, exact_sums, gradients, tiles, softmax, preprocess, tile, main_loop,
        kernel_forward, kernel_backward, kernel_tangent,
    )  # fmt: skip

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor],
        moving: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        q = matrices[0]
        super().__init__(
            spec, call, wanted, matrices, diagonals=True, approx_tanh=approximates_tanh(q),
            moving=moving,
        )  # fmt: skip
        self.launchers: dict[str, Launcher] = {}
        self.saved = saved.for_device(q.device) if q.device.type == "cuda" else {}
        self.table_key, self.kind = (bits_of(q.dtype), self.d, self.dv), call_kind(spec, call)
        kinds = (self.kind, LEARNED) if spec.score_tensors else (self.kind,)
        self.passes = passes(*self.table_key)
        names = ("forward", *self.passes) if moving is None else ("tangent",)
        self.choose_mask_tile([self.tilings(n, kind)[0] for n in names for kind in kinds])
        if wanted:
            self.kind = LEARNED
        self.transposes = bits_of(q.dtype) == 32  # `launch.transposed`
        self.static = (
            self.hq, self.hq // self.hk, self.q_len, self.kv_len, self.d, self.dv, spec.scale
        )  # fmt: skip
        self.dropout = threshold(spec.dropout), kept_factor(spec.dropout)
        rows = -(-self.q_len // tile.WORKSPACE_ROWS) * tile.WORKSPACE_ROWS
        self.workspace = BackwardWorkspace((*q.shape[:3], self.dv), rows, 0, self.device)
        d, dv = pieces(self.d), pieces(self.dv) if self.dv else (0, 0)
        self.constants = {
            "MASK": self.function("mask"),
            "INDEX": tl.int32 if self.codegen_spec.narrow else tl.int64,
            "PRECISION": product_precision(q.dtype),
            "POSITIVE": spec.scale > 0,
            "D": d[0], "D_REST": d[1], "DV": dv[0], "DV_REST": dv[1],
        }  # fmt: skip

    def tilings(self, name: str, kind: str) -> Sequence[Tiling]:
        """Return the tile sizes for a kernel, best first."""
        if triton.knobs.runtime.interpret:
            return (Tiling(32, 32, 2, 1, 16),)
        return tilings(name, *self.table_key, kind, self.saved)

    def launcher(self, name: str, fn: Any, **constants: Any) -> "Launcher":
        """Return the launcher of a kernel, created at its first use."""
        launcher = self.launchers.get(name)
        if launcher is None:
            launcher = self.launchers[name] = Launcher(self, name, fn, constants)
        return launcher

    def choose_mask_tile(self, blocks: Iterable[Tiling]) -> None:
        """Choose the tile of the block mask.

        It is no larger than the largest of the kernels' blocks, since smaller tiles skip more, and
        at least 64 x 64, since smaller tiles cost more to find. Forward and backward choose the
        same tile and share the block mask.
        """
        if self.tile is not None and self.spec.tiles is None:
            candidates = [Tiling(64, 64, 0, 0), *blocks]
            self.tile = max(c.m for c in candidates), max(c.n for c in candidates)


class Launcher:
    """A kernel of a plan, with the best tile sizes for which the device has shared memory."""

    def __init__(self, plan: Plan, name: str, fn: Any, constants: dict[str, Any]) -> None:
        self.plan, self.name, self.fn = plan, name, fn
        # A program keeps queries; else keys.
        self.queries = name in ("forward", "backward_q", "tangent")
        self.candidates = plan.tilings(name, plan.kind)
        self.constants = plan.constants | constants
        self.choose(0)

    def use_tiling(self, tiling: Tiling) -> None:
        """Use these tile sizes and no others, to time them.

        The block mask gets tiles that suit every kernel, so that kernels do not depend on each
        other's tiling.
        """
        self.candidates = (tiling,)
        if self.plan.spec.tiles is None and self.plan.tile is not None:
            self.plan.tile = TILE
        for launcher in self.plan.launchers.values():
            launcher.choose(0 if launcher is self else launcher.tiled.choice)

    def choose(self, choice: int) -> None:
        """Use one of the candidates, by its index."""
        self.tiled = TiledKernel(self, choice, self.candidates[choice])

    def __call__(
        self, call: Call, tensors: Callable[[int], tuple], variant: Hashable = None
    ) -> tuple:
        """Launch on `tensors(slots)` (`arrange`), and return them.

        - `variant`: the properties of these tensors that may differ between calls of this kind:
          a dtype, or whether a tensor is there.
        """
        plan, seed = self.plan, ()
        if plan.spec.dropout > 0:
            assert call.seed is not None
            seed = (call.seed.to(plan.device),)
        while True:
            tiled = self.tiled  # read once: another thread may go on to the next candidate
            matrices = tensors(tiled.slots)
            call_arguments = plan.known_arguments(tiled.schedules) or plan.call_arguments(
                call, tiled.schedules, *seed
            )
            try:
                tiled.kernel(variant)(matrices, call_arguments)
            except OutOfResources as error:
                self.use_smaller(tiled.choice, error)
                continue
            return matrices

    def arrange(
        self, schedules: TileSchedules, matrices: Sequence[Any], tensors: Sequence[Any],
        floats: Sequence[float],
    ) -> tuple:  # fmt: skip
        """Return the arguments of the kernel.

        - `matrices`: for the forward and the tangent, their first arguments. For a backward q, k,
          v, dout, two transposed copies or None, the workspace, dentropy; for `backward_q` also
          out, lse and dlse, from which it fills the workspace; and the gradients, the captured
          tensors' last.
        """
        plan, grads = self.plan, ()
        count = 6 if self.name == "tangent" else 3
        layout: tuple = tuple([None if x is None else _strides(x) for x in matrices[:count]])
        coords, schedule, captured, seed = plan.arranged(schedules, tensors, floats)
        if self.name not in ("forward", "tangent"):
            q, k, v, dout, first, second, workspace, dentropy, *results = matrices
            transposed = None
            if first is not None:
                transposed = (first, _strides(first)), (second, _strides(second))
            layout = *layout, _strides(dout), transposed
            delta, lse2, *_ = plan.workspace.split(workspace)
            if self.name == "backward_q":
                out, lse, dlse, dq, *captured_grads = results
                matrices = q, k, v, dout, out, lse, dlse, dentropy, lse2, delta, dq
                grads = (tuple(captured_grads),)
            else:
                matrices = q, k, v, dout, lse2, delta, dentropy, *results
        dropout = tile.Dropout(seed[0], *plan.dropout) if seed else None
        return (*matrices, *layout, *plan.static, coords, dropout, schedule, *captured, *grads)

    def use_smaller(self, choice: int, error: OutOfResources) -> None:
        """Use the candidate after one.

        The compiler says whether a tile fits before anything runs: a score may need shared memory
        of its own.
        """
        if choice + 1 == len(self.candidates):
            raise BackendRefused(
                f"backend='triton' has no tile small enough for this GPU: {error}; "
                "use a smaller width, or backend='reference'"
            ) from error
        self.choose(choice + 1)


class TiledKernel:
    """A launcher's kernel with one of its candidates."""

    def __init__(self, launcher: Launcher, choice: int, tiling: Tiling) -> None:
        plan = launcher.plan
        self.launcher, self.choice = launcher, choice
        block, step = (tiling.m, tiling.n) if launcher.queries else (tiling.n, tiling.m)
        self.schedules = TileSchedules(plan, queries=launcher.queries, block=block)
        self.slots = self.schedules.tile_rows * self.schedules.sub  # programs of one head
        self.programs = self.slots * plan.b * plan.hq
        self.length = plan.kv_len if launcher.queries else plan.q_len  # of a tile row
        self.last_schedule: tuple[object, bool] = None, False  # and whether it is scattered
        even = self.length % step == 0 and (plan.tile is None or min(plan.tile) % step == 0)
        # That rows are even helps where columns are too, and rows are wide; at width 64 it costs a
        # register, and 8 bytes are spilled for sm_100.
        rows = plan.q_len if launcher.queries else plan.kv_len
        wide = max(plan.d, plan.dv) > 64
        even_rows = even and wide and rows % tile.EVEN_ROWS == 0
        self.options = launcher.constants | {
            "BLOCK_M": tiling.m, "BLOCK_N": tiling.n, "num_warps": tiling.warps,
            "num_stages": tiling.stages, "EVEN": even, "EVEN_ROWS": even_rows,
            "BLOCK_EDGE": tiling.edge or step,
            "SUB": self.schedules.sub,
        }  # fmt: skip
        if (
            plan.transposes
            and tiling.m * tiling.n >= 512 * tiling.warps
            and plan.d + plan.dv > 64
            and on_cuda(plan.device)
        ):
            # A thread with 16 logits or more needs all 255 registers. Without this option ptxas has
            # used 32 of them and spilled 58 kilobytes.
            self.options["maxnreg"] = 255
        self.kernels: dict[Hashable, KernelLauncher] = {}

    def kernel(self, variant: Hashable) -> KernelLauncher:
        """Return the kernel for the schedule of the last call."""
        schedule = self.schedules.last[1]
        known_schedule, is_scattered = self.last_schedule
        if known_schedule is not schedule:
            is_scattered = main_loop.scattered(schedule, self.length)
            self.last_schedule = schedule, is_scattered
        key = variant, is_scattered
        kernel = self.kernels.get(key)
        if kernel is None:
            launcher, options = self.launcher, self.options | {"SCATTERED": is_scattered}
            arrange = partial(launcher.arrange, self.schedules)
            kernel = self.kernels[key] = KernelLauncher(
                launcher.fn, launcher.plan.device, options, self.programs, arrange
            )
        return kernel


def _strides(x: Tensor) -> tuple:
    """Return the strides of batch and head, of rows, and of columns (None: 1), for `tile.head` and
    `tile.load`.

    The stride of rows is a constant: the addresses within a tile are then one address plus
    constants. The stride of columns, if not 1, depends on the length.
    """
    batch, head, row, column = x.stride()
    outer = unspecialized(batch // 8), unspecialized(head // 8)
    return *outer, tl.constexpr(row), None if column == 1 else column


def approximates_tanh(q: Tensor) -> bool:
    """Check that the GPU has the approximate tanh, and its error is below that of q's dtype."""
    return q.dtype == torch.bfloat16 and on_cuda(q.device)


def on_cuda(device: torch.device) -> bool:
    """Check that kernels are compiled for an NVIDIA GPU."""
    if triton.knobs.runtime.interpret:
        return False
    if device.type == "cuda":
        return torch.version.hip is None  # Triton's driver may not have started
    target = triton.runtime.driver.active.get_current_target()
    return target is not None and target.backend == "cuda"
