"""What is the same for all calls of one kind, worked out once, so that a launch takes microseconds.

A kind is everything that a kernel's text or its whole-number arguments depend on: the spec, dtypes,
shapes, strides, positions. A `Plan` has the arguments of that kind in place, its `Launcher`s add
the tensors of a call. The first launch goes through Triton, which compiles; later ones go straight
to the compiled kernel (`kernel[grid](*arguments)`, the same in Triton 3.6 to 3.9), since for calls
of one kind Triton would choose the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

import triton

from ...blocks import Tiles, cached_build
from ...dropout import threshold
from ...errors import BackendRefused
from ...types import Coords, Spec
from ..base import Call, graphs, split
from ..kernels.device import on
from ..kernels.emit import Text, functions
from ..kernels.widths import SMALL
from . import saved, tile
from .config import Config, configs, one_pass, pieces

_TILE = (128, 128)  # of the block masks built here
_MOST = 256  # plans that are remembered

_plans: dict[tuple, "Plan"] = {}


def planned(spec: Spec, call: Call, wanted: tuple[int, ...], *matrices: Tensor) -> "Plan":
    """The plan for a call; `matrices` are q, k, v and, for a backward, dout."""
    at = call.coords
    key = (
        spec, wanted, at[:4], *[None if p is None else p.shape for p in at[4:]],
        *[(x.shape, x.stride()) for x in matrices], matrices[0].dtype, matrices[0].device,
        tuple(call.captured.ints), *[(t.shape, t.stride(), t.dtype) for t in call.captured.tensors],
        _precision(matrices[0].dtype),
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        if len(_plans) >= _MOST:
            del _plans[next(iter(_plans))]
        found = _plans[key] = Plan(spec, call, wanted, matrices)
    return found


def clear() -> None:
    """Forget every plan."""
    _plans.clear()


class Plan:
    """Calls of one kind."""

    def __init__(
        self, spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]
    ) -> None:
        q, k, v = matrices[:3]
        (self.b, self.hq, self.q_len, self.d), (self.hk, self.kv_len) = q.shape, k.shape[1:3]
        self.dv, self.spec, self.dtype, self.device = v.shape[3], spec, q.dtype, q.device
        self.mask = graphs(spec)[1]
        self.text = _text(spec, call, q, k, wanted)
        self.given = functions(self.text)
        self.launchers: dict[str, Launcher] = {}
        known = saved.load(saved.card(q.device)) if q.device.type == "cuda" else {}
        kind = "learned" if wanted else "plain" if spec.score is None else "score"
        self.size = q.dtype.itemsize, self.d, self.dv, kind, known
        # A gradient of what the score captures is made beside dq, and in a fixed order only there.
        self.one_pass = not wanted and not spec.deterministic and one_pass(*self.size)
        self.tile: tuple[int, int] | None = None
        if spec.tiles is not None:
            self.tile = spec.tiles[2:]
        elif self.mask is not None and min(self.b, self.hq, self.q_len, self.kv_len):
            self.tile = _TILE
        self.static = (
            *(x.stride()[:3] for x in matrices), self.hq, self.hq // self.hk, self.q_len,
            self.kv_len, self.d, self.dv, spec.scale,
        )  # fmt: skip
        at = call.coords
        self.coords = None
        if at.q_pos is None and at.kv_pos is None:
            self.coords = tile.Coords(*at[:4], None, 0, None, 0)
        limit = threshold(spec.dropout)
        self.dropout = (
            min(limit, 2**32 - 1), 1 / (1 - spec.dropout) if limit < 2**32 else 0.0
        )  # fmt: skip
        d, dv = pieces(self.d), pieces(self.dv)
        self.constants = {
            "MASK": getattr(self.given, "mask", None),
            "INDEX": tl.int32 if self.text.narrow else tl.int64,
            "PRECISION": _precision(q.dtype),
            "POSITIVE": spec.scale > 0,
            "D": d[0], "D_REST": d[1], "DV": dv[0], "DV_REST": dv[1],
        }  # fmt: skip

    def launcher(self, name: str, fn: Any, **constants: Any) -> "Launcher":
        """The launcher of a kernel, made when it is first asked for."""
        found = self.launchers.get(name)
        if found is None:
            found = self.launchers[name] = Launcher(self, name, fn, constants)
        return found

    def tiles(self, call: Call) -> tuple[Tiles | None, int, int]:
        """The live tiles of a call, and the batch rows and heads that they were built for."""
        if self.tile is None:
            return None, 1, 1
        if call.tiles is not None and self.spec.tiles is not None:
            return call.tiles, *self.spec.tiles[:2]
        assert self.mask is not None
        shape = (self.b, self.hq, self.q_len, self.kv_len)
        of_mask = split(self.spec, call.captured)[1]
        return cached_build(self.mask, of_mask, shape, self.tile, self.device, call.coords)

    def per_call(self, call: Call) -> tuple[tuple, tuple, list[Tensor]]:
        """Arguments that a call brings besides its matrices and its walk, and their tensors."""
        at, seen = call.coords, list(call.captured.tensors)
        coords, dropout = self.coords, None
        if coords is None:
            q_pos, kv_pos = (_positions(p) for p in at[4:])
            coords = tile.Coords(
                *at[:4], q_pos, _batch_stride(q_pos), kv_pos, _batch_stride(kv_pos)
            )
            seen += [p for p in (q_pos, kv_pos) if p is not None]
        if self.spec.dropout > 0:
            assert call.seed is not None
            seed = call.seed.to(self.device)
            seen.append(seed)
            dropout = tile.Dropout(seed, *self.dropout)
        captured: list[Any] = []
        for part in split(self.spec, call.captured):
            captured.append(_tensors(part.tensors, self.device))
            captured.append((*part.ints, *part.floats))
        of_score, score_numbers, of_mask, mask_numbers = captured
        return (coords, dropout), (of_score, of_mask, score_numbers, mask_numbers), seen


class Launcher:
    """One kernel of a plan: with the best tile that the device has room for."""

    def __init__(self, plan: Plan, name: str, fn: Any, constants: dict[str, Any]) -> None:
        self.plan, self.fn = plan, fn
        self.queries = name != "backward_kv" and name != "backward"  # lines are rows of tiles
        self.rows = _rows(plan, name)
        self.constants = plan.constants | constants
        self.choose(0)

    def choose(self, n: int) -> None:
        """Take the n-th tile of the table."""
        plan, how = self.plan, self.rows[n]
        self.n = n
        self.block = how.m if self.queries else how.n
        length, other, step = plan.q_len, plan.kv_len, how.n
        if not self.queries:
            length, other, step = plan.kv_len, plan.q_len, how.m
        size = self.block if plan.tile is None else plan.tile[0 if self.queries else 1]
        self.lines, self.sub = -(-length // size), -(-size // self.block)
        self.slots = self.lines * self.sub  # programs of one head
        self.programs = self.slots * plan.b * plan.hq
        whole = other % step == 0 and (plan.tile is None or min(plan.tile) % step == 0)
        self.options = self.constants | {
            "BLOCK_M": how.m, "BLOCK_N": how.n, "num_warps": how.warps, "num_stages": how.stages,
            "EVEN": whole, "SUB": self.sub,
        }  # fmt: skip
        names = [p for p in self.fn.arg_names if p in self.options]
        self.tail = tuple(self.options[p] for p in names)
        self.compiled: Any = None
        self.walked: tuple = (None, None)

    def __call__(self, call: Call, tensors: Callable[[int], tuple], *more: Any) -> tuple:
        """Launch on `tensors(slots)`, which are returned; `more` are the kernel's own arguments."""
        plan = self.plan
        places, captured, seen = plan.per_call(call)
        while True:
            given = tensors(self.slots)
            walk = self.walk(call)
            args = (*given, *plan.static, *places, walk, *captured, *more)
            # Triton's choice depends on whether pointers are multiples of 16: here all are.
            plain = all(x is None or x.data_ptr() % 16 == 0 for x in (*given, *seen))
            with on(plan.device):
                if plain and self.compiled is not None:
                    self.compiled[(self.programs, 1, 1)](*args, *self.tail)
                    return given
                try:
                    compiled = self.fn[(self.programs,)](*args, **self.options)
                except OutOfResources as error:
                    self.smaller(error)
                    continue
            if plain and hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
                self.compiled = compiled
            return given

    def smaller(self, error: OutOfResources) -> None:
        """The next tile of the table. Whether one fits the compiler says, before anything runs: a
        score may need shared memory of its own."""
        if self.n + 1 == len(self.rows):
            raise BackendRefused(
                f"backend='triton' has no tile small enough for this GPU: {error}; "
                "use a smaller width, or backend='reference'"
            ) from error
        self.choose(self.n + 1)

    def walk(self, call: Call) -> tile.Walk:
        """The lines of tiles, made once for the tiles of a block mask."""
        plan = self.plan
        tiles, b, h = plan.tiles(call)
        if tiles is None:
            return tile.Walk(None, None, None, 1, 1, self.lines, self.block, self.block)
        known, walk = self.walked
        if known is not None and _same(tiles, known):
            return walk
        assert plan.tile is not None
        full, partial, order = (
            (tiles.rows_full, tiles.rows_partial, tiles.row_order)
            if self.queries
            else (tiles.cols_full, tiles.cols_partial, tiles.col_order)
        )
        size, step = plan.tile if self.queries else plan.tile[::-1]
        walk = tile.Walk(
            tuple(map(_aligned, full)), tuple(map(_aligned, partial)), _aligned(order),
            b, h, self.lines, size, step,
        )  # fmt: skip
        self.walked = tiles, walk
        return walk


