"""Which tiles of a mask are full and partial, found from coarse to fine.

The square of tiles is cut into boxes of 4^n x 4^n tiles. Interval evaluation (`bounds.py`) calls a
box empty, full or unknown; unknown boxes are cut into 16, down to single tiles, all boxes of a
level at once. So the work follows the edge of the mask, not its area: of a causal million tokens,
with 33.6 million live tiles, some 40 thousand boxes are looked at. The tiles of a small square are
looked at all at once: what a step costs is then the calls of it, not the tiles in it.

A tile that is unknown to the end is looked at pair by pair: at its corners first, then along its
edges, where every distance i - j and every sum i + j is found, because one kept and one dropped
pair prove it partial; then at all pairs, in chunks.
"""

import torch
from torch import Tensor

from ..mods.evaluation.pointwise import Positions, bind, mask_at
from ..mods.graph import Graph
from ..types import Captured
from .axis_bounds import SPLIT, Axis, Groups
from .bounds import BoxBounds
from .runs import Runs, merge, pick, rectangles
from .tiles import Tiles

_BOXES = 1 << 14  # boxes looked at together: what one thread does without waking the others
_WHOLE = 1 << 15  # tiles in a square that is small
_PAIRS = 1 << 20  # pairs evaluated together, where all of a tile are


class Found:
    """Collects full or partial boxes as runs along rows and along columns."""

    def __init__(self, q: Axis, kv: Axis, device: torch.device) -> None:
        self.q, self.kv = q.boxes(0), kv.boxes(0)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self.rows = self.cols = (none, none)  # keys and counts of runs
        self.boxes: list[Tensor] = []  # (4, boxes): group, row, column and size, not yet among them
        self.held, self.most = 0, _BOXES

    def add(self, level: int, boxes: Tensor) -> None:
        """Boxes of a level, `(3, boxes)`; none overlaps another."""
        if boxes.shape[1]:
            size = SPLIT**level
            sizes = torch.full_like(boxes[:1], size)
            self.boxes.append(torch.cat([boxes[:1], boxes[1:] * size, sizes]))
            # What lies side by side becomes one run, now and then: memory follows the runs.
            self.held += boxes.shape[1] * size
            if self.held > self.most:
                rows, cols = self._keys()
                self.rows, self.cols = merge(*rows), merge(*cols)
                self.boxes, self.held = [], len(self.rows[0]) + len(self.cols[0])
                self.most = max(_BOXES, 2 * self.held)

    def _keys(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """All runs so far, along rows and along columns, as they come."""
        if not self.boxes:
            return self.rows, self.cols
        g, r0, c0, size = torch.cat(self.boxes, 1)
        r1, c1 = (r0 + size).clamp_max(self.q), (c0 + size).clamp_max(self.kv)
        up, left = g * self.q, g * self.kv
        rows = rectangles(up + r0, up + r1, c0, c1, self.kv)
        cols = rectangles(left + c0, left + c1, r0, r1, self.q)
        return _joined(self.rows, rows), _joined(self.cols, cols)

    def runs(self, groups: int) -> tuple[Runs, Runs]:
        """Along rows, and along columns."""
        rows, cols = self._keys()
        return (
            Runs.of_keys(rows[0], rows[1], groups * self.q, self.kv),
            Runs.of_keys(cols[0], cols[1], groups * self.kv, self.q),
        )


def _joined(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])


