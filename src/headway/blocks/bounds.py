"""Compute the bounds of a mask's graph over boxes of tiles, on every level.

Values that depend on one position alone have exact bounds (`axis_bounds.py`); interval rules
(`mods.bounds`) combine those of queries and keys. The values at the ends of tiles give the mask
at their four corners.
"""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..mods.bounds import interval
from ..mods.bounds.rules import Bounds
from ..mods.bounds.table_bounds import TableBounds
from ..mods.evaluation.evaluate import evaluate
from ..mods.evaluation.pointwise import Gathers
from ..mods.graph import Graph
from .axis_bounds import Axis, Groups, LevelBounds, bounds_along, known_sizes


class BoxBounds:
    """Bounds of a mask over boxes of tiles: `bounds(level, group, row, column)`.

    Its arguments and results are `(boxes,)`; group, row and column are int64.
    """

    def __init__(
        self, graph: Graph, values: dict, groups: Groups, q: Axis, kv: Axis, device: torch.device
    ) -> None:
        """Take the captured `values` by name (`pointwise.bind`)."""
        self.graph, self.groups, self.device = graph, groups, device
        self.shape = groups.b, groups.h, q.boxes(0), kv.boxes(0)
        parts = self._parts = interval.split(graph)
        numbers = evaluate(interval.subgraph(graph, parts.numbers), values, Gathers(graph))
        all_values: dict[str, Any] = {**values, **dict(zip(parts.numbers, numbers, strict=True))}
        self._numbers = {name: Bounds(*[all_values[name].item()] * 2) for name in parts.numbers}
        self._values = {k: v.to(device) if v.dim() == 0 else v for k, v in all_values.items()}
        self._tables = {
            n: TableBounds(self._values[graph.nodes[n].args[0]])  # type: ignore[index]
            for n in parts.mixed
            if graph.nodes[n].op == "gather"
        }
        self._fits = interval.nodes_in_range(graph, known_sizes(values, groups, q, kv))
        rows = interval.subgraph(graph, parts.rows, q.name)
        cols = interval.subgraph(graph, parts.cols, kv.name)
        bounds_args = self._values, groups, device
        along_q = bounds_along(q, rows, *bounds_args)
        # Most masks read the same values of keys and queries: `ids[q_idx] == ids[kv_idx]`.
        same = rows == cols and q.same_positions(kv)
        along_kv = along_q if same else bounds_along(kv, cols, *bounds_args)
        fixed = bounds_along(None, interval.subgraph(graph, parts.head_values), *bounds_args)
        self._axes = (parts.head_values, fixed), (parts.rows, along_q), (parts.cols, along_kv)

    def __call__(
        self, level: int, g: Tensor, r: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return if all pairs are kept, if some may be, if a gather may leave its table."""
        b, h, *boxes = self._places(g, r, c)
        mask_bounds = self._mask_bounds(level, lambda axis, bound: bound.at(b, h, boxes[axis]))
        return tuple(x if x is None else x.expand(len(g)) for x in mask_bounds)  # type: ignore[return-value]

    def of_all_tiles(self) -> tuple[Tensor, Tensor | None]:
        """Return the states, uint8 `(b, h, rows, columns)`: 0 empty, 2 full, 1 unresolved; and
        whether a gather may read outside of its tensor (None: none does)."""
        dims = 3, 3, 2

        def place(axis: int, x: LevelBounds) -> Bounds:
            return Bounds(x.lo.unsqueeze(dims[axis]), x.hi.unsqueeze(dims[axis]))

        all_kept, maybe_live, outside = self._mask_bounds(0, place)
        state = all_kept.view(torch.uint8) + maybe_live.view(torch.uint8)
        state = state.expand(self.shape).contiguous()
        return state, outside if outside is None else outside.expand(self.shape)

    def corners(self, g: Tensor, r: Tensor, c: Tensor) -> Tensor:
        """Return the mask at corners, bool `(2, 2, boxes)`; invalid where a gather leaves."""
        b, h, *boxes = self._places(g, r, c)
        values, dims = dict(self._values), (1, 1, 0)
        for axis, (names, axis_bounds) in enumerate(self._axes):
            for name, level_bounds in zip(names, axis_bounds.at(0)[0], strict=True):
                values[name] = level_bounds.ends_at(b, h, boxes[axis]).unsqueeze(dims[axis])
        (keep_mask,) = evaluate(self.graph, values, Gathers(self.graph), only=self._parts.mixed)
        return torch.as_tensor(keep_mask, device=self.device).expand(2, 2, len(g))

    def _places(self, g: Tensor, r: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        """Return batch row, head, and the box along no axis, along queries and along keys."""
        return *self.groups.split(g), torch.zeros((), dtype=torch.int64, device=self.device), r, c

    def _mask_bounds(
        self, level: int, place: Callable[[int, LevelBounds], Bounds]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the result of `__call__`; `place` gives the bounds of an axis's values."""
        bounds, outside = dict(self._numbers), []
        for axis, (names, axis_bounds) in enumerate(self._axes):
            values, reads_outside = axis_bounds.at(level if axis else 0)
            bounds |= {name: place(axis, x) for name, x in zip(names, values, strict=True)}
            outside += [place(axis, x).hi for x in reads_outside]

        def gather(n: int, indices: list[Bounds]) -> Bounds:
            mask_bounds, leaves = self._tables[n](indices)
            outside.append(leaves)
            return mask_bounds

        mask_bounds = interval.evaluate(self.graph, bounds, gather, self._fits)
        all_kept, maybe_live = (torch.as_tensor(x, device=self.device) for x in mask_bounds)
        if not outside:
            return all_kept, maybe_live, None
        reads_outside = reduce(operator.or_, outside)
        return all_kept & ~reads_outside, maybe_live, reads_outside
