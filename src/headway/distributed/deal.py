"""Who gets which part of a sequence: as even as asked, and of that what moves the fewest bytes.

The sequence is cut into chunks. A chunk has work (its kept pairs or live tiles) and reads keys. The
search starts from neighbouring chunks, which share most of the keys that they read, and exchanges
chunks between ranks that have too much and ranks that have too little until none has; so a rank
keeps neighbours where it can. (A greedy deal, the heaviest chunk to the emptiest rank as in
MagiAttention, arXiv 2505.13211, section 3.1, is as even, and moves more than twice the bytes.)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..blocks import BlockMask, Runs, cached_build
from ..blocks.runs import cover
from ..errors import ArgumentError
from ..mods import lower_mod

Pieces = list[tuple[int, int, int]]
_CHUNKS = (4, 8, 16, 32)  # of a rank


@dataclass(frozen=True)
class Share:
    """How a deal shares out: of all ranks, the largest over the mean."""

    work: float  # kept pairs, or live tiles
    tokens: float
    moved: float  # tokens whose keys a rank is sent, over the length: the mean of all ranks
    most_moved: float  # of the rank that is sent most


class Chunks:
    """A sequence in chunks, `cuts[n]` up to `cuts[n + 1]`, each with its work."""

    def __init__(self, cuts: np.ndarray, work: np.ndarray) -> None:
        self.cuts, self.work = cuts, work
        self.tokens = np.diff(cuts)

    def moved(self, to: np.ndarray, ranks: int) -> np.ndarray:
        """Tokens of other ranks whose keys every rank reads, `(ranks,)`."""
        raise NotImplementedError

    def share(self, to: np.ndarray, ranks: int) -> Share:
        """What comes of giving chunk n to rank `to[n]`."""
        length = max(1, int(self.cuts[-1]))
        moved = self.moved(to, ranks) / length
        return Share(
            _evenness(np.bincount(to, self.work, ranks)),
            _evenness(np.bincount(to, self.tokens, ranks)),
            float(moved.mean()),
            float(moved.max()),
        )

    def pieces(self, to: np.ndarray) -> Pieces:
        """`(rank, start, stop)` of every chunk."""
        return list(zip(to.tolist(), self.cuts[:-1].tolist(), self.cuts[1:].tolist(), strict=True))


class OfIntervals(Chunks):
    """Chunks that read one stretch of keys each: from `first[n]` to their own end."""

    def __init__(self, cuts: np.ndarray, work: np.ndarray, first: np.ndarray) -> None:
        super().__init__(cuts, work)
        self.first = first

    def moved(self, to: np.ndarray, ranks: int) -> np.ndarray:
        order = np.lexsort((self.first, to))
        rank, lo, hi = to[order], self.first[order], self.cuts[1:][order]
        # The union of a rank's stretches: what ends beyond all before it. (One line for all ranks.)
        base = rank * (self.cuts[-1] + 1)
        end = np.maximum.accumulate(base + hi)
        before = np.concatenate([[0], end[:-1]])
        new = np.maximum(0, base + hi - np.maximum(base + lo, before))
        return np.bincount(rank, new, ranks) - np.bincount(to, self.tokens, ranks)


class OfRuns(Chunks):
    """Chunks of whole tile rows, which read runs of tiles of keys."""

    def __init__(self, rows: np.ndarray, runs: "RowRuns") -> None:
        cuts = np.minimum(rows * runs.tile, runs.length)
        total = np.concatenate([[0], runs.work.cumsum()])
        super().__init__(cuts, np.diff(total[rows]))
        self.rows, self.runs = rows, runs

    def moved(self, to: np.ndarray, ranks: int) -> np.ndarray:
        r, of_row = self.runs, np.repeat(to, np.diff(self.rows))
        rank, width = of_row[r.row], r.width
        needed = cover(rank, r.start, r.start + r.count, ranks, width) > 0
        needed[of_row, np.arange(width)] = False
        size = np.full(width, r.tile)
        size[-1:] = r.length - r.tile * (width - 1)
        return needed @ size


@dataclass(frozen=True)
class RowRuns:
    """The live tiles of a square mask, over batches, heads and masks: runs, and tiles per row."""

    length: int
    tile: int
    width: int  # tiles of a row, and rows
    row: np.ndarray
    start: np.ndarray
    count: np.ndarray

    @property
    def work(self) -> np.ndarray:
        """Live tiles of every row."""
        return np.bincount(self.row, self.count, self.width)


# -- deals ----------------------------------------------------------------------------------------


def deal_masks(
    masks: list[Any], sizes: tuple[int, int, int, int], ranks: int, tile: int, slack: float
) -> Pieces:
    """The pieces of a layout for these masks."""
    runs = row_runs(masks, sizes, tile)
    found = []
    for rows in _row_cuts(runs, ranks):
        chunks = OfRuns(rows, runs)
        found += [(chunks, to) for to in _deals(chunks, ranks, slack)]
    return _best(found, runs.length, ranks, slack)


def deal_documents(rows: list[list[int]], ranks: int, tile: int, slack: float) -> Pieces:
    """The pieces of a layout for rows of packed documents that are causal."""
    length = sum(rows[0])
    starts = [np.concatenate([[0], np.cumsum([n for n in row if n])]) for row in rows]
    found = []
    for cuts in _token_cuts(length, ranks, tile):
        chunks = _of_documents(cuts, starts)
        found += [(chunks, to) for to in _deals(chunks, ranks, slack)]
    if all(np.array_equal(starts[0], s) for s in starts):
        for per in _CHUNKS[1:3]:
            unit = max(tile, length // (ranks * per))
            chunks = _of_documents(_document_cuts(starts[0], unit, tile), starts)
            found.append((chunks, _evenly(chunks, ranks)))
    return _best(found, length, ranks, slack)


def _best(found: Iterable, length: int, ranks: int, slack: float) -> Pieces:
    """Of the deals that are as even as asked, the one that moves least; else the most even one."""
    if not length:
        return []

    def cost(deal: tuple[Chunks, np.ndarray]) -> tuple[float, float]:
        share = deal[0].share(deal[1], ranks)
        excess = max(0.0, share.work - 1 - slack, share.tokens - 1 - max(slack, 0.05))
        return round(excess, 2), share.moved * share.work

    chunks, to = min(found, key=cost)
    return chunks.pieces(to)


def _deals(chunks: Chunks, ranks: int, slack: float) -> list[np.ndarray]:
    count = len(chunks.tokens)
    at = np.arange(count)
    plain = at * ranks // max(1, count)
    fold = at * 2 * ranks // max(1, count)
    return [plain, np.minimum(fold, 2 * ranks - 1 - fold), near(chunks.work, plain, ranks, slack)]


def near(work: np.ndarray, to: np.ndarray, ranks: int, slack: float) -> np.ndarray:
    """Exchange chunks between ranks, two at a time, until none has more than `slack` above the
    mean, or no exchange helps. Of exchanges that help as much, the one of nearest chunks."""
    to = to.copy()
    if not len(work):
        return to
    load = np.bincount(to, work, ranks)
    mean, at = load.mean(), np.arange(len(work))
    partners = min(ranks, 24)
    for _ in range(8 * len(work)):
        most = int(load.argmax())
        if load[most] <= mean * (1 + slack):
            break
        mine = np.flatnonzero(to == most)
        light = np.argpartition(load, partners - 1)[:partners]
        theirs = at[np.isin(to, light)] if partners < ranks else at[to != most]
        if not len(mine) or not len(theirs):
            break
        # After exchanging chunks i and j the larger of both loads is this.
        less = work[mine][:, None] - work[theirs]
        after = np.maximum(load[most] - less, load[to[theirs]] + less)
        gain = load[most] - after
        if gain.max() <= 1e-9 * mean:
            break
        far = np.abs(mine[:, None] - theirs) / len(work)
        enough = load[most] - mean * (1 + slack)
        worth = np.minimum(gain, enough) / max(enough, 1e-30) - 0.1 * far * (gain > 0)
        i, j = np.unravel_index(worth.argmax(), worth.shape)
        if gain[i, j] <= 0:
            i, j = np.unravel_index(gain.argmax(), gain.shape)
        a, b, other = mine[i], theirs[j], to[theirs[j]]
        to[a], to[b] = other, most
        load[most] -= less[i, j]
        load[other] += less[i, j]
    return to


def _evenly(chunks: Chunks, ranks: int) -> np.ndarray:
    """The heaviest chunk first, each to the rank that then has least of work and of tokens."""
    to = np.empty(len(chunks.work), np.int64)
    load = np.zeros((2, ranks))
    share = np.stack([chunks.work / max(1, chunks.work.sum()), chunks.tokens / chunks.cuts[-1]])
    for n in np.argsort(-share.max(0), kind="stable"):
        r = int((load + share[:, n, None]).max(0).argmin())
        to[n] = r
        load[:, r] += share[:, n]
    return to


# -- chunks ---------------------------------------------------------------------------------------


def row_runs(masks: list[Any], sizes: tuple[int, int, int, int], tile: int) -> RowRuns:
    """The live tiles of masks for self-attention of these sizes (b, h, length, length)."""
    length = sizes[2]
    width = -(-length // tile)
    row, start, count = [], [], []
    for mask in masks:
        for runs in _tiles_of(mask, sizes, tile):
            row.append((runs.row() % max(1, width)).cpu().numpy())
            start.append(runs.start.cpu().numpy())
            count.append(runs.count.cpu().numpy())
    return RowRuns(length, tile, width, *(np.concatenate(x) for x in (row, start, count)))


def _tiles_of(mask: Any, sizes: tuple[int, int, int, int], tile: int) -> list[Runs]:
    length = sizes[2]
    if isinstance(mask, BlockMask):
        if mask.shape[2:] != (length, length):
            raise ArgumentError(
                f"a block mask is for lengths {mask.shape[2:]}, the layout for {length}"
            )
        if mask.tile != (tile, tile):
            mask = mask.retile(tile)
        return [mask.tiles.rows_full, mask.tiles.rows_partial]
    if mask is None:
        rows = torch.arange(-(-length // tile), device="cpu", dtype=torch.int32)
        offsets = torch.arange(len(rows) + 1, device="cpu", dtype=torch.int32)
        return [Runs(offsets, torch.zeros_like(rows), torch.full_like(rows, len(rows)))]
    graph, captured = lower_mod("mask", mask, torch.float32)
    device = captured.tensors[0].device if captured.tensors else torch.device("cpu")
    tiles, _, _ = cached_build(graph, captured, sizes, (tile, tile), device)
    return [tiles.rows_full, tiles.rows_partial]


def _row_cuts(runs: RowRuns, ranks: int) -> list[np.ndarray]:
    """Rows of tiles at which the sequence may be cut, for several numbers of chunks."""
    return [_even(runs.width, ranks * per, 1) for per in _counts(runs.width, ranks)]


def _token_cuts(length: int, ranks: int, tile: int) -> list[np.ndarray]:
    few = {min(per, max(1, -(-length // tile) // ranks)) for per in (2, *_CHUNKS[1:3])}
    return [_even(length, ranks * per, tile) for per in sorted(few)]


def _counts(tiles: int, ranks: int) -> list[int]:
    """Chunks of a rank; as many as tiles where these are few."""
    fit = sorted({min(per, max(1, tiles // ranks)) for per in (2, *_CHUNKS)})
    return fit if ranks <= 256 else fit[-2:]


def _even(length: int, count: int, tile: int) -> np.ndarray:
    """Cuts of a length into this many chunks, at multiples of the tile; of tokens where there are
    fewer tiles than chunks."""
    if length < count * tile:
        tile = 1
    tiles = -(-length // tile)
    return np.minimum(np.arange(count + 1) * tiles // count * tile, length)


def _document_cuts(starts: np.ndarray, unit: int, tile: int) -> np.ndarray:
    """Cuts at starts of documents: those that are longer than a unit are cut inside, and several
    that are shorter stay together."""
    cuts = [0]
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if stop - start > unit:
            if cuts[-1] != start:
                cuts.append(start)
            parts = -(-(stop - start) // unit)
            size = -(-(stop - start) // (parts * tile)) * tile
            cuts += range(start + size, stop, size)
            cuts.append(stop)
        elif stop - cuts[-1] > unit and cuts[-1] != start:
            cuts.append(start)
    if cuts[-1] != starts[-1]:
        cuts.append(int(starts[-1]))
    return np.array(cuts)


def _of_documents(cuts: np.ndarray, starts: list[np.ndarray]) -> OfIntervals:
    """Chunks of causal documents, which begin at `starts` of every row of the batch."""
    total, first = np.zeros(len(cuts)), None
    for begin in starts:
        size = np.diff(begin).astype(np.float64)
        before = np.concatenate([[0], (size * (size + 1) / 2).cumsum()])
        at = np.searchsorted(begin, cuts, side="right") - 1
        inside = (cuts - begin[at]).astype(np.float64)
        total += before[at] + inside * (inside + 1) / 2
        here = begin[at[:-1]]
        first = here if first is None else np.minimum(first, here)
    assert first is not None
    return OfIntervals(cuts, np.diff(total), first)


def _evenness(load: np.ndarray) -> float:
    mean = load.mean()
    return float(load.max() / mean) if mean > 0 else 1.0
