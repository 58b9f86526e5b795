"""The plan of a kind of call (`gpu.runtime.call_plan`) for these kernels: tile sizes, constants,
launchers."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

import triton

from ...blocks import TILE
from ...dropout import threshold
from ...errors import BackendRefused
from ...types import Spec
from ..base import Call
from ..gpu import preprocess
from ..gpu.device import diagonals, gradients, maths, softmax, tiles
from ..gpu.preprocess import BackwardWorkspace
from ..gpu.products import bits_of, product_precision
from ..gpu.runtime.call_plan import BasePlan, Walks, plan_of, unspecialized
from ..gpu.runtime.launcher import KernelLauncher
from . import kernel_backward, kernel_forward, saved, tile, walk
from .config import LEARNED, Config, configs, kind_of, one_pass, passes, pieces


def planned(spec: Spec, call: Call, wanted: tuple[int, ...], *matrices: Tensor) -> "Plan":
    """The plan for a call; `matrices` are q, k, v and, for a backward, dout."""
    of = Plan, product_precision(matrices[0].dtype)
    return plan_of(of, spec, call, wanted, matrices, Plan)


class Plan(BasePlan):
    """Calls of one kind."""

    sources = (
        maths, diagonals, gradients, tiles, softmax, preprocess, tile, walk, kernel_forward,
        kernel_backward,
    )  # fmt: skip

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]
    ) -> None:
        q = matrices[0]
        super().__init__(
            spec, call, wanted, matrices, diagonals=True, approx_tanh=approximates_tanh(q)
        )
        self.launchers: dict[str, Launcher] = {}
        self.saved = saved.load(saved.card(q.device)) if q.device.type == "cuda" else {}
        self.size, self.kind = (bits_of(q.dtype), self.d, self.dv), kind_of(spec, call)
        kinds = (self.kind, LEARNED) if spec.score_tensors else (self.kind,)
        # The kernel of dq also makes the gradients of what the score captures; and it alone sums in
        # a fixed order.
        self.one_pass = not (wanted or spec.deterministic) and one_pass(
            *self.size, self.kind, self.saved
        )
        self.passes = passes(*self.size)
        backward = ("backward",) if self.one_pass else self.passes
        names = "forward", *backward
        self.suit([self.configs(name, kind)[0] for name in names for kind in kinds])
        if wanted:
            self.kind = LEARNED
        self.transposes = bits_of(q.dtype) == 32  # `launch.transposed`
        self.static = (
            self.hq, self.hq // self.hk, self.q_len, self.kv_len, self.d, self.dv, spec.scale
        )  # fmt: skip
        limit = threshold(spec.dropout)
        self.dropout = (
            min(limit, 2**32 - 1), 1 / (1 - spec.dropout) if limit < 2**32 else 0.0
        )  # fmt: skip
        rows = -(-self.q_len // tile.WORKSPACE_ROWS) * tile.WORKSPACE_ROWS
        self.workspace = BackwardWorkspace((*q.shape[:3], self.dv), rows, 0, self.device)
        d, dv = pieces(self.d), pieces(self.dv)
        self.constants = {
            "MASK": self.function("mask"),
            "INDEX": tl.int32 if self.text.narrow else tl.int64,
            "PRECISION": product_precision(q.dtype),
            "POSITIVE": spec.scale > 0,
            "D": d[0], "D_REST": d[1], "DV": dv[0], "DV_REST": dv[1],
        }  # fmt: skip

    def configs(self, name: str, kind: str) -> Sequence[Config]:
        """The tile sizes for a kernel, best first."""
        if triton.knobs.runtime.interpret:
            return (Config(32, 32, 2, 1, 16),)
        return configs(name, *self.size, kind, self.saved)

    def launcher(self, name: str, fn: Any, **constants: Any) -> "Launcher":
        """The launcher of a kernel, made at its first use."""
        found = self.launchers.get(name)
        if found is None:
            found = self.launchers[name] = Launcher(self, name, fn, constants)
        return found

    def suit(self, blocks: Iterable[Config]) -> None:
        """Choose the tile of the block mask: no larger than the largest of the kernels' blocks,
        since smaller tiles skip more; at least 64 x 64, since smaller tiles cost more to find.
        Forward and backward choose the same tile, and share the block mask."""
        if self.tile is not None and self.spec.tiles is None:
            every = [Config(64, 64, 0, 0), *blocks]
            self.tile = max(how.m for how in every), max(how.n for how in every)


class Launcher:
    """A kernel of a plan, with the best tile sizes for which the device has shared memory."""

    def __init__(self, plan: Plan, name: str, fn: Any, constants: dict[str, Any]) -> None:
        self.plan, self.name, self.fn = plan, name, fn
        self.queries = name in ("forward", "backward_q")  # a program keeps queries; else keys
        self.rows = plan.configs(name, plan.kind)
        self.constants = plan.constants | constants
        self.choose(0)

    def take(self, how: Config) -> None:
        """Take these tile sizes and no others, to time them. The block mask gets tiles that suit
        every kernel, so that kernels do not depend on each other's sizes."""
        self.rows, self.n = (how,), 0
        if self.plan.spec.tiles is None and self.plan.tile is not None:
            self.plan.tile = TILE
        for launcher in self.plan.launchers.values():
            launcher.choose(launcher.n)

    def choose(self, n: int) -> None:
        """Take the n-th row of the table."""
        plan, how = self.plan, self.rows[n]
        self.n = n
        block, step = (how.m, how.n) if self.queries else (how.n, how.m)
        self.walks = Walks(plan, queries=self.queries, block=block)
        self.slots = self.walks.tile_rows * self.walks.sub  # programs of one head
        self.programs = self.slots * plan.b * plan.hq
        self.length = plan.kv_len if self.queries else plan.q_len  # of a tile row
        self.last_walk: tuple[object, bool] = None, False  # and whether it is scattered
        whole = self.length % step == 0 and (plan.tile is None or min(plan.tile) % step == 0)
        # What is known of rows matters where columns cost nothing, and rows are wide; 64 wide it
        # costs a register, and 8 bytes are spilled for sm_100.
        rows = plan.q_len if self.queries else plan.kv_len
        wide = max(plan.d, plan.dv) > 64
        even_rows = whole and wide and rows % tile.EVEN_ROWS == 0
        self.options = self.constants | {
            "BLOCK_M": how.m, "BLOCK_N": how.n, "num_warps": how.warps, "num_stages": how.stages,
            "EVEN": whole, "EVEN_ROWS": even_rows, "BLOCK_EDGE": how.edge or step,
            "SUB": self.walks.sub,
        }  # fmt: skip
        if (
            plan.transposes
            and how.m * how.n >= 512 * how.warps
            and plan.d + plan.dv > 64
            and on_cuda(plan.device)
        ):
            # A thread with 16 logits or more needs all 255 registers. Without this option ptxas has
            # used 32 of them and spilled 58 kilobytes.
            self.options["maxnreg"] = 255
        self.kernels: dict[Hashable, KernelLauncher] = {}

    def __call__(
        self, call: Call, tensors: Callable[[int], tuple], variant: Hashable = None
    ) -> tuple:
        """Launch on `tensors(slots)` (`arrange`), which are returned.

        - `variant`: what may differ in these tensors between calls of this kind: a dtype, or
          whether there is one.
        """
        plan, more = self.plan, ()
        if plan.spec.dropout > 0:
            assert call.seed is not None
            more = (call.seed.to(plan.device),)
        while True:
            own = tensors(self.slots)
            given = plan.known_arguments(self.walks) or plan.call_arguments(call, self.walks, *more)
            if self.last_walk[0] is not (made := self.walks.last[1]):
                self.last_walk = made, walk.scattered(made, self.length)
            key = variant, self.last_walk[1]
            kernel = self.kernels.get(key)
            if kernel is None:
                options = self.options | {"SCATTERED": key[1]}
                kernel = self.kernels[key] = KernelLauncher(
                    self.fn, plan.device, options, self.programs, self.arrange
                )
            try:
                kernel(own, given)
            except OutOfResources as error:
                self.smaller(error)
                continue
            return own

    def arrange(self, own: Sequence[Any], tensors: Sequence[Any], floats: Sequence[float]) -> tuple:
        """The arguments of the kernel.

        - `own`: for the forward, its first arguments. For a backward q, k, v, dout, two transposed
          copies or None, the workspace; for `backward_q` also out, lse and dlse, of which it makes
          the workspace; and the gradients, those of captured tensors last.
        """
        plan, grads = self.plan, ()
        layout: tuple = tuple(map(_strides, own[:3]))
        coords, walk, captured, seed = plan.arranged(self.walks, tensors, floats)
        if self.name != "forward":
            q, k, v, dout, one, two, workspace, *to = own
            transposed = None if one is None else ((one, _strides(one)), (two, _strides(two)))
            layout = *layout, _strides(dout), transposed
            delta, lse2, *_ = plan.workspace.split(workspace)
            if self.name == "backward_q":
                *of_rows, dq = to[:4]
                own, grads = (q, k, v, dout, *of_rows, lse2, delta, dq), (tuple(to[4:]),)
            else:
                own = q, k, v, dout, lse2, delta, *to
        dropout = tile.Dropout(seed[0], *plan.dropout) if seed else None
        return (*own, *layout, *plan.static, coords, dropout, walk, *captured, *grads)

    def smaller(self, error: OutOfResources) -> None:
        """Take the next row of the table. The compiler says whether a tile fits, before anything
        runs: a score may need shared memory of its own."""
        if self.n + 1 == len(self.rows):
            raise BackendRefused(
                f"backend='triton' has no tile small enough for this GPU: {error}; "
                "use a smaller width, or backend='reference'"
            ) from error
        self.choose(self.n + 1)


def _strides(x: Tensor) -> tuple:
    """The strides of batch and head, of rows, and of columns (None: 1), as `tile.head` and
    `tile.load` take them. That of rows is a constant: the addresses within a tile are then one
    address plus constants. That of columns, if not 1, depends on the length."""
    batch, head, row, column = x.stride()
    heads = unspecialized(batch // 8), unspecialized(head // 8)
    return *heads, tl.constexpr(row), None if column == 1 else column


def approximates_tanh(q: Tensor) -> bool:
    """Whether the GPU has the approximate tanh, and its error is below that of q's dtype."""
    return q.dtype == torch.bfloat16 and on_cuda(q.device)


def on_cuda(device: torch.device) -> bool:
    """Whether kernels are compiled for an NVIDIA GPU."""
    if triton.knobs.runtime.interpret:
        return False
    if device.type == "cuda":
        return torch.version.hip is None  # Triton's driver may not have started
    target = triton.runtime.driver.active.get_current_target()
    return target is not None and target.backend == "cuda"
