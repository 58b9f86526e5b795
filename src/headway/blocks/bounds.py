"""Bounds of a mask's graph over boxes of tiles, on every level.

Values that depend on one position alone have exact bounds (`axis_bounds.py`); interval rules
(`mods.bounds`) combine those of queries and keys. The values at the ends of tiles give the mask
at their four corners.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..mods.bounds import interval
from ..mods.bounds.rules import Bounds
from ..mods.bounds.table_bounds import TableBounds
from ..mods.evaluation.evaluate import evaluate
from ..mods.evaluation.pointwise import Gathers
from ..mods.graph import Graph
from .axis_bounds import Axis, Groups, Level, bounds_along


class BoxBounds:
    """Bounds of a mask over boxes of tiles: `bounds(level, group, row, column)`.

    Its arguments and results are `(boxes,)`; group, row and column are int64.
    """

    def __init__(
        self, graph: Graph, values: dict, groups: Groups, q: Axis, kv: Axis, device: torch.device
    ) -> None:
        """`values`: the captured values, by name (`pointwise.bind`)."""
        self.graph, self.groups, self.device = graph, groups, device
        self.shape = groups.b, groups.h, q.boxes(0), kv.boxes(0)
        cut = self._cut = interval.split(graph)
        numbers = evaluate(interval.subgraph(graph, cut.numbers), values, Gathers(graph))
        known: dict[str, Any] = {**values, **dict(zip(cut.numbers, numbers, strict=True))}
        self._numbers = {name: Bounds(*[known[name].item()] * 2) for name in cut.numbers}
        self._values = {k: v.to(device) if v.dim() == 0 else v for k, v in known.items()}
        self._tables = {
            n: TableBounds(self._values[graph.nodes[n].args[0]])  # type: ignore[index]
            for n in cut.mixed
            if graph.nodes[n].op == "gather"
        }
        self._fits = interval.nodes_in_range(graph, self._sizes(values, q, kv))
        rows = interval.subgraph(graph, cut.rows, q.name)
        cols = interval.subgraph(graph, cut.cols, kv.name)
        given = self._values, groups, device
        along_q = bounds_along(q, rows, *given)
        # Most masks read the same of keys as of queries: `ids[q_idx] == ids[kv_idx]`.
        along_kv = along_q if rows == cols and q.is_at(kv) else bounds_along(kv, cols, *given)
        fixed = bounds_along(None, interval.subgraph(graph, cut.head_values), *given)
        self._axes = (cut.head_values, fixed), (cut.rows, along_q), (cut.cols, along_kv)

    def __call__(
        self, level: int, g: Tensor, r: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Whether all pairs are kept, whether some may be, and whether a gather may read outside of
        its tensor (None: none does). Where it may, not all pairs are known to be kept."""
        b, h, *boxes = self._places(g, r, c)
        known = self._kept(level, lambda axis, x: x.at(b, h, boxes[axis]))
        always, maybe, outside = (x if x is None else x.expand(len(g)) for x in known)
        return always, maybe, outside  # type: ignore[return-value]

    def of_all_tiles(self) -> tuple[Tensor, Tensor | None]:
        """For all single tiles, `(b, h, rows, columns)`: uint8, 0 if no pair is kept, 2 if all are,
        1 if unknown; and bool, whether a gather may read outside of its tensor (None: none does).
        """
        dims = 3, 3, 2

        def place(axis: int, x: Level) -> Bounds:
            return Bounds(x.lo.unsqueeze(dims[axis]), x.hi.unsqueeze(dims[axis]))

        always, maybe, outside = self._kept(0, place)
        state = always.view(torch.uint8) + maybe.view(torch.uint8)
        state = state.expand(self.shape).contiguous()
        return state, outside if outside is None else outside.expand(self.shape)

    def corners(self, g: Tensor, r: Tensor, c: Tensor) -> Tensor:
        """The mask at the corners of single tiles, bool `(2, 2, boxes)`; invalid where a gather
        reads outside of its tensor."""
        b, h, *boxes = self._places(g, r, c)
        values, dims = dict(self._values), (1, 1, 0)
        for axis, (names, read) in enumerate(self._axes):
            for name, x in zip(names, read.at(0)[0], strict=True):
                values[name] = x.ends_at(b, h, boxes[axis]).unsqueeze(dims[axis])
        (kept,) = evaluate(self.graph, values, Gathers(self.graph), only=self._cut.mixed)
        return torch.as_tensor(kept, device=self.device).expand(2, 2, len(g))

    def _places(self, g: Tensor, r: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        """Batch row, head, and the box along no axis, along queries and along keys."""
        return *self.groups.split(g), torch.zeros((), dtype=torch.int64, device=self.device), r, c

    def _kept(
        self, level: int, place: Callable[[int, Level], Bounds]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The result of `__call__`; `place` gives the bounds of an axis's values."""
        known, outside = dict(self._numbers), []
        for axis, (names, read) in enumerate(self._axes):
            values, left = read.at(level if axis else 0)
            known.update((name, place(axis, x)) for name, x in zip(names, values, strict=True))
            outside += [place(axis, x).hi for x in left]

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
        """The largest magnitudes of the graph's inputs, where these are known without a read."""
        groups = self.groups
        return (
            ("b", groups.first_b + groups.b),
            ("h", groups.first_h + groups.h),
            *((axis.name, axis.furthest) for axis in axes if axis.positions is None),
            *((name, abs(int(x))) for name, x in values.items() if name[0] == "n"),
        )
