"""The plan of a kind of call, made once, so that a launch takes microseconds.

A kind is all that a kernel's text or its integer arguments depend on: the spec, dtypes, shapes,
strides, positions. A backend's plan holds the arguments of a kind; a launch adds the tensors of a
call. Triton compiles a kernel at its first launch; later launches go to the compiled kernel
(`launcher.py`).
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ....blocks import TILE, Tiles, cached_build, undecided
from ....caches import Cache
from ....surroundings import capturing
from ....types import Coords, Spec
from ...base import Call, graphs, split
from ..codegen.affine import distance_sign
from ..codegen.emit import load_module
from ..codegen.int_ranges import POSITION_LIMIT
from ..codegen.spec import CodegenSpec
from .device_guard import keep_alive, outside_capture
from .launcher import CallArguments
from .parallel_compile import fix_cache_keys
from .triton_startup import start_triton

T = TypeVar("T")
_known: Cache[Any] = Cache(512)  # plans by kind and by call signature


def cached(key: tuple, make: Callable[[], T]) -> T:
    """The value made for a key; the last few hundred are kept."""
    found = _known.get(key)
    if found is None:
        found = _known.put(key, make())
    return found


def plan_of(
    of: tuple, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor],
    make: Callable[..., T],
) -> T:  # fmt: skip
    """The plan for a call: `make(spec, call, wanted, matrices)` for the first of its kind.

    Calls with a known signature skip the computation of their kind.

    - `of`: the first part of the key: which plan.
    - `wanted`: the gathers that need a gradient; `matrices`: q, k, v and, for a backward, dout.
    """
    signature, (q, k, v, *dout), short = call.signature, matrices, None
    if undecidable(spec, call):  # the plan of other calls keeps the tiles of one moment
        of = *of, undecidable
    same = q is call.q and k is call.k and v is call.v
    if same and signature is not None and signature.spec is spec:
        short = (of, signature)
        if dout:  # saved tensors may have come back with other strides (`saved_tensors_hooks`)
            strides = [x.stride() for x in (*matrices, *call.captured.tensors)]
            short = (of, signature, wanted, *strides)
        plan = _known.get(short)
        if plan is not None:
            return plan
    start_triton()
    key = (of, *key_of(spec, call, wanted, matrices))
    plan = cached(key, lambda: make(spec, call, wanted, matrices))
    return plan if short is None else cached(short, lambda: plan)


def clear() -> None:
    """Forget every plan and every compiled kernel."""
    _known.clear()


def key_of(spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]) -> tuple:
    """The kind of a call; `matrices` are q, k, v and, for a backward, dout."""
    at, (tensors, ints, _) = call.coords, call.captured
    if not consecutive(at):
        at = (at[:4], *[None if p is None else p.shape for p in at[4:6]], at.straight_below)
    key = [spec, wanted, at, matrices[0].dtype, matrices[0].device, *ints]
    for x in matrices:
        key += x.shape, x.stride()
    for t in tensors:
        key += t.shape, t.stride(), t.dtype
    return tuple(key)


def consecutive(at: Coords) -> bool:
    """Whether positions follow one another."""
    return at.q_pos is None and at.kv_pos is None


def undecidable(spec: Spec, call: Call) -> bool:
    """Whether the tiles of a call are unknown: a CUDA graph is being captured, and the tensors on
    which its mask depends may change before the replay. (The tiles of a given block mask are the
    caller's responsibility.)"""
    if spec.mask is None or spec.tiles is not None:
        return False
    reads = len(call.captured.tensors) > spec.score_tensors or not consecutive(call.coords)
    return reads and capturing(call.q.device)


@lru_cache
def empty_result(device: torch.device) -> Tensor:
    """An empty tensor for results that were not asked for. All calls share it, since nothing can
    be written to it."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.float32, device=device)


# -- arguments of kernels -------------------------------------------------------------------------


def disguised(n: int) -> int:
    """An integer for which Triton compiles nothing of its own, as it does for 1 and for multiples
    of 16, among them those in tuples (where `do_not_specialize` says nothing). A kernel shifts it
    back: n is `disguised(n) >> 2`."""
    return 4 * n + 2


class KernelCoords(NamedTuple):
    """`headway.types.Coords` as kernels take it: where the tensors stand in the whole."""

    b: Any
    h: Any
    q: Any
    kv: Any
    q_pos: Any  # int64 pointer, or None
    q_stride: Any  # between batch rows; 0: all have the same positions
    kv_pos: Any
    kv_stride: Any


class Walk(NamedTuple):
    """The live tiles of every tile row, and the order of tile rows. For dk and dv a tile row is a
    column of the mask's tiles: keys are its rows, and queries its columns."""

    full: Any  # runs of full tiles: offsets, start, count; None: no block mask, all are full
    partial: Any  # runs of partial tiles
    order: Any  # of tile rows: the longest first
    b: Any  # batch rows for which the tiles were built; 1: all share them
    h: Any  # heads for which the tiles were built; 1: all share them
    tile_rows: Any  # of one batch row and head; without a block mask, blocks. Kernels: `disguised`
    size: Any  # rows of a tile
    step: Any  # columns of a tile
    swizzle: Any  # heads that are interleaved, tile row by tile row, to share keys in the L2 cache

    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensors as a flat tuple."""
        return () if self.full is None else (*self.full, *self.partial, self.order)

    def of(self, tensors: Sequence[Any]) -> tuple["Walk", list[Any]]:
        """This walk with the first of `tensors` in the place of its own, and the rest of them."""
        if self.full is None:
            return self, list(tensors)
        full, partial, (order, *rest) = tuple(tensors[:3]), tuple(tensors[3:6]), tensors[6:]
        return self._replace(full=full, partial=partial, order=order), rest


class BasePlan:
    """The plan of a kind of call.

    - `sources`: the modules of its kernels, in the order of their cache keys (`fix_cache_keys`).
    - `diagonals`: whether its kernels can read and sum a tile by diagonals.
    - `approx_tanh`, `affine`, `hoist`, `bias_tables`: as in `CodegenSpec`; `affine` and
      `bias_tables` only where positions are small and consecutive, or for `affine` straight.
    - `straight`: positions are read, and follow one another within tiles (`Coords`).
    - `uses_distance_sign`: whether `CodegenSpec.distance_sign` is looked for.
    """

    sources: tuple[ModuleType, ...] = ()

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor],
        *, diagonals: bool, approx_tanh: bool, affine: bool = False, hoist: bool = False,
        bias_tables: bool = False, uses_distance_sign: bool = False,
    ) -> None:  # fmt: skip
        fix_cache_keys(*self.sources)
        q, k, v = matrices[:3]
        (self.b, self.hq, self.q_len, self.d), (self.hk, self.kv_len) = q.shape, k.shape[1:3]
        self.dv, self.spec, self.dtype, self.device = v.shape[3], spec, q.dtype, q.device
        self.mask = graphs(spec)[1]
        at, in_order = call.coords, consecutive(call.coords)
        self.straight = not in_order and at.straight_below > 0
        narrow = (in_order or self.straight) and _narrow(at, q, k, call.captured.ints)
        wide_offsets = tuple(map(far, call.captured.tensors))
        sign = 0
        if uses_distance_sign and self.mask:
            sign = distance_sign(self.mask, call.captured.ints[spec.score_ints :])
        self.text = CodegenSpec(
            spec.score, spec.mask, wanted, narrow,
            consecutive=diagonals and in_order,
            wide_offsets=wide_offsets,
            approx_tanh=approx_tanh,
            per_diagonal=(diagonals or bias_tables) and narrow and in_order,
            affine=affine and narrow,
            hoist=hoist,
            bias_tables=bias_tables and narrow and in_order,
            distance_sign=sign,
        )  # fmt: skip
        self.generated = load_module(self.text)
        fix_cache_keys(self.generated)
        self.at, self.scattered = at[:4], tuple([p is not None for p in at[4:6]])
        self.captured = call.captured.ints, len(call.captured.tensors)
        # Whether Triton has not yet compiled for such calls. Of lengths it matters whether blocks,
        # of 16 to 128, are whole.
        mark, lengths = object(), (math.gcd(n, 128) // 16 for n in (self.q_len, self.kv_len))
        like = (BasePlan, type(self), spec, self.text, self.dtype, self.device, self.d, self.dv,
                *[x.stride(2) for x in matrices], *lengths)  # fmt: skip
        self.uncompiled = cached(like, lambda: mark) is mark
        self.tile: tuple[int, int] | None = None
        if spec.tiles is not None:
            self.tile = spec.tiles[2:]
        elif self.mask is not None and min(self.b, self.hq, self.q_len, self.kv_len):
            self.tile = TILE
        self.counts = spec.score_tensors, spec.score_ints, spec.score_floats
        # Whether the kind alone determines the tiles.
        _, (tensors, _, floats) = split(spec, call.captured)
        self.constant_tiles = in_order and spec.tiles is None and not tensors and not floats
        self.undecided: dict | None = {} if undecidable(spec, call) else None  # tiles by floats

    def function(self, name: str) -> Any:
        """A generated function; None if the call has no such function."""
        return getattr(self.generated, name, None)

    def tiles(self, call: Call) -> tuple[Tiles | None, int, int]:
        """The live tiles of a call, and the batch rows and heads for which they were built."""
        if self.tile is None:
            return None, 1, 1
        if call.tiles is not None and self.spec.tiles is not None:
            return call.tiles, *self.spec.tiles[:2]
        assert self.mask is not None
        shape = (self.b, self.hq, self.q_len, self.kv_len)
        of_mask = split(self.spec, call.captured)[1]
        of = self.mask, of_mask, shape, self.tile, self.device, call.coords
        if self.undecided is None:
            return cached_build(*of, partial(outside_capture, self.device))
        known = self.tile, *map(repr, of_mask.floats)
        found = self.undecided.get(known)
        if found is None:
            found = self.undecided[known] = outside_capture(self.device, lambda: undecided(*of))
        return found

    def known_arguments(self, walks: "Walks") -> "CallArguments | None":
        """The `call_arguments` that all calls share, if there are. A captured call computes them
        again, so that they are kept alive."""
        if walks.arguments is not None and (self.tile is None or not capturing(self.device)):
            return walks.arguments
        return None

    def call_arguments(
        self, call: Call, walks: "Walks", *more: Tensor, walk: Walk | None = None
    ) -> "CallArguments":
        """The arguments of a call besides its matrices, for `arranged`. They are kept in
        `walks.arguments` if all calls share them.

        - `more`: tensors that a kernel takes besides, for its `arrange`.
        - `walk`: in the place of that of `walks`.
        """
        walk = walk or walks(call)
        tensors = [readable(t, self.device) for t in call.captured.tensors]
        tensors += [_positions(p) for p in call.coords[4:6] if p is not None]
        given = CallArguments.of([*walk.tensors(), *tensors, *more], call.captured.floats)
        if self.constant_tiles and not tensors and not more and not given.floats:
            walks.arguments = given
        return given

    def arranged(
        self, walks: "Walks", tensors: Sequence[Tensor], floats: Sequence[float]
    ) -> tuple[KernelCoords, Walk, tuple, list[Tensor]]:
        """The flat `call_arguments` as kernels take them: coordinates, the walk, captured values
        (tensors of score and mask, then their numbers), and the tensors that a kernel takes
        besides."""
        walk, rest = walks.last[1].of(tensors)
        walk = walk._replace(tile_rows=disguised(walk.tile_rows))
        (t, n, x), (ints, count) = self.counts, self.captured
        of_score, of_mask = _with_sizes(rest[:t]), _with_sizes(rest[t:count])
        captured = (
            of_score, of_mask, (*ints[:n], *floats[:x]), (*ints[n:], *floats[x:])
        )  # fmt: skip
        rest = rest[count:]
        positions: list[Any] = []
        for scattered in self.scattered:
            p = rest.pop(0) if scattered else None
            positions += p, _batch_stride(p)
        return KernelCoords(*self.at, *positions), walk, captured, rest


class Walks:
    """The `Walk`s of a plan's calls.

    - `queries`: whether tile rows are those of the mask; else its columns.
    - `block`: rows of one program; a tile row has `sub` programs.
    - `swizzle`: `Walk.swizzle`.
    """

    def __init__(self, plan: BasePlan, *, queries: bool, block: int, swizzle: int = 1) -> None:
        self.plan, self.queries, self.swizzle = plan, queries, swizzle
        self.size, self.step = block, block
        if plan.tile is not None:
            self.size, self.step = plan.tile if queries else plan.tile[::-1]
        length = plan.q_len if queries else plan.kv_len
        self.tile_rows, self.sub = -(-length // self.size), -(-self.size // block)
        self.arguments: CallArguments | None = None  # if all calls share them
        self.last: tuple[Tiles | None, Walk] = (
            None, Walk(None, None, None, 1, 1, self.tile_rows, self.size, self.step, swizzle)
        )  # fmt: skip

    def __call__(self, call: Call) -> Walk:
        """The walk of a call, made once for the tiles of a block mask."""
        known, walk = self.last
        if known is None or not self.plan.constant_tiles:
            tiles, b, h = self.plan.tiles(call)
            if tiles is None:
                return walk
            if known is None or not _same(tiles, known):
                walk = outside_capture(self.plan.device, partial(self._of, tiles, b, h))
                self.last = tiles, walk
        keep_alive(self.plan.device, walk.tensors())
        return walk

    def _of(self, tiles: Tiles, b: int, h: int) -> Walk:
        full, partial, order = (
            (tiles.rows_full, tiles.rows_partial, tiles.row_order)
            if self.queries
            else (tiles.cols_full, tiles.cols_partial, tiles.col_order)
        )
        return Walk(
            tuple(map(_aligned, full)), tuple(map(_aligned, partial)), _aligned(order),
            b, h, self.tile_rows, self.size, self.step, self.swizzle,
        )  # fmt: skip


# -- details --------------------------------------------------------------------------------------


def _narrow(at: Coords, q: Tensor, k: Tensor, ints: Sequence[int]) -> bool:
    """Whether positions and captured ints are known to be small, those of rows past the end too."""
    ends = at.b + q.shape[0], at.h + q.shape[1], at.q + q.shape[2], at.kv + k.shape[2]
    straight = at.straight_below + TILE[0] if at.straight_below else 0
    return max(map(abs, (*at[:4], *ends, straight, *ints))) <= POSITION_LIMIT


def far(t: Tensor) -> bool:
    """Whether an offset into a tensor may need 64 bits."""
    pairs = zip(t.shape, t.stride(), strict=True)
    return sum((size - 1) * abs(step) for size, step in pairs) >= 2**31


def readable(t: Tensor, device: torch.device) -> Tensor:
    """A captured tensor in memory that a kernel can read."""
    if not t.numel():  # a pair that is not kept may still read it
        return torch.zeros([1] * t.dim(), dtype=t.dtype, device=device)
    return t if t.device == device else t.to(device)


def _with_sizes(tensors: Sequence[Tensor]) -> tuple:
    """For every tensor its pointer, then the size and stride of every dimension."""
    found: list[Any] = []
    for t in tensors:
        found.append(t)
        for size, stride in zip(t.shape, t.stride(), strict=True):
            found += [size, stride]
    return tuple(found)


def _positions(pos: Tensor) -> Tensor:
    return pos.to(torch.int64).contiguous()


def _batch_stride(pos: Tensor | None) -> int:
    return pos.shape[-1] if pos is not None and pos.dim() == 2 and len(pos) > 1 else 0


def _aligned(x: Tensor) -> Tensor:
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _same(tiles: Tiles, known: Tiles) -> bool:
    return tiles is known or all(
        a is b for a, b in zip(tiles.flatten(), known.flatten(), strict=True)
    )
