"""What calls of one kind share, worked out once, so that a launch takes microseconds.

A kind is everything that a kernel's text or its whole-number arguments depend on: the spec, dtypes,
shapes, strides, positions. A backend's plan has the arguments of that kind in place, and adds the
tensors of a call. The first launch of a kernel goes through Triton, which compiles; later ones go
straight to the compiled kernel (`launcher.py`).
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
from ....types import Coords as Places
from ....types import Spec
from ...base import Call, graphs, split
from ..codegen.affine import distance_sign
from ..codegen.emit import Text, functions
from ..codegen.int_ranges import POSITION_LIMIT
from .device_guard import capturing, keep_alive, outside_capture
from .launcher import CallArguments
from .parallel_compile import settle
from .triton_startup import starting

T = TypeVar("T")
_known: Cache[Any] = Cache(512)  # by kind


def remembered(key: tuple, make: Callable[[], T]) -> T:
    """What was made for this key, the last few hundred times that something was."""
    found = _known.get(key)
    if found is None:
        found = _known.put(key, make())
    return found


def plan_of(
    of: tuple, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor],
    make: Callable[..., T],
) -> T:  # fmt: skip
    """The plan for a call, `make(spec, call, wanted, matrices)` the first time; `of` says of what.

    Calls that are alike are known without a look at all that they have in common.
    """
    alike, (q, k, v, *dout), short = call.signature, matrices, None
    if undecidable(spec, call):  # the tiles of the plan for other calls are those of one moment
        of = *of, undecidable
    if alike is not None and alike.spec is spec and q is call.q and k is call.k and v is call.v:
        short = (of, alike)
        if dout:  # what was saved may have come back with other strides (`saved_tensors_hooks`)
            strides = [x.stride() for x in (*matrices, *call.captured.tensors)]
            short = (of, alike, wanted, *strides)
        plan = _known.get(short)
        if plan is not None:
            return plan
    starting()
    key = (of, *key_of(spec, call, wanted, matrices))
    plan = remembered(key, lambda: make(spec, call, wanted, matrices))
    return plan if short is None else remembered(short, lambda: plan)


def clear() -> None:
    """Forget every plan and every compiled kernel."""
    _known.clear()


def key_of(spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]) -> tuple:
    """The kind of a call; `matrices` are q, k, v and, for a backward, dout."""
    at, (tensors, ints, _) = call.coords, call.captured
    if not consecutive(at):
        at = (at[:4], *[None if p is None else p.shape for p in at[4:]])
    key = [spec, wanted, at, matrices[0].dtype, matrices[0].device, *ints]
    for x in matrices:
        key += x.shape, x.stride()
    for t in tensors:
        key += t.shape, t.stride(), t.dtype
    return tuple(key)


def consecutive(at: Places) -> bool:
    """Whether positions follow one another."""
    return at.q_pos is None and at.kv_pos is None


def undecidable(spec: Spec, call: Call) -> bool:
    """Whether nobody knows now which tiles a call visits: what its mask depends on may be written
    to before the CUDA graph that is being captured is replayed. (Given tiles are the caller's.)"""
    if spec.mask is None or spec.tiles is not None:
        return False
    reads = len(call.captured.tensors) > spec.score_tensors or not consecutive(call.coords)
    return reads and capturing(call.q.device)


@lru_cache
def nothing(device: torch.device) -> Tensor:
    """An empty tensor, for results that were not asked for: one for all calls, since none can be
    written to."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.float32, device=device)


# -- what kernels are given -----------------------------------------------------------------------


class Coords(NamedTuple):
    """Where the tensors stand in the whole (`headway.types.Coords`), as kernels take it."""

    b: Any
    h: Any
    q: Any
    kv: Any
    q_pos: Any  # int64 pointer, or None
    q_stride: Any  # from one batch row to the next: 0 where all have the same positions
    kv_pos: Any
    kv_stride: Any


class Walk(NamedTuple):
    """The live tiles of every line (a row of tiles; for dk and dv a column), and their order."""

    full: Any  # offsets, start, count; None: no block mask, all is full
    partial: Any
    order: Any
    b: Any  # what the tiles were built for: 1 for all batch rows alike, and for all heads
    h: Any
    tile_rows: Any  # of one batch row and head; without a block mask, blocks
    size: Any  # rows in a line
    step: Any  # rows in a tile on the other side
    swizzle: Any  # heads that take turns within a line: they share keys in cache

    def tensors(self) -> tuple[Tensor, ...]:
        """Those of it, in a row."""
        return () if self.full is None else (*self.full, *self.partial, self.order)

    def of(self, tensors: Sequence[Any]) -> tuple["Walk", list[Any]]:
        """The same with the first of others for its tensors, and the rest of them."""
        if self.full is None:
            return self, list(tensors)
        full, partial, (order, *rest) = tuple(tensors[:3]), tuple(tensors[3:6]), tensors[6:]
        return self._replace(full=full, partial=partial, order=order), rest


class BasePlan:
    """Calls of one kind.

    - `sources`: the modules of its kernels, whose keys are worked out in this order (`settle`).
    - `diagonals`: whether its kernels can read and add up a tile by diagonals.
    - `approx_tanh`, `affine`, `hoist`, `bias_tables`: as in `Text`; `affine` and `bias_tables`
      only where positions are small and consecutive.
    - `uses_distance_sign`: whether `Text.distance_sign` is looked for.
    """

    sources: tuple[ModuleType, ...] = ()

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor],
        *, diagonals: bool, approx_tanh: bool, affine: bool = False, hoist: bool = False,
        bias_tables: bool = False, uses_distance_sign: bool = False,
    ) -> None:  # fmt: skip
        settle(*self.sources)
        q, k, v = matrices[:3]
        (self.b, self.hq, self.q_len, self.d), (self.hk, self.kv_len) = q.shape, k.shape[1:3]
        self.dv, self.spec, self.dtype, self.device = v.shape[3], spec, q.dtype, q.device
        self.mask = graphs(spec)[1]
        at, in_line = call.coords, consecutive(call.coords)
        narrow = in_line and _narrow(at, q, k, call.captured.ints)
        wide_offsets = tuple(map(_far, call.captured.tensors))
        sign = 0
        if uses_distance_sign and self.mask:
            sign = distance_sign(self.mask, call.captured.ints[spec.score_ints :])
        self.text = Text(
            spec.score, spec.mask, wanted, narrow, diagonals and in_line, wide_offsets, approx_tanh,
            (diagonals or bias_tables) and narrow, affine and narrow, hoist, bias_tables and narrow,
            sign,
        )  # fmt: skip
        self.generated = functions(self.text)
        settle(self.generated)
        self.at, self.scattered = at[:4], tuple([p is not None for p in at[4:]])
        self.captured = call.captured.ints, len(call.captured.tensors)
        # Whether Triton has compiled for such calls; their lengths matter by what divides them.
        mark, lengths = object(), (math.gcd(n, 128) for n in (self.q_len, self.kv_len))
        like = (BasePlan, type(self), spec, self.text, self.dtype, self.device, self.d, self.dv,
                *[x.stride(2) for x in matrices], *lengths)  # fmt: skip
        self.uncompiled = remembered(like, lambda: mark) is mark
        self.tile: tuple[int, int] | None = None
        if spec.tiles is not None:
            self.tile = spec.tiles[2:]
        elif self.mask is not None and min(self.b, self.hq, self.q_len, self.kv_len):
            self.tile = TILE
        self.counts = spec.score_tensors, spec.score_ints, spec.score_floats
        # Nothing that is no part of the kind tells one mask from another.
        _, (tensors, _, floats) = split(spec, call.captured)
        self.steady = in_line and spec.tiles is None and not tensors and not floats
        self.undecided: dict | None = {} if undecidable(spec, call) else None  # tiles, by floats

    def function(self, name: str) -> Any:
        """One of the generated functions; None where the call has none."""
        return getattr(self.generated, name, None)

    def tiles(self, call: Call) -> tuple[Tiles | None, int, int]:
        """The live tiles of a call, and the batch rows and heads that they were built for."""
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
        """What all calls bring (`call_arguments`), where that is known. A call that is captured
        looks again: what it brings is kept then."""
        if walks.given is not None and (self.tile is None or not capturing(self.device)):
            return walks.given
        return None

    def call_arguments(
        self, call: Call, walks: "Walks", *more: Tensor, walk: Walk | None = None
    ) -> "CallArguments":
        """What a call brings besides its matrices, for `arranged`; kept in `walks.given` where it
        is the same for all calls.

        - `more`: what a kernel takes besides, for its `arrange`.
        - `walk`: another than that of `walks`.
        """
        walk = walk or walks(call)
        tensors = [_somewhere(t, self.device) for t in call.captured.tensors]
        tensors += [_positions(p) for p in call.coords[4:] if p is not None]
        given = CallArguments.of([*walk.tensors(), *tensors, *more], call.captured.floats)
        if self.steady and not tensors and not more and not given.floats:
            walks.given = given
        return given

    def arranged(
        self, walks: "Walks", tensors: Sequence[Tensor], floats: Sequence[float]
    ) -> tuple[Coords, Walk, tuple, list[Tensor]]:
        """Of what `call_arguments` put in a row: where a call stands, its walk, what its score and
        mask capture (tensors of both, then numbers of both), and what its kernel takes besides."""
        walk, rest = walks.made[1].of(tensors)
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
        return Coords(*self.at, *positions), walk, captured, rest


class Walks:
    """The walks over the lines of tiles of a plan.

    - `queries`: lines are rows of tiles; else columns.
    - `block`: rows of a line that one program takes; a line has `sub` of them.
    - `near`: `Walk.near`.
    """

    def __init__(self, plan: BasePlan, *, queries: bool, block: int, swizzle: int = 1) -> None:
        self.plan, self.queries, self.swizzle = plan, queries, swizzle
        self.size, self.step = block, block
        if plan.tile is not None:
            self.size, self.step = plan.tile if queries else plan.tile[::-1]
        length = plan.q_len if queries else plan.kv_len
        self.tile_rows, self.sub = -(-length // self.size), -(-self.size // block)
        self.given: CallArguments | None = None  # where all calls bring the same
        self.made: tuple[Tiles | None, Walk] = (
            None, Walk(None, None, None, 1, 1, self.tile_rows, self.size, self.step, swizzle)
        )  # fmt: skip

    def __call__(self, call: Call) -> Walk:
        """The walk for a call, made once for the tiles of a block mask."""
        known, walk = self.made
        if known is None or not self.plan.steady:
            tiles, b, h = self.plan.tiles(call)
            if tiles is None:
                return walk
            if known is None or not _same(tiles, known):
                walk = outside_capture(self.plan.device, partial(self._of, tiles, b, h))
                self.made = tiles, walk
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


def _narrow(at: Places, q: Tensor, k: Tensor, ints: Sequence[int]) -> bool:
    """Whether positions, and the ints that are captured, are known to be small."""
    ends = at.b + q.shape[0], at.h + q.shape[1], at.q + q.shape[2], at.kv + k.shape[2]
    return max(map(abs, (*at[:4], *ends, *ints))) <= POSITION_LIMIT


def _far(t: Tensor) -> bool:
    """Whether an offset into a tensor may need 64 bits."""
    pairs = zip(t.shape, t.stride(), strict=True)
    return sum((size - 1) * abs(step) for size, step in pairs) >= 2**31


def _somewhere(t: Tensor, device: torch.device) -> Tensor:
    """What a score captures, where a kernel can read it."""
    if not t.numel():  # nothing to read, but a pair that is not kept may ask
        return torch.zeros([1] * t.dim(), dtype=t.dtype, device=device)
    return t if t.device == device else t.to(device)


def _with_sizes(tensors: Sequence[Tensor]) -> tuple:
    """Pointer, then size and stride of every dimension, of every tensor."""
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
