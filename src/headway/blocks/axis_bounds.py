"""Compute per-axis bounds: of mask values that depend on the query, on the key, or on neither.

Values that depend on one position alone (`document_id[q_idx]`, `q_idx // 128`, a table by head) are
computed once per position, and reduced to a lower and an upper bound per tile. The bounds of a
box of tiles are those of its tiles, so every level is computed from the one below. The values at
the ends of every tile are stored as well.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..mods.bounds.interval import POSITION
from ..mods.bounds.rules import Bounds
from ..mods.evaluation.evaluate import evaluate
from ..mods.evaluation.pointwise import Gathers
from ..mods.graph import Graph
from .runs import pick

SPLIT = 4  # a box has 4 x 4 boxes of the level below, and a level 4 times fewer bounds
_POSITIONS = 1 << 14  # evaluated together: few enough that PyTorch uses one thread


@dataclass(frozen=True)
class Axis:
    """The positions of queries or of keys, and their tiles."""

    name: str  # "q_idx" or "kv_idx"
    length: int
    tile: int
    start: int
    positions: Tensor | None  # (length,) or (batch, length), in place of start, start + 1, ...

    def boxes(self, level: int) -> int:
        """Return the number of boxes of SPLIT^level tiles."""
        return -(-self.length // (self.tile * SPLIT**level))

    @property
    def furthest(self) -> int:
        """Return the largest distance of a position from 0, if positions are consecutive."""
        return max(abs(self.start), abs(self.start + self.length))

    def same_positions(self, other: "Axis") -> bool:
        """Return whether both have the same positions in the same tiles."""
        return self.positions is other.positions and (
            (self.length, self.tile, self.start) == (other.length, other.tile, other.start)
        )

    def tiles(self, device: torch.device) -> "LevelBounds":
        """Return the bounds, tile by tile, of consecutive positions from `start` on."""
        lo = torch.arange(self.start, self.start + self.length, self.tile, device=device)
        lo = lo.view(1, 1, -1)
        hi = (lo + (self.tile - 1)).clamp_max(self.start + self.length - 1)
        return LevelBounds(lo, hi, (lo, hi))

    def at(self, index: Tensor, b: Tensor) -> Tensor:
        """Return the positions at some indices of some batch rows, int64; the two broadcast."""
        if self.positions is None:
            return index + self.start
        return self.positions[index if self.positions.dim() == 1 else (b, index)].long()


@dataclass(frozen=True)
class Groups:
    """The batch rows and heads for which a block mask is built; group g is `b * heads + h`."""

    b: int
    h: int
    first_b: int = 0  # global index of the first batch row
    first_h: int = 0

    @property
    def count(self) -> int:
        """Return the number of groups."""
        return self.b * self.h

    def split(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local batch row and head of some groups."""
        return (g // self.h, g % self.h) if self.count > 1 else (g, g)


class LevelBounds(NamedTuple):
    """The bounds of one value over all boxes of a level: `(b or 1, h or 1, boxes)`.

    - `ends`: of single tiles, the values at the first and at the last position.
    """

    lo: Tensor
    hi: Tensor
    ends: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def over(values: Tensor, per_group: int) -> "LevelBounds":
        """Return the bounds of every `per_group` values of `(..., m)`: `(..., m / per_group)`."""
        values = _split_padded(values, per_group)
        # On int64 amin takes ten times as long as amax, and aminmax wakes every thread.
        lo = ~(~values).amax(-1) if values.dtype == torch.int64 else values.amin(-1)
        hi = values.amax(-1)
        if not values.is_floating_point() and values.dtype != torch.bool:
            lo, hi = lo.long(), hi.long()
        return LevelBounds(lo, hi, (values[..., 0], values[..., -1]))

    @staticmethod
    def cat(parts: "list[LevelBounds]") -> "LevelBounds":
        """Concatenate the levels of neighbouring boxes."""
        if len(parts) == 1:
            return parts[0]
        lo, hi, ends = zip(*parts, strict=True)
        first_values, last_values = zip(*ends, strict=True)
        lo, hi, first, last = (torch.cat(x, -1) for x in (lo, hi, first_values, last_values))
        return LevelBounds(lo, hi, (first, last))

    def up(self) -> "LevelBounds":
        """Return the bounds of the next coarser level."""
        lo, hi = (_split_padded(x, SPLIT) for x in (self.lo, self.hi))
        return LevelBounds(lo.amin(-1), hi.amax(-1))

    def at(self, b: Tensor, h: Tensor, box: Tensor) -> Bounds:
        """Return the bounds of some boxes."""
        index = self._index(b, h, box)
        return Bounds(pick(self.lo.reshape(-1), index), pick(self.hi.reshape(-1), index))

    def ends_at(self, b: Tensor, h: Tensor, box: Tensor) -> Tensor:
        """Return the values at the ends of single tiles, `(2, tiles)`."""
        assert self.ends is not None
        index = self._index(b, h, box)
        return torch.stack([pick(x.reshape(-1), index) for x in self.ends])

    def _index(self, b: Tensor, h: Tensor, box: Tensor) -> Tensor:
        b_size, h_size, boxes = self.lo.shape
        if b_size != 1:
            box = box + b * (h_size * boxes)
        return box if h_size == 1 else box + h * boxes


def _split_padded(values: Tensor, n: int) -> Tensor:
    """Return `(..., m)` as `(..., m / n, n)`; the last value pads the last row."""
    if pad := -values.shape[-1] % n:
        values = torch.cat([values, values[..., -1:].expand(*values.shape[:-1], pad)], -1)
    return values.unflatten(-1, (-1, n))


class AxisBounds(NamedTuple):
    """The bounds of a mask's values along one axis: per level one `LevelBounds` for every value.

    - `outside`: whether a gather reads outside of its tensor; empty if none does.
    """

    levels: list[list[LevelBounds]]
    outside: list[LevelBounds]

    def at(self, level: int) -> tuple[list[LevelBounds], list[LevelBounds]]:
        """Return the values of a level, and its `outside` (one or none)."""
        while len(self.levels) <= level:
            self.levels.append([x.up() for x in self.levels[-1]])
            if self.outside:
                self.outside.append(self.outside[-1].up())
        return self.levels[level], self.outside[level : level + 1]


# A tensor of consecutive indices: start, length, dimension among (b, h, position).
IndexRange = tuple[int, int, int]


class _SlicedGathers(Gathers):
    """Gathers along an axis: slices where the indices are consecutive."""

    def __init__(self, graph: Graph, index_ranges: dict[int, IndexRange]) -> None:
        """Take `index_ranges` by the id of a tensor of indices."""
        super().__init__(graph)
        self.index_ranges = index_ranges

    def __call__(self, n: int, table: Tensor, indices: tuple[Tensor | int, ...]) -> Tensor:
        shape, slices = [1, 1, 1], []
        for index, size in zip(indices, table.shape, strict=False):
            start, length, dim = self.index_ranges.get(id(index), (-1, 0, 0))
            if start < 0 or start + length > size or max(shape[dim:]) > 1:
                return super().__call__(n, table, indices)
            shape[dim] = length
            slices.append(slice(start, start + length))
        return table[tuple(slices)].reshape(shape) if slices else table


def known_sizes(values: dict, groups: Groups, *axes: Axis) -> tuple[tuple[str, int], ...]:
    """Return the largest magnitudes of a graph's inputs that are known without a read."""
    return (
        ("b", groups.first_b + groups.b),
        ("h", groups.first_h + groups.h),
        *((axis.name, axis.furthest) for axis in axes if axis.positions is None),
        *((name, abs(int(x))) for name, x in values.items() if name[0] == "n"),
    )


def values_along(
    axis: Axis | None, part: Graph, values: dict, groups: Groups, device: torch.device,
    start: int, stop: int,
) -> tuple[list, list]:  # fmt: skip
    """Evaluate a part of a mask's graph at the positions `start` up to `stop` of an axis. Return
    its values, which broadcast to `(b, h, positions)`, and where its gathers read outside of their
    tensors (`Gathers.outside`)."""
    index_ranges: dict[str, IndexRange] = {
        "b": (groups.first_b, groups.b, 0), "h": (groups.first_h, groups.h, 1)
    }  # fmt: skip
    if axis is not None and axis.positions is None:
        index_ranges[POSITION] = axis.start + start, stop - start, 2
    indices = {
        name: torch.arange(first, first + n, device=device).view(-1, *[1] * (2 - dim))
        for name, (first, n, dim) in index_ranges.items() if part.uses(name)
    }  # fmt: skip
    gathers = _SlicedGathers(part, {id(x): index_ranges[name] for name, x in indices.items()})
    if axis is not None and axis.positions is not None:
        positions = axis.positions[..., start:stop].long()
        indices[POSITION] = positions if positions.dim() == 1 else positions[:, None]
    return evaluate(part, {**values, **indices}, gathers), gathers.outside


def bounds_along(
    axis: Axis | None, part: Graph, values: dict, groups: Groups, device: torch.device
) -> AxisBounds:
    """Return the bounds of a part of a mask's graph (`interval.part`) over the tiles of an axis.

    - `axis`: None if the part depends on no position.
    - `values`: the captured values, by name.
    """
    length, tile = (1, 1) if axis is None else (axis.length, axis.tile)
    # Consecutive positions need no evaluation.
    consecutive_axis = axis if axis is not None and axis.positions is None else None
    computed = [name for name in part.outputs if consecutive_axis is None or name != POSITION]
    chunk_levels: list[list[LevelBounds]] = []
    outside: Tensor | None = None
    step = tile * max(1, _POSITIONS // (groups.count * tile))
    for start in range(0, length, step) if computed else ():
        at = start, min(start + step, length)
        results, places_outside = values_along(axis, part, values, groups, device, *at)
        named = zip(part.outputs, results, strict=True)
        chunk_levels.append([_level(x, tile, device) for name, x in named if name in computed])
        for reads_outside, *_ in places_outside:
            if outside is None:
                outside = reads_outside.new_zeros(groups.b, groups.h, length)
            outside[:, :, slice(*at)] |= reads_outside
    by_name = zip(computed, *chunk_levels, strict=True)
    levels = {name: LevelBounds.cat(list(chunks)) for name, *chunks in by_name}
    if consecutive_axis is not None and POSITION in part.outputs:
        levels[POSITION] = consecutive_axis.tiles(device)
    at_tiles = [levels[name] for name in part.outputs]
    return AxisBounds([at_tiles], [] if outside is None else [LevelBounds.over(outside, tile)])


def _level(values: Tensor | float, tile: int, device: torch.device) -> LevelBounds:
    """Return the bounds of a value per tile."""
    dtype = torch.float32 if isinstance(values, float) else None
    values = torch.as_tensor(values, dtype=dtype, device=device)
    return LevelBounds.over(values.reshape((1,) * (3 - values.dim()) + values.shape), tile)
