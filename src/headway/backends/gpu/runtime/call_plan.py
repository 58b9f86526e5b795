"""The plan of a kind of call, made once, so that a launch takes microseconds.

A plan key holds everything that a kernel's source or its integer arguments depend on: the spec,
dtypes, shapes, strides, positions. Calls with the same key are of one kind. A backend's plan holds
the arguments of a kind, and a launch adds the tensors of a call. Triton compiles a kernel at its
first launch. Later launches go to the compiled kernel (`launcher.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ....blocks import TILE, Tiles, cached_build, superset_tiles
from ....caches import LRUCache
from ....mods.graph import parse
from ....surroundings import capturing
from ....types import Coords, Spec
from ...base import Call, graphs, split
from ..codegen.affine import distance_sign
from ..codegen.emit import gradient_dependence, load_module
from ..codegen.int_ranges import POSITION_LIMIT
from ..codegen.spec import CodegenSpec
from ..exact_sums import ExactSums, exact_width, most_additions
from .device_guard import keep_alive, outside_capture
from .launcher import CallArguments
from .parallel_compile import fix_cache_keys
from .triton_startup import start_triton

T = TypeVar("T")
_plans: LRUCache[Any] = LRUCache(512)  # by plan key and by call signature


def cached(key: tuple, make: Callable[[], T]) -> T:
    """Return the value for a key, made once; the last few hundred are kept."""
    value = _plans.get(key)
    if value is None:
        value = _plans.put(key, make())
    return value


def plan_of(
    name: tuple, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor],
    make: Callable[..., T],
) -> T:  # fmt: skip
    """Return the plan of a call: `make(spec, call, wanted, matrices)`, once for every plan key.

    Calls with a known signature skip the computation of their key.

    - `name`: the first part of the key; it names the plan among those of one call.
    - `wanted`: the gathers that need a gradient.
    - `matrices`: q, k, v and, for a backward, dout.
    """
    signature, (q, k, v), short_key = call.signature, matrices[:3], None
    if undecidable(spec, call):  # the plan of other calls keeps the tiles of one moment
        name = *name, undecidable
    describes_call = q is call.q and k is call.k and v is call.v
    if describes_call and signature is not None and signature.spec is spec:
        # What a signature leaves out; and saved tensors may have come back with other strides
        # (`saved_tensors_hooks`).
        tensors, ints, _ = call.captured
        strides = [tensor.stride() for tensor in (*matrices, *tensors)]
        short_key = (name, signature, wanted, k.shape[2], *ints, *strides)
        plan = _plans.get(short_key)
        if plan is not None:
            return plan
    start_triton()
    key = (name, *plan_key(spec, call, wanted, matrices))
    plan = cached(key, lambda: make(spec, call, wanted, matrices))
    return plan if short_key is None else cached(short_key, lambda: plan)


def clear() -> None:
    """Forget every plan and every compiled kernel."""
    _plans.clear()


def plan_key(spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]) -> tuple:
    """Return everything that a call's plan depends on, but for its name."""
    coords: Any = call.coords
    tensors, ints, _ = call.captured
    if not consecutive(coords):
        shapes = [None if pos is None else pos.shape for pos in (coords.q_pos, coords.kv_pos)]
        coords = (offsets_of(coords), *shapes, coords.straight_below)
    key = [spec, wanted, coords, matrices[0].dtype, matrices[0].device, *ints]
    for matrix in matrices:
        key += matrix.shape, matrix.stride()
    for tensor in tensors:
        key += tensor.shape, tensor.stride(), tensor.dtype
    return tuple(key)


def offsets_of(coords: Coords) -> tuple[int, int, int, int]:
    """Return the offsets of batch rows, heads, queries and keys."""
    return coords.b, coords.h, coords.q, coords.kv


def consecutive(coords: Coords) -> bool:
    """Return True if positions follow one another."""
    return coords.q_pos is None and coords.kv_pos is None


def undecidable(spec: Spec, call: Call) -> bool:
    """Return True if the tiles of a call are unknown: a CUDA graph is being captured, and tensors
    that its mask reads may change before the replay. (The tiles of a given block mask are the
    caller's responsibility.)"""
    if spec.mask is None or spec.tiles is not None:
        return False
    reads = len(call.captured.tensors) > spec.score_tensors or not consecutive(call.coords)
    return reads and capturing(call.q.device)


