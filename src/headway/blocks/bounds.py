"""What a mask's graph can be over boxes of tiles, level after level.

What depends on one position alone is computed as it is (`sides.py`); interval rules
(`mods.interval`) take over where a query's value meets a key's. From the values at the ends of
tiles the mask at their four corners is known.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..mods import interval
from ..mods.evaluate import evaluate
from ..mods.graph import Graph
from ..mods.pointwise import Gathers
from ..mods.ranges import TableBounds
from ..mods.rules import Bounds
from .axis_bounds import Axis, Groups, Level, along


class BoxBounds:
    """Bounds of a mask over boxes of tiles: `bounds(level, group, row, column)`.

    All of the tensors that it takes and returns are `(boxes,)`; group, row and column are int64.
    """

    def __init__(
        self, graph: Graph, values: dict, groups: Groups, q: Axis, kv: Axis, device: torch.device
    ) -> None:
        """`values`: of what the graph captured, by name (`pointwise.bind`)."""
        self.graph, self.groups, self.device = graph, groups, device
        self.shape = groups.b, groups.h, q.boxes(0), kv.boxes(0)
        cut = self._cut = interval.split(graph)
        numbers = evaluate(interval.part(graph, cut.numbers), values, Gathers(graph))
        known: dict[str, Any] = {**values, **dict(zip(cut.numbers, numbers, strict=True))}
        self._numbers = {name: Bounds(*[known[name].item()] * 2) for name in cut.numbers}
        self._values = {k: v.to(device) if v.dim() == 0 else v for k, v in known.items()}
        self._tables = {
            n: TableBounds(self._values[graph.nodes[n].args[0]])  # type: ignore[index]
            for n in cut.mixed
            if graph.nodes[n].op == "gather"
        }
        self._fits = interval.fitting(graph, self._sizes(values, q, kv))
        rows = interval.part(graph, cut.rows, q.name)
        cols = interval.part(graph, cut.cols, kv.name)
        given = self._values, groups, device
        along_q = along(q, rows, *given)
        # Keys are mostly read as queries are: `ids[q_idx] == ids[kv_idx]`.
        along_kv = along_q if rows == cols and q.is_at(kv) else along(kv, cols, *given)
        fixed = along(None, interval.part(graph, cut.fixed), *given)
        self._sides = (cut.fixed, fixed), (cut.rows, along_q), (cut.cols, along_kv)

    def __call__(
        self, level: int, g: Tensor, r: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Bool: all pairs are kept, some may be, and a gather may leave its tensor (None: no).

        Where a gather may, not all pairs are known to be kept.
        """
        b, h, *boxes = self._places(g, r, c)
        known = self._kept(level, lambda side, x: x.at(b, h, boxes[side]))
        always, maybe, outside = (x if x is None else x.expand(len(g)) for x in known)
        return always, maybe, outside  # type: ignore[return-value]

    def of_all_tiles(self) -> tuple[Tensor, Tensor | None]:
        """Of every single tile, `(b, h, rows, columns)` each: uint8, 0 for no pair, 2 for all and 1
        for what is not known; and bool, whether a gather may leave its tensor (None: no)."""
        dims = 3, 3, 2

        def place(side: int, x: Level) -> Bounds:
            return Bounds(x.lo.unsqueeze(dims[side]), x.hi.unsqueeze(dims[side]))

        always, maybe, outside = self._kept(0, place)
        state = always.view(torch.uint8) + maybe.view(torch.uint8)
        state = state.expand(self.shape).contiguous()
        return state, outside if outside is None else outside.expand(self.shape)

    def corners(self, g: Tensor, r: Tensor, c: Tensor) -> Tensor:
        """The mask at the corners of single tiles, bool `(2, 2, boxes)`; not to be trusted where a
        gather left its tensor."""
        b, h, *boxes = self._places(g, r, c)
        values, dims = dict(self._values), (1, 1, 0)
        for side, (names, read) in enumerate(self._sides):
            for name, x in zip(names, read.at(0)[0], strict=True):
                values[name] = x.ends_at(b, h, boxes[side]).unsqueeze(dims[side])
        (kept,) = evaluate(self.graph, values, Gathers(self.graph), only=self._cut.mixed)
        return torch.as_tensor(kept, device=self.device).expand(2, 2, len(g))

    def _places(self, g: Tensor, r: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        """Batch row, head, and the box along no axis, queries and keys."""
        return *self.groups.split(g), torch.zeros((), dtype=torch.int64, device=self.device), r, c

    def _kept(
        self, level: int, place: Callable[[int, Level], Bounds]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What `__call__` returns, from bounds that `place` gives for a side's values."""
        known, outside = dict(self._numbers), []
        for side, (names, read) in enumerate(self._sides):
            values, left = read.at(level if side else 0)
            known.update((name, place(side, x)) for name, x in zip(names, values, strict=True))
            outside += [place(side, x).hi for x in left]

        def gather(n: int, indices: list[Bounds]) -> Bounds:
            found, leaves = self._tables[n](indices)
            outside.append(leaves)
            return found

        found = interval.evaluate(self.graph, known, gather, self._fits)
        always, maybe = (torch.as_tensor(x, device=self.device) for x in found)
        if not outside:
            return always, maybe, None
        left = outside[0]
        for other in outside[1:]:
            left = left | other
        return always & ~left, maybe, left

    def _sizes(self, values: dict, *axes: Axis) -> tuple[tuple[str, int], ...]:
        """How far from 0 the graph's inputs are at most, where it is known without a look."""
        groups = self.groups
        return (
            ("b", groups.first_b + groups.b),
            ("h", groups.first_h + groups.h),
            *((axis.name, axis.furthest) for axis in axes if axis.positions is None),
            *((name, abs(int(x))) for name, x in values.items() if name[0] == "n"),
        )
