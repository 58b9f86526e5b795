"""Classify the tiles of a mask as empty, full or partial, from coarse to fine.

The grid of tiles is cut into boxes of 4^n x 4^n tiles. Interval evaluation (`bounds.py`) calls a
box empty, full or unresolved; unresolved boxes are cut into 16, down to single tiles, all boxes of
a level at once. So the work follows the edge of the mask, not its area: a causal million tokens,
with 33.6 million live tiles, takes some 40 thousand boxes. In a small grid all tiles are one step,
since a step then costs its calls, not its tiles: half the time (docs/lab/block-masks.md).

A tile that stays unresolved is evaluated pair by pair: at its corners first, then along its edges,
which hold every distance i - j and every sum i + j, because one kept and one masked pair prove it
partial; then at all pairs, in chunks. At 16,384 tokens this takes 2 to 3 ms where PyTorch's
`create_block_mask` takes 1.4 to 4.0 s (docs/performance.md).
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

_BOXES = 1 << 14  # evaluated together: what one thread does without waking the others
_SMALL_GRID = 1 << 15  # tiles
_PAIRS = 1 << 20  # evaluated together, where a tile takes all its pairs


class BoxCollector:
    """A collector of full or partial boxes, which become runs along tile rows and columns."""

    def __init__(self, q: Axis, kv: Axis, device: torch.device) -> None:
        self.q, self.kv = q.boxes(0), kv.boxes(0)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self.rows = self.cols = (none, none)  # keys and counts of runs
        self.boxes: list[Tensor] = []  # (4, boxes): group, row, column and size, not yet in runs
        self.pending, self.max_pending = 0, _BOXES

    def add(self, level: int, boxes: Tensor) -> None:
        """Add boxes of a level, `(3, boxes)`, which do not overlap."""
        if boxes.shape[1]:
            size = SPLIT**level
            sizes = torch.full_like(boxes[:1], size)
            self.boxes.append(torch.cat([boxes[:1], boxes[1:] * size, sizes]))
            # Neighbours are joined to runs now and then, so that memory follows the runs.
            self.pending += boxes.shape[1] * size
            if self.pending > self.max_pending:
                rows, cols = self._keys()
                self.rows, self.cols = merge(*rows), merge(*cols)
                self.boxes, self.pending = [], len(self.rows[0]) + len(self.cols[0])
                self.max_pending = max(_BOXES, 2 * self.pending)

    def _keys(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return all runs so far, along rows and along columns, unsorted."""
        if not self.boxes:
            return self.rows, self.cols
        g, r0, c0, size = torch.cat(self.boxes, 1)
        r1, c1 = (r0 + size).clamp_max(self.q), (c0 + size).clamp_max(self.kv)
        row_base, col_base = g * self.q, g * self.kv
        rows = rectangles(row_base + r0, row_base + r1, c0, c1, self.kv)
        cols = rectangles(col_base + c0, col_base + c1, r0, r1, self.q)
        return _concat_runs(self.rows, rows), _concat_runs(self.cols, cols)

    def runs(self, groups: int) -> tuple[Runs, Runs]:
        """Return the runs along rows, and along columns."""
        rows, cols = self._keys()
        by_row = Runs.of_keys(*rows, groups * self.q, self.kv)
        return by_row, Runs.of_keys(*cols, groups * self.kv, self.q)