def _rows(plan: Plan, name: str) -> Sequence[Config]:
    if triton.knobs.runtime.interpret:
        return (Config(32, 32, 4, 1),)
    return configs(name, *plan.size)


def _text(spec: Spec, call: Call, q: Tensor, k: Tensor, wanted: tuple[int, ...]) -> Text:
    far = tuple(
        sum((size - 1) * abs(step) for size, step in zip(t.shape, t.stride(), strict=True)) >= 2**31
        for t in call.captured.tensors
    )
    straight = call.coords.q_pos is None and call.coords.kv_pos is None
    narrow = straight and _narrow(call.coords, q, k, call.captured.ints)
    return Text(spec.score, spec.mask, wanted, narrow, straight, far, rough(q.dtype), narrow)


def rough(dtype: torch.dtype) -> bool:
    """Whether the GPU's rough tanh is good enough, and there."""
    if dtype != torch.bfloat16 or triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target is not None and target.backend == "cuda"


def _narrow(at: Coords, q: Tensor, k: Tensor, ints: Sequence[int]) -> bool:
    """Whether positions, and the ints that are captured, are known to be small."""
    ends = at.b + q.shape[0], at.h + q.shape[1], at.q + q.shape[2], at.kv + k.shape[2]
    return max(map(abs, (*at[:4], *ends, *ints))) <= SMALL


def _tensors(tensors: Sequence[Tensor], device: torch.device) -> tuple:
    """Pointer, then size and stride of every dimension, of every tensor."""
    found: list[Any] = []
    for t in tensors:
        if not t.numel():  # nothing to read, but a pair that is not kept may ask
            t = torch.zeros([1] * t.dim(), dtype=t.dtype, device=device)
        found.append(t.to(device))
        for size, stride in zip(t.shape, t.stride(), strict=True):
            found += [size, stride]
    return tuple(found)


def _precision(dtype: torch.dtype) -> str:
    """float32 products as `torch.matmul` makes them: `torch.set_float32_matmul_precision`."""
    if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32"


def _positions(pos: Tensor | None) -> Tensor | None:
    return None if pos is None else pos.to(torch.int64).contiguous()


def _batch_stride(pos: Tensor | None) -> int:
    return pos.shape[-1] if pos is not None and pos.dim() == 2 and len(pos) > 1 else 0


def _aligned(x: Tensor) -> Tensor:
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _same(tiles: Tiles, known: Tiles) -> bool:
    return tiles is known or all(
        a is b for a, b in zip(tiles.flatten(), known.flatten(), strict=True)
    )
