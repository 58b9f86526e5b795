"""What a mask's graph can be over boxes of tiles, level after level.

Values that depend on one position alone (`document_id[q_idx]`, `q_idx // 128`, a table by head) are
computed once, position by position, and kept as a row of minima and maxima per tile; those of a box
of tiles are the least and the greatest over its tiles, so every level is made from the one below.
Interval rules (`mods.interval`) take over where a query's value meets a key's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..mods import interval
from ..mods.graph import Graph, evaluate
from ..mods.interval import Bounds
from ..mods.pointwise import Gathers
from ..mods.ranges import TableBounds
from .runs import pick

SPLIT = 4  # a box is cut into 4 x 4, and a level's row of bounds is 4 times shorter than the last
_OUTSIDE = "outside"  # ends a name that stands for no value, but for gathers that left a tensor
_POSITIONS = 1 << 14  # evaluated together: what one thread does without waking the others


@dataclass(frozen=True)
class Axis:
    """The positions of queries or of keys, and their tiles."""

    name: str  # "q_idx" or "kv_idx"
    length: int
    tile: int
    start: int
    positions: Tensor | None  # (length,) or (batch, length), in place of start, start + 1, ...

    def boxes(self, level: int) -> int:
        """Number of boxes of SPLIT^level tiles."""
        return -(-self.length // (self.tile * SPLIT**level))

    def at(self, index: Tensor, b: Tensor) -> Tensor:
        """The positions at some indices of some batch rows, int64; the two broadcast."""
        if self.positions is None:
            return index + self.start
        if self.positions.dim() == 1:
            return self.positions[index].long()
        return self.positions[b, index].long()


@dataclass(frozen=True)
class Groups:
    """The batch rows and heads that a block mask is built for; group g is `b * heads + h`."""

    b: int
    h: int
    first_b: int = 0  # of the whole's
    first_h: int = 0

    @property
    def count(self) -> int:
        return self.b * self.h

    def split(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """The local batch row and head of some groups."""
        return (g // self.h, g % self.h) if self.count > 1 else (g, g)


class Level(NamedTuple):
    """Bounds of one value over all boxes of a level: `(b or 1, h or 1, boxes)`."""

    lo: Tensor
    hi: Tensor

    @staticmethod
    def over(x: Tensor, n: int) -> "Level":
        """Bounds of `(..., m)` over every n: `(..., m / n)`."""
        x = _rows(x, n)
        # The amin of int64 takes ten times as long as its amax, and aminmax wakes every thread.
        if x.dtype == torch.int64:
            return Level(~(~x).amax(-1), x.amax(-1))
        return Level(x.amin(-1), x.amax(-1))

    def up(self) -> "Level":
        return Level(_rows(self.lo, SPLIT).amin(-1), _rows(self.hi, SPLIT).amax(-1))

    def at(self, b: Tensor, h: Tensor, box: Tensor) -> Bounds:
        many_b, many_h, boxes = self.lo.shape
        index = box
        if many_b != 1:
            index = index + b * (many_h * boxes)
        if many_h != 1:
            index = index + h * boxes
        return Bounds(pick(self.lo.reshape(-1), index), pick(self.hi.reshape(-1), index))


def _rows(x: Tensor, n: int) -> Tensor:
    """`(..., m)` as `(..., m / n, n)`; the last row is filled up with the last value."""
    if short := -x.shape[-1] % n:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], -1)
    return x.unflatten(-1, (-1, n))


class BoxBounds:
    """Bounds of a mask over boxes of tiles: `bounds(level, group, row, column)`."""

    def __init__(
        self, graph: Graph, values: dict, groups: Groups, q: Axis, kv: Axis, device: torch.device
    ) -> None:
        """`values`: of what the graph captured, by name (`pointwise.bind`)."""
        self.graph, self.groups, self.device = graph, groups, device
        self.rows, self.cols = q.boxes(0), kv.boxes(0)
        self._values = {k: v.to(device) if v.dim() == 0 else v for k, v in values.items()}
        cut = interval.split(graph)
        self._tables = {
            n: TableBounds(self._values[graph.nodes[n].args[0]])  # type: ignore[index]
            for n in cut.mixed
            if graph.nodes[n].op == "gather"
        }
        # One list of levels per side; what depends on b and h alone has the same at every level.
        self._fixed = self._along(None, cut.fixed)
        self._rows = [self._along(q, cut.rows)]
        self._cols = [self._along(kv, cut.cols)]

    def __call__(
        self, level: int, g: Tensor, r: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Bool `(boxes,)` each: all pairs are kept, some may be, and a gather may leave its tensor.

        Group, row and column of the boxes are int64 `(boxes,)`.
        """
        b, h = self.groups.split(g)
        no_box = torch.zeros((), dtype=torch.int64, device=self.device)
        rows, cols = _climb(self._rows, level), _climb(self._cols, level)
        known = {
            name: bounds.at(b, h, box)
            for found, box in ((self._fixed, no_box), (rows, r), (cols, c))
            for name, bounds in found.items()
        }
        return self._kept(known, (len(g),))

    def of_all_tiles(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same of every single tile: bool `(b, h, rows, columns)` each."""
        known = {
            name: Bounds(x.lo.unsqueeze(dim), x.hi.unsqueeze(dim))
            for found, dim in ((self._fixed, 3), (self._rows[0], 3), (self._cols[0], 2))
            for name, x in found.items()
        }
        return self._kept(known, (self.groups.b, self.groups.h, self.rows, self.cols))

    def _kept(
        self, known: dict[str, Bounds], shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `__call__` returns, from bounds that broadcast to a shape."""
        outside = torch.zeros((), dtype=torch.bool, device=self.device)
        for name, bounds in known.items():
            if name.endswith(_OUTSIDE):
                outside = outside | bounds.hi

        def gather(n: int, indices: list[Bounds]) -> Bounds:
            nonlocal outside
            found, leaves = self._tables[n](indices)
            outside = outside | leaves
            return found

        always, maybe = interval.evaluate(self.graph, known, gather)
        always, maybe, outside = (
            torch.as_tensor(x, device=self.device).expand(shape) for x in (always, maybe, outside)
        )
        return always, maybe, outside

    def _along(self, axis: Axis | None, names: tuple[str, ...]) -> dict[str, Level]:
        """Bounds of some values over the tiles of one axis, or of none: exact numbers.

        With them, where one left its tensor, whether a gather did ("q_idx outside").
        """
        levels: dict[str, Level] = {}
        if axis is not None and axis.positions is None and axis.name in names:
            lo = axis.start + torch.arange(0, axis.length, axis.tile, device=self.device)
            hi = (lo + axis.tile - 1).clamp_max(axis.start + axis.length - 1)
            levels[axis.name] = Level(lo[None, None], hi[None, None])
            names = tuple(name for name in names if name != axis.name)
        if not names:
            return levels
        graph, size = interval.part(self.graph, names), self.groups
        b = torch.arange(size.b, device=self.device)[:, None, None]
        at = {"b": b + size.first_b,
              "h": torch.arange(size.h, device=self.device)[:, None] + size.first_h}  # fmt: skip
        length, tile = (1, 1) if axis is None else (axis.length, axis.tile)
        step = tile * max(1, _POSITIONS // (size.count * tile))
        chunks: list[list[Level]] = []
        outside: Tensor | None = None
        for start in range(0, length, step):
            stop = min(start + step, length)
            if axis is not None:
                at[axis.name] = axis.at(torch.arange(start, stop, device=self.device), b)
            gathers = Gathers(graph)
            results = evaluate(graph, {**self._values, **at}, gathers)
            chunks.append([self._level(x, tile) for x in results])
            for left, *_ in gathers.outside:
                if outside is None:
                    outside = b.new_zeros(size.b, size.h, length, dtype=torch.bool)
                outside[:, :, start:stop] |= left
        for n, name in enumerate(names):
            ends = zip(*(chunk[n] for chunk in chunks), strict=True)
            levels[name] = Level(*(torch.cat(end, -1) for end in ends))
        if outside is not None:
            levels[f"{axis and axis.name} {_OUTSIDE}"] = Level.over(outside, tile)
        return levels

    def _level(self, x: Tensor | float, tile: int) -> Level:
        x = torch.as_tensor(x, device=self.device)
        if not x.is_floating_point() and x.dtype != torch.bool:
            x = x.long()
        return Level.over(x.reshape((1,) * (3 - x.dim()) + x.shape), tile)


def _climb(levels: list[dict[str, Level]], to: int) -> dict[str, Level]:
    while len(levels) <= to:
        levels.append({name: level.up() for name, level in levels[-1].items()})
    return levels[to]