def _concat_runs(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenate two lists of keys and counts."""
    return torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])


class Search:
    """A search for the tiles of one mask; see the module's docstring."""

    def __init__(
        self, graph: Graph, captured: Captured, groups: Groups, q: Axis, kv: Axis,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.graph, self.values = graph, bind(graph, captured)
        self.groups, self.q, self.kv, self.device = groups, q, kv, device

    def run(self) -> Tiles:
        """Return full and partial tiles, along rows and along columns."""
        tiles = self.groups.count * self.q.boxes(0) * self.kv.boxes(0)
        if tiles:
            small = tiles <= _SMALL_GRID
            if not small:
                from .intervals import interval_tiles  # it imports NumPy

                inputs = self.graph, self.values, self.groups, self.q, self.kv, self.device
                if (result := interval_tiles(*inputs)) is not None:
                    return result
            on_cpu = small and not self._reads_tensors()
            bounds_device = torch.device("cpu") if on_cpu else self.device
            axes = self.q, self.kv
            self.bounds = BoxBounds(self.graph, self.values, self.groups, *axes, bounds_device)
            if small:
                return self._all_tiles()
        self.full, self.partial = (BoxCollector(self.q, self.kv, self.device) for _ in range(2))
        if tiles:
            self._coarse_to_fine()
        (rows_full, cols_full), (rows_partial, cols_partial) = (
            collector.runs(self.groups.count) for collector in (self.full, self.partial)
        )
        return Tiles.of_runs(rows_full, rows_partial, cols_full, cols_partial)

    def _reads_tensors(self) -> bool:
        """Return whether the mask depends on tensors, and not on numbers only."""
        tensors = any(x.dim() for x in self.values.values())
        return tensors or self.q.positions is not None or self.kv.positions is not None

    def _all_tiles(self) -> Tiles:
        """Classify all tiles of a small grid at once: fewer steps than from coarse to fine.

        For a mask that reads no tensor, bounds and corners are computed on the host, which then
        waits for no GPU. The GPU loads no kernels for them, which take 0.1 s of a first call.
        """
        import numpy as np  # as in `runs.of_dense`

        state, outside = self.bounds.of_all_tiles()
        dense = state.flatten(0, 1).cpu().numpy()  # (groups, rows, columns)
        unresolved = np.flatnonzero(dense == 1)
        if len(unresolved):
            row, column = np.divmod(unresolved, dense.shape[2])
            places = (unresolved, *np.divmod(row, dense.shape[1]), column)
            tiles, g, r, c = (torch.from_numpy(x).to(state.device) for x in places)
            outside = outside if outside is None else outside.take(tiles)
            exact = self._classify_tiles(g, r, c, outside)
            dense.reshape(-1)[unresolved] = exact.cpu().numpy()
        return Tiles.of_dense(dense, self.device)

    def _coarse_to_fine(self) -> None:
        """Search from the coarsest level down."""
        level = 0
        while max(self.q.boxes(level), self.kv.boxes(level)) > SPLIT:
            level += 1
        counts = self.groups.count, self.q.boxes(level), self.kv.boxes(level)
        boxes = torch.cartesian_prod(*(torch.arange(n, device=self.device) for n in counts)).T
        for chunk in boxes.split(_BOXES, 1):
            self._search(level, chunk)

    def _search(self, level: int, boxes: Tensor) -> None:
        """Search depth first, so that a mask that is unresolved everywhere has few boxes at once.

        `boxes` holds the groups, rows and columns of boxes of a level, int64 `(3, boxes)`.
        """
        full, maybe_live, outside = self.bounds(level, *boxes)
        self.full.add(level, _where(boxes, full))
        unresolved = maybe_live & ~full
        boxes = _where(boxes, unresolved)
        if level:
            for chunk in boxes.split(_BOXES // SPLIT**2, 1):
                if chunk.shape[1]:
                    self._search(level - 1, self._cut(level, chunk))
        elif boxes.shape[1]:
            outside = outside if outside is None else pick(outside, unresolved)
            g, r, c = boxes
            state = self._classify_tiles(g, r, c, outside)
            self.full.add(0, _where(boxes, state == 2))
            self.partial.add(0, _where(boxes, state == 1))

    def _cut(self, level: int, boxes: Tensor) -> Tensor:
        """Return the boxes of the next finer level."""
        part = torch.arange(SPLIT, device=self.device)
        g, r, c = boxes[:, :, None, None]
        r, c = r * SPLIT + part[:, None], c * SPLIT + part
        cut = torch.stack([x.flatten() for x in torch.broadcast_tensors(g, r, c)])
        inside = (cut[1] < self.q.boxes(level - 1)) & (cut[2] < self.kv.boxes(level - 1))
        return _where(cut, inside)

    def _classify_tiles(self, g: Tensor, r: Tensor, c: Tensor, outside: Tensor | None) -> Tensor:
        """Return the state of single tiles, uint8: 0 empty, 1 partial, 2 full."""
        steps = range(0, len(g), _BOXES // 4)
        chunks = ((x[n : n + _BOXES // 4] for x in (g, r, c)) for n in steps)
        keep_mask = torch.cat([self.bounds.corners(*chunk) for chunk in chunks], 2).flatten(0, 1)
        unresolved = keep_mask.all(0) | ~keep_mask.any(0)
        if outside is not None:
            unresolved = unresolved | outside
        state = torch.ones_like(g, dtype=torch.uint8)
        tiles = unresolved.nonzero().flatten()
        if len(tiles):
            g, r, c = (pick(x, tiles).to(self.device) for x in (g, r, c))
            outside = outside if outside is None else pick(outside, tiles).to(self.device)
            exact = self._evaluate_pairs(g, r, c, outside)
            state.index_copy_(0, tiles, exact.to(state.device))
        return state

    def _evaluate_pairs(self, g: Tensor, r: Tensor, c: Tensor, outside: Tensor | None) -> Tensor:
        """Return the state of single tiles that their corners leave unresolved."""
        if outside is None:
            outside = torch.zeros_like(g, dtype=torch.bool)
        any_kept, all_kept = torch.zeros_like(outside), torch.ones_like(outside)
        q, kv = (min(axis.tile, axis.length) for axis in (self.q, self.kv))
        for samples in (2, kv), (q, 2), (q, kv):
            # Where a gather may leave its tensor all pairs are evaluated: a kept one raises.
            unresolved = (~(any_kept & ~all_kept) | outside).nonzero().flatten()
            if not len(unresolved):
                break
            for chunk in unresolved.split(max(1, _PAIRS // (samples[0] * samples[1]))):
                tiles = pick(g, chunk), pick(r, chunk), pick(c, chunk)
                sample_any, sample_all = self._sample_pairs(tiles, samples)
                any_kept.index_copy_(0, chunk, sample_any | pick(any_kept, chunk))
                all_kept.index_copy_(0, chunk, sample_all & pick(all_kept, chunk))
        return any_kept.to(torch.uint8) + (any_kept & all_kept)

    def _sample_pairs(
        self, tiles: tuple[Tensor, Tensor, Tensor], samples: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Return whether any, and whether all of the sampled pairs of single tiles are kept."""
        g, r, c = tiles
        b, h = self.groups.split(g)
        q, kv = (
            axis.at(_spread(axis, box, n), b[:, None])
            for axis, box, n in ((self.q, r, samples[0]), (self.kv, c, samples[1]))
        )
        b, h = b[:, None, None] + self.groups.first_b, h[:, None, None] + self.groups.first_h
        any_kept, all_kept = g < 0, g >= 0
        chunk_keys = min(samples[1], _PAIRS)  # one tile may be too large
        for i in q.split(max(1, _PAIRS // (chunk_keys * len(g))), 1):
            for j in kv.split(chunk_keys, 1):
                positions = Positions(b, h, i[:, :, None], j[:, None, :])
                keep_mask = mask_at(self.graph, self.values, positions)
                keep_mask = keep_mask.expand(len(g), i.shape[1], j.shape[1]).flatten(1)
                any_kept, all_kept = any_kept | keep_mask.any(1), all_kept & keep_mask.all(1)
        return any_kept, all_kept


def _where(boxes: Tensor, keep: Tensor) -> Tensor:
    """Return the boxes for which `keep` is true."""
    return boxes.index_select(1, keep.nonzero().flatten())


def _spread(axis: Axis, box: Tensor, n: int) -> Tensor:
    """Return n indices spread evenly over each tile, both ends included: `(tiles, n)`.

    If n is at least the tile's size, these are all its indices, some of them twice.
    """
    first = box[:, None] * axis.tile
    last = (first + axis.tile).clamp_max(axis.length) - 1
    return first + (last - first) * torch.arange(n, device=box.device) // max(n - 1, 1)