@lru_cache
def empty_result(device: torch.device) -> Tensor:
    """Return an empty tensor for results that were not asked for. All calls share it, since nothing
    can be written to it."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.float32, device=device)


# -- arguments of kernels -------------------------------------------------------------------------


def unspecialized(n: int) -> int:
    """Encode an integer so that Triton compiles no kernel of its own for it, as it does for 1 and
    for multiples of 16. `do_not_specialize` does not reach integers in tuples. A kernel shifts it
    back: n is `unspecialized(n) >> 2`."""
    return 4 * n + 2


class KernelCoords(NamedTuple):
    """The `Coords` of a call as kernels take them: offsets of its tensors, and positions."""

    b: Any
    h: Any
    q: Any
    kv: Any
    q_pos: Any  # int64 pointer, or None
    q_stride: Any  # between batch rows; 0: all have the same positions
    kv_pos: Any
    kv_stride: Any


class TileSchedule(NamedTuple):
    """The live tiles of every tile row, and the order of tile rows. For dk and dv a tile row is a
    column of the mask's tiles: keys are its rows, and queries its columns."""

    full: Any  # runs of full tiles: offsets, start, count; None: no block mask, all are full
    partial: Any  # runs of partial tiles
    order: Any  # of tile rows: the longest first
    b: Any  # batch rows for which the tiles were built; 1: all share them
    h: Any  # heads for which the tiles were built; 1: all share them
    tile_rows: Any  # of one batch row and head, in kernels `unspecialized`; without a mask, blocks
    size: Any  # rows of a tile
    step: Any  # columns of a tile
    swizzle: Any  # heads that are interleaved, tile row by tile row, to share keys in the L2 cache

    def tensors(self) -> tuple[Tensor, ...]:
        """Return its tensors as a flat tuple."""
        return () if self.full is None else (*self.full, *self.partial, self.order)

    def of(self, tensors: Sequence[Any]) -> tuple["TileSchedule", list[Any]]:
        """Return this schedule with the first of `tensors` in place of its own, and the remaining
        tensors."""
        if self.full is None:
            return self, list(tensors)
        full, partial, (order, *remaining) = tuple(tensors[:3]), tuple(tensors[3:6]), tensors[6:]
        return self._replace(full=full, partial=partial, order=order), remaining