class Search:
    """Finds the tiles of one mask; see the module's docstring."""

    def __init__(
        self, graph: Graph, captured: Captured, groups: Groups, q: Axis, kv: Axis,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.graph, self.values = graph, bind(graph, captured)
        self.groups, self.q, self.kv, self.device = groups, q, kv, device

    def run(self) -> Tiles:
        """Full and partial tiles, along rows and along columns."""
        tiles = self.groups.count * self.q.boxes(0) * self.kv.boxes(0)
        if tiles:
            small = tiles <= _WHOLE
            near = torch.device("cpu") if small and self._numbers_alone() else self.device
            self.bounds = BoxBounds(self.graph, self.values, self.groups, self.q, self.kv, near)
            if small:
                return self._whole()
        self.full, self.partial = (Found(self.q, self.kv, self.device) for _ in range(2))
        if tiles:
            self._coarse_to_fine()
        (rows_full, cols_full), (rows_partial, cols_partial) = (
            found.runs(self.groups.count) for found in (self.full, self.partial)
        )
        return Tiles.of_runs(rows_full, rows_partial, cols_full, cols_partial)

    def _numbers_alone(self) -> bool:
        """Whether the mask depends on numbers, and on no tensor."""
        tensors = any(x.dim() for x in self.values.values())
        return not tensors and self.q.positions is None and self.kv.positions is None

    def _whole(self) -> Tiles:
        """All tiles of a small square at once: fewer steps than from coarse to fine.

        Of a mask that depends on no tensor the host finds what bounds and corners tell: it waits
        for no GPU then, and a GPU loads none of the kernels for it (0.1 s of a first call).
        """
        import numpy as np  # as in `runs.of_dense`

        state, outside = self.bounds.of_all_tiles()
        found = state.flatten(0, 1).cpu().numpy()  # (groups, rows, columns)
        unknown = np.flatnonzero(found == 1)
        if len(unknown):
            line, column = np.divmod(unknown, found.shape[2])
            places = (unknown, *np.divmod(line, found.shape[1]), column)
            at, g, r, c = (torch.from_numpy(x).to(state.device) for x in places)
            seen = self._look(g, r, c, outside if outside is None else outside.take(at))
            found.reshape(-1)[unknown] = seen.cpu().numpy()
        return Tiles.of_dense(found, self.device)

    def _coarse_to_fine(self) -> None:
        level = 0
        while max(self.q.boxes(level), self.kv.boxes(level)) > SPLIT:
            level += 1
        counts = self.groups.count, self.q.boxes(level), self.kv.boxes(level)
        boxes = torch.cartesian_prod(*(torch.arange(n, device=self.device) for n in counts)).T
        for some in boxes.split(_BOXES, 1):
            self._search(level, some)

    def _search(self, level: int, boxes: Tensor) -> None:
        """Depth first, so that a mask that is unknown everywhere holds few boxes at a time.

        `boxes` holds the groups, rows and columns of boxes of a level, int64 `(3, boxes)`.
        """
        full, maybe, outside = self.bounds(level, *boxes)
        self.full.add(level, _where(boxes, full))
        unknown = maybe & ~full
        boxes = _where(boxes, unknown)
        if level:
            for some in boxes.split(_BOXES // SPLIT**2, 1):
                if some.shape[1]:
                    self._search(level - 1, self._cut(level, some))
        elif boxes.shape[1]:
            g, r, c = boxes
            state = self._look(g, r, c, outside if outside is None else pick(outside, unknown))
            self.full.add(0, _where(boxes, state == 2))
            self.partial.add(0, _where(boxes, state == 1))

    def _cut(self, level: int, boxes: Tensor) -> Tensor:
        """The boxes of the next finer level."""
        part = torch.arange(SPLIT, device=self.device)
        g, r, c = boxes[:, :, None, None]
        r, c = r * SPLIT + part[:, None], c * SPLIT + part
        cut = torch.stack([x.flatten() for x in torch.broadcast_tensors(g, r, c)])
        inside = (cut[1] < self.q.boxes(level - 1)) & (cut[2] < self.kv.boxes(level - 1))
        return _where(cut, inside)

    def _look(self, g: Tensor, r: Tensor, c: Tensor, outside: Tensor | None) -> Tensor:
        """Single tiles as uint8: 0 empty, 1 partial, 2 full."""
        steps = range(0, len(g), _BOXES // 4)
        tiles = ((x[n : n + _BOXES // 4] for x in (g, r, c)) for n in steps)
        kept = torch.cat([self.bounds.corners(*some) for some in tiles], 2).flatten(0, 1)
        todo = kept.all(0) | ~kept.any(0)
        if outside is not None:
            todo = todo | outside
        state = torch.ones_like(g, dtype=torch.uint8)
        at = todo.nonzero().flatten()
        if len(at):
            g, r, c = (pick(x, at).to(self.device) for x in (g, r, c))
            outside = outside if outside is None else pick(outside, at).to(self.device)
            seen = self._pair_by_pair(g, r, c, outside)
            state.index_copy_(0, at, seen.to(state.device))
        return state

    def _pair_by_pair(self, g: Tensor, r: Tensor, c: Tensor, outside: Tensor | None) -> Tensor:
        """What `_look` returns, of tiles whose corners do not tell."""
        if outside is None:
            outside = torch.zeros_like(g, dtype=torch.bool)
        some, every = torch.zeros_like(outside), torch.ones_like(outside)
        q, kv = (min(axis.tile, axis.length) for axis in (self.q, self.kv))
        for samples in (2, kv), (q, 2), (q, kv):
            # Where a gather may leave its tensor every pair is seen, and refused if it is kept.
            todo = (~(some & ~every) | outside).nonzero().flatten()
            if not len(todo):
                break
            for at in todo.split(max(1, _PAIRS // (samples[0] * samples[1]))):
                tiles = pick(g, at), pick(r, at), pick(c, at)
                of_some, of_every = self._pairs(tiles, samples)
                some.index_copy_(0, at, of_some | pick(some, at))
                every.index_copy_(0, at, of_every & pick(every, at))
        return some.to(torch.uint8) + (some & every)

    def _pairs(
        self, tiles: tuple[Tensor, Tensor, Tensor], samples: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Whether some, and whether all of the sampled pairs of single tiles are kept."""
        g, r, c = tiles
        b, h = self.groups.split(g)
        q, kv = (
            axis.at(_spread(axis, box, n), b[:, None])
            for axis, box, n in ((self.q, r, samples[0]), (self.kv, c, samples[1]))
        )
        b, h = b[:, None, None] + self.groups.first_b, h[:, None, None] + self.groups.first_h
        some, every = g < 0, g >= 0
        wide = min(samples[1], _PAIRS)  # in case one tile is more than fits
        for i in q.split(max(1, _PAIRS // (wide * len(g))), 1):
            for j in kv.split(wide, 1):
                at = Positions(b, h, i[:, :, None], j[:, None, :])
                kept = mask_at(self.graph, self.values, at)
                kept = kept.expand(len(g), i.shape[1], j.shape[1]).flatten(1)
                some, every = some | kept.any(1), every & kept.all(1)
        return some, every


def _where(boxes: Tensor, keep: Tensor) -> Tensor:
    return boxes.index_select(1, keep.nonzero().flatten())


def _spread(axis: Axis, box: Tensor, n: int) -> Tensor:
    """n indices spread evenly over each tile, both ends included: `(tiles, n)`.

    Where n is not below the tile's size, these are all of its indices, some of them twice.
    """
    first = box[:, None] * axis.tile
    last = (first + axis.tile).clamp_max(axis.length) - 1
    return first + (last - first) * torch.arange(n, device=box.device) // max(n - 1, 1)
