"""Which tiles of keys every rank's queries need, and the tiles of one rank's own block mask.

Both are taken from the runs of the whole block mask, in proportion to runs: no square is made.
Where a layout cuts inside of tiles, the whole is decided for the queries in the order of ranks,
each rank's filled up to whole tiles.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...blocks import TILE, Runs, Tiles, cached_build
from ...blocks.runs import cover
from ...mods.graph import Graph
from ...types import Captured, Coords
from .routes import Pieces


class Whole(NamedTuple):
    """The block mask of all ranks' queries and all keys.

    - `tiles`, `b`, `h`, `tile`: as in a block mask; `lines`, `width`: tiles of queries and of keys.
    - `owner`: the rank of every tile of queries, `(lines,)`.
    - `length`: of the keys; `in_order`: whether queries are in the order of the sequence.
    """

    tiles: Tiles
    b: int
    h: int
    tile: tuple[int, int]
    lines: int
    width: int
    owner: np.ndarray
    length: int
    in_order: bool

    def visits(self, heads: range, ranks: int) -> np.ndarray:
        """int32 `(ranks, width)`: how many tiles of a rank's queries read a tile of keys, of all
        batch rows and these heads."""
        total = np.zeros((ranks, self.width), np.int32)
        for runs in (self.tiles.rows_full, self.tiles.rows_partial):
            row = runs.row().cpu().numpy()
            start, count = runs.start.cpu().numpy(), runs.count.cpu().numpy()
            if self.h > 1:
                head = row // max(1, self.lines) % self.h
                here = (head >= heads.start) & (head < heads.stop)
                row, start, count = row[here], start[here], count[here]
            rank = self.owner[row % max(1, self.lines)]
            total += cover(rank, start, start + count, ranks, self.width)
        return total

    def of(
        self, heads: range, rank: int | None, needed: np.ndarray | None,
        pieces: np.ndarray | None = None,
    ) -> Tiles:  # fmt: skip
        """The tiles of these heads (of all where the mask has one for all); of one rank's queries,
        and of the keys that it needs, one after the other. None: of all.

        - `pieces`: (start, stop) of those of the rank's queries that are meant, where queries are
          in the order of the sequence; None: all.
        """
        device = self.tiles.row_order.device
        groups = torch.arange(self.b, device=device)[:, None] * self.h
        groups = groups + torch.arange(self.h, device=device)[_slice(heads, self.h)]
        mine = _stretches(self.owner == rank) if rank is not None else [(0, self.lines)]
        if pieces is not None and self.in_order:
            mine = [(int(a) // self.tile[0], -(-int(b) // self.tile[0])) for a, b in pieces]
        cols = np.ones(self.width, bool) if needed is None else needed
        rows = np.concatenate([np.zeros(0, np.int64)] + [np.arange(a, b) for a, b in mine])
        place = torch.from_numpy(cols.cumsum() - 1).to(device)
        row_lines = _lines(groups, rows, self.lines, device)
        col_lines = _lines(groups, cols.nonzero()[0], self.width, device)
        t, width = self.tiles, int(cols.sum())
        by_row = [
            _squeezed(runs.take(row_lines), place, width) for runs in (t.rows_full, t.rows_partial)
        ]
        by_col = [
            _stacked(runs.take(col_lines), mine, len(rows))
            for runs in (t.cols_full, t.cols_partial)
        ]
        return Tiles.of_runs(*by_row, *by_col)


def whole_of(
    graph: Graph, captured: Captured, tiles: Tiles | None, known: tuple[int, int, int, int] | None,
    sizes: tuple[int, int], offsets: tuple[int, int], q: Pieces, kv: Pieces, device: torch.device,
) -> Whole | None:  # fmt: skip
    """The whole of a mask, for `sizes` (b, hq) from `offsets` on; `tiles` and `known` (b, h, tile)
    of a given block mask. None where those tiles are no use, since pieces cut through them."""
    shape = (*sizes, q.length, kv.length)
    tile = TILE if known is None else known[2:]
    lines, width = -(-q.length // tile[0]), -(-kv.length // tile[1])
    inside = ((q.start % tile[0] != 0) & (q.stop > q.start)).any()
    if not inside:
        owner = np.repeat(q.rank, -(-q.stop // tile[0]) - q.start // tile[0])
        if tiles is None:
            at = Coords(*offsets)
            tiles, b, h = cached_build(graph, captured, shape, tile, device, at)
        else:
            b, h = known[:2]  # type: ignore[index]
        return Whole(tiles, b, h, tile, lines, width, owner, kv.length, True)
    if tiles is not None:
        return None
    positions, owner = _in_order_of_ranks(q, tile[0])
    at = Coords(*offsets, q_pos=torch.from_numpy(positions).to(device))
    shape = (*sizes, len(positions), kv.length)
    tiles, b, h = cached_build(graph, captured, shape, tile, device, at)
    return Whole(tiles, b, h, tile, len(owner), width, owner, kv.length, False)


def stretches_of(needed: np.ndarray, tile: int, length: int) -> np.ndarray:
    """Needed tiles of keys as stretches of positions (start, stop)."""
    found = np.array(_stretches(needed), np.int64).reshape(-1, 2) * tile
    return np.minimum(found, length)


def coords_of(
    offsets: tuple[int, int], q: np.ndarray, kv: np.ndarray, device: torch.device
) -> Coords:
    """The coordinates of queries and of keys in stretches of positions (start, stop), from the
    batch row and query head `offsets` on."""
    (i, q_pos), (j, kv_pos) = _positions(q, device), _positions(kv, device)
    below = 0
    if not (q_pos is None is kv_pos) and in_tiles(q) and in_tiles(kv):
        below = int(max(x[:, 1].max(initial=0) for x in (q, kv)))
    return Coords(*offsets, i, j, q_pos, kv_pos, below)


def in_order(stretches: np.ndarray) -> bool:
    """Whether positions in stretches follow one another."""
    return len(_jumps(stretches)) == 0


def in_tiles(stretches: np.ndarray) -> bool:
    """Whether positions in stretches follow one another within every tile of rows."""
    return not (_jumps(stretches) % TILE[0]).any()


def _jumps(stretches: np.ndarray) -> np.ndarray:
    """The rows whose positions do not follow that of the row before."""
    begins = (stretches[:, 1] - stretches[:, 0]).cumsum()[:-1]
    return begins[stretches[1:, 0] != stretches[:-1, 1]]


def _positions(stretches: np.ndarray, device: torch.device) -> tuple[int, Tensor | None]:
    """The first position and None, or positions one by one."""
    if in_order(stretches):
        return int(stretches[:1, 0].sum()), None
    found = np.concatenate([np.arange(a, b) for a, b in stretches.tolist()])
    return 0, torch.from_numpy(found).to(device)


def _in_order_of_ranks(q: Pieces, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """The positions of rank 0's queries, filled up to whole tiles with the last, then those of rank
    1 and so on; and the rank of every tile."""
    found, owner = [], []
    for rank in range(q.ranks):
        mine = [np.arange(a, b) for a, b in q.of(rank).tolist()]
        if not mine:
            continue
        positions = np.concatenate(mine)
        tiles = -(-len(positions) // tile)
        fill = np.full(tiles * tile - len(positions), positions[-1])
        found += [positions, fill]
        owner += [rank] * tiles
    return np.concatenate(found), np.array(owner, np.int64)


def _stretches(live: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(live.astype(np.int8), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _slice(heads: range, h: int) -> slice:
    return slice(heads.start, heads.stop) if h > 1 else slice(None)


def _lines(groups: Tensor, at: np.ndarray, lines: int, device: torch.device) -> Tensor:
    """The numbers of some rows of some groups of `lines` rows each."""
    places = torch.from_numpy(np.ascontiguousarray(at, np.int64)).to(device)
    return (groups.reshape(-1, 1) * lines + places).flatten()


def _squeezed(runs: Runs, place: Tensor, width: int) -> Runs:
    """Runs of columns as runs of those that are left, of which column n is number `place[n]`."""
    start = place[runs.start.long()]
    key = runs.row() * (width + 1) + start
    return Runs.of_keys(key, runs.count.long(), runs.rows, width)


def _stacked(runs: Runs, stretches: list[tuple[int, int]], width: int) -> Runs:
    """The parts of runs within stretches of rows, which are put one after the other."""
    keys, counts, before = [], [], 0
    for low, high in stretches:
        part = runs.cut(low, high)
        keys.append(part.row() * (width + 1) + part.start + before)
        counts.append(part.count.long())
        before += high - low
    none = [torch.zeros(0, dtype=torch.int64, device=runs.start.device)]
    return Runs.of_keys(torch.cat(none + keys), torch.cat(none + counts), runs.rows, width)