class BasePlan:
    """The plan of a kind of call.

    - `sources`: the modules of its kernels, in the order of their cache keys (`fix_cache_keys`).
    - `diagonals`: whether its kernels can read and sum a tile by diagonals.
    - `approx_tanh`, `affine`, `hoist`, `bias_tables`, `moving`: as in `CodegenSpec`; `affine` and
      `bias_tables` only if positions are small and consecutive, or for `affine` straight.
    - `straight`: positions are read, and follow one another within tiles (`Coords`).
    - `uses_distance_sign`: whether to derive `CodegenSpec.distance_sign`.
    """

    sources: tuple[ModuleType, ...] = ()

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor],
        *, diagonals: bool, approx_tanh: bool, affine: bool = False, hoist: bool = False,
        bias_tables: bool = False, uses_distance_sign: bool = False,
        moving: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        fix_cache_keys(*self.sources)
        q, k, v = matrices[:3]
        (self.b, self.hq, self.q_len, self.d), (self.hk, self.kv_len) = q.shape, k.shape[1:3]
        self.dv, self.spec, self.dtype, self.device = v.shape[3], spec, q.dtype, q.device
        self.mask = graphs(spec)[1]
        coords, in_order = call.coords, consecutive(call.coords)
        self.straight = not in_order and coords.straight_below > 0
        narrow = (in_order or self.straight) and _is_narrow(coords, q, k, call.captured.ints)
        wide_offsets = tuple(map(needs_wide_offsets, call.captured.tensors))
        sign = 0
        if uses_distance_sign and self.mask:
            sign = distance_sign(self.mask, call.captured.ints[spec.score_ints :])
        self.codegen_spec = CodegenSpec(
            spec.score, spec.mask, wanted, narrow,
            consecutive=diagonals and in_order,
            wide_offsets=wide_offsets,
            approx_tanh=approx_tanh,
            per_diagonal=(diagonals or bias_tables) and narrow and in_order,
            affine=affine and narrow,
            hoist=hoist,
            bias_tables=bias_tables and narrow and in_order,
            distance_sign=sign,
            moving=moving,
        )  # fmt: skip
        exact = wanted and spec.deterministic
        self.exact_sums = self._new_exact_sums(call) if exact else ExactSums(0, {}, self.device)
        self.codegen_spec = replace(self.codegen_spec, exact_width=self.exact_sums.width)
        self.generated = load_module(self.codegen_spec)
        fix_cache_keys(self.generated)
        self.offsets = offsets_of(coords)
        self.scattered = coords.q_pos is not None, coords.kv_pos is not None
        self.captured = call.captured.ints, len(call.captured.tensors)
        # Kernels depend on lengths only by whether these fill blocks, of 16 to 128.
        mark, lengths = object(), (math.gcd(n, 128) // 16 for n in (self.q_len, self.kv_len))
        kernels_key = (
            BasePlan, type(self), spec, self.codegen_spec, self.dtype, self.device, self.d, self.dv,
            *[matrix.stride(2) for matrix in matrices], *lengths,
        )  # fmt: skip
        self.uncompiled = cached(kernels_key, lambda: mark) is mark
        self.tile: tuple[int, int] | None = None
        if spec.tiles is not None:
            self.tile = spec.tiles[2:]
        elif self.mask is not None and min(self.b, self.hq, self.q_len, self.kv_len):
            self.tile = TILE
        self.counts = spec.score_tensors, spec.score_ints, spec.score_floats
        # True if the plan key alone determines the tiles.
        _, (tensors, _, floats) = split(spec, call.captured)
        self.constant_tiles = in_order and spec.tiles is None and not tensors and not floats
        self.superset_tiles: dict | None = (
            {} if undecidable(spec, call) else None
        )  # tiles by floats

    def _new_exact_sums(self, call: Call) -> ExactSums:
        """Return the sums of the gradients of captured tensors."""
        text = self.codegen_spec
        graph = parse(text.score)  # type: ignore[arg-type]
        gathers = [graph.nodes[n] for n in text.wanted]
        dependences = [gradient_dependence(graph, gather, text) for gather in gathers]
        sizes = self.b, self.hq, self.q_len, self.kv_len
        width = exact_width(most_additions(dependences, sizes))
        numbers = sorted({int(str(gather.args[0])[1:]) for gather in gathers})
        sizes = {n: call.captured.tensors[n].numel() for n in numbers}
        return ExactSums(width, sizes, self.device)

    def function(self, name: str) -> Any:
        """Return a generated function; None if the call has no such function."""
        return getattr(self.generated, name, None)

    def tiles(self, call: Call) -> tuple[Tiles | None, int, int]:
        """Return the live tiles of a call, and the batch rows and heads they were built for."""
        if self.tile is None:
            return None, 1, 1
        if call.tiles is not None and self.spec.tiles is not None:
            return call.tiles, *self.spec.tiles[:2]
        assert self.mask is not None
        shape = (self.b, self.hq, self.q_len, self.kv_len)
        mask_captured = split(self.spec, call.captured)[1]
        mask_inputs = self.mask, mask_captured, shape, self.tile, self.device, call.coords
        if self.superset_tiles is None:
            return cached_build(*mask_inputs, partial(outside_capture, self.device))
        key = self.tile, *map(repr, mask_captured.floats)
        tiles = self.superset_tiles.get(key)
        if tiles is None:
            tiles = outside_capture(self.device, lambda: superset_tiles(*mask_inputs))
            self.superset_tiles[key] = tiles
        return tiles

    def known_arguments(self, schedules: "TileSchedules") -> "CallArguments | None":
        """Return the `call_arguments` that all calls share, or None. A captured call computes them
        again, so that they are kept alive."""
        if schedules.arguments is not None and (self.tile is None or not capturing(self.device)):
            return schedules.arguments
        return None

    def call_arguments(
        self,
        call: Call,
        schedules: "TileSchedules",
        *more: Tensor,
        schedule: TileSchedule | None = None,
    ) -> "CallArguments":
        """Return the arguments of a call besides its matrices, for `arranged`. They are kept in
        `schedules.arguments` if all calls share them.

        - `more`: other tensors that the kernel takes.
        - `schedule`: the schedule to use instead of `schedules(call)`.
        """
        schedule = schedule or schedules(call)
        tensors = [readable(tensor, self.device) for tensor in call.captured.tensors]
        positions = call.coords.q_pos, call.coords.kv_pos
        tensors += [_contiguous_int64(pos) for pos in positions if pos is not None]
        arguments = CallArguments.of([*schedule.tensors(), *tensors, *more], call.captured.floats)
        if self.constant_tiles and not tensors and not more and not arguments.floats:
            schedules.arguments = arguments
        return arguments

    def arranged(
        self, schedules: "TileSchedules", tensors: Sequence[Tensor], floats: Sequence[float]
    ) -> tuple[KernelCoords, TileSchedule, tuple, list[Tensor]]:
        """Return the flat `call_arguments` as kernels take them: coordinates, the tile schedule,
        captured values (tensors of score and mask, then their numbers), and the kernel's other
        tensors."""
        schedule, remaining = schedules.last[1].of(tensors)
        schedule = schedule._replace(tile_rows=unspecialized(schedule.tile_rows))
        (score_tensors, score_ints, score_floats), (ints, count) = self.counts, self.captured
        captured = (
            _with_sizes(remaining[:score_tensors]), _with_sizes(remaining[score_tensors:count]),
            (*ints[:score_ints], *floats[:score_floats]),
            (*ints[score_ints:], *floats[score_floats:]),
        )  # fmt: skip
        remaining = remaining[count:]
        positions: list[Any] = []
        for scattered in self.scattered:
            pos = remaining.pop(0) if scattered else None
            positions += pos, _batch_stride(pos)
        return KernelCoords(*self.offsets, *positions), schedule, captured, remaining


class TileSchedules:
    """The `TileSchedule`s of a plan's calls.

    - `queries`: True if tile rows are rows of the mask's tiles, False if they are columns.
    - `block`: rows of one program; a tile row has `sub` programs.
    - `swizzle`: `TileSchedule.swizzle`.
    """

    def __init__(self, plan: BasePlan, *, queries: bool, block: int, swizzle: int = 1) -> None:
        self.plan, self.queries, self.swizzle = plan, queries, swizzle
        self.size, self.step = block, block
        if plan.tile is not None:
            self.size, self.step = plan.tile if queries else plan.tile[::-1]
        length = plan.q_len if queries else plan.kv_len
        self.tile_rows, self.sub = -(-length // self.size), -(-self.size // block)
        self.arguments: CallArguments | None = None  # if all calls share them
        self.last: tuple[Tiles | None, TileSchedule] = (
            None,
            TileSchedule(None, None, None, 1, 1, self.tile_rows, self.size, self.step, swizzle),
        )  # fmt: skip

    def __call__(self, call: Call) -> TileSchedule:
        """Return the schedule of a call, made once for the tiles of a block mask."""
        last_tiles, schedule = self.last
        if last_tiles is None or not self.plan.constant_tiles:
            tiles, b, h = self.plan.tiles(call)
            if tiles is None:
                return schedule
            if last_tiles is None or not _are_same(tiles, last_tiles):
                schedule = outside_capture(self.plan.device, partial(self._of, tiles, b, h))
                self.last = tiles, schedule
        keep_alive(self.plan.device, schedule.tensors())
        return schedule

    def _of(self, tiles: Tiles, b: int, h: int) -> TileSchedule:
        full, partial, order = (
            (tiles.rows_full, tiles.rows_partial, tiles.row_order)
            if self.queries
            else (tiles.cols_full, tiles.cols_partial, tiles.col_order)
        )
        return TileSchedule(
            tuple(map(_aligned, full)), tuple(map(_aligned, partial)), _aligned(order),
            b, h, self.tile_rows, self.size, self.step, self.swizzle,
        )  # fmt: skip


# -- details --------------------------------------------------------------------------------------


def _is_narrow(coords: Coords, q: Tensor, k: Tensor, ints: Sequence[int]) -> bool:
    """Return True if positions and captured ints are small, those of rows past the end too."""
    offsets = offsets_of(coords)
    sizes = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    last_straight = coords.straight_below + TILE[0] if coords.straight_below else 0
    return max(map(abs, (*offsets, *ends, last_straight, *ints))) <= POSITION_LIMIT


def needs_wide_offsets(tensor: Tensor) -> bool:
    """Return True if an offset into a tensor may need 64 bits."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * abs(stride) for size, stride in dims) >= 2**31


def readable(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a captured tensor in memory that a kernel can read."""
    if not tensor.numel():  # masked-out pairs may still read it
        return torch.zeros([1] * tensor.dim(), dtype=tensor.dtype, device=device)
    return tensor if tensor.device == device else tensor.to(device)


def _with_sizes(tensors: Sequence[Tensor]) -> tuple:
    """Return every tensor, followed by the size and stride of each of its dimensions."""
    arguments: list[Any] = []
    for tensor in tensors:
        arguments.append(tensor)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            arguments += [size, stride]
    return tuple(arguments)


def _contiguous_int64(pos: Tensor) -> Tensor:
    return pos.to(torch.int64).contiguous()


def _batch_stride(pos: Tensor | None) -> int:
    return pos.shape[-1] if pos is not None and pos.dim() == 2 and len(pos) > 1 else 0


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _are_same(tiles: Tiles, others: Tiles) -> bool:
    return tiles is others or all(
        a is b for a, b in zip(tiles.flatten(), others.flatten(), strict=True)
    )
