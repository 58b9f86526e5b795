"""Balanced assignments of a sequence to ranks: even work, and of those the fewest bytes to move.

The sequence is cut into chunks. A chunk has work (its kept pairs or live tiles) and reads keys. The
search starts with consecutive chunks on a rank, which share most of the keys that they read. It
then swaps chunks between ranks that have too much work and ranks that have too little, so that a
rank keeps neighbours where it can. (A greedy assignment, the heaviest chunk to the emptiest rank as
in MagiAttention, arXiv 2505.13211, section 3.1, is as even, and moves more than twice the bytes.)

For a million tokens in 245 documents over 64 ranks, the busiest rank has 1.03 times the mean work;
with contiguous shards it has 7.46 times (docs/recipes/context-parallel.md).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..arguments import check_function
from ..blocks import BlockMask, Runs, cached_build
from ..blocks.runs import cover
from ..errors import ArgumentError
from ..mods import lower_mod

PieceList = list[tuple[int, int, int]]
_CHUNKS = (4, 8, 16, 32)  # of a rank
# In long sequences the search looks at tiles that are so many times as long. Of a partial one this
# share is live: on a diagonal 10 of its 16 tiles are.
_COARSE, _LIVE_SHARE = 4, 0.625
# Ranks with the least work, which a rank may swap chunks with: among few ranks, and among many.
_PARTNERS = 4, 24
_TILES_OF_CHUNK = 4  # of chunks that begin and end at tiles, where they are as long or longer


@dataclass(frozen=True)
class BalanceStats:
    """The balance of an assignment: for work and tokens, the largest rank's over the mean."""

    work: float  # kept pairs, or live tiles
    tokens: float
    received: float  # tokens whose keys a rank receives, over the length: the mean of all ranks
    most_received: float  # by the rank that receives most


class Chunks:
    """A sequence cut into chunks, `cuts[n]` up to `cuts[n + 1]`, each with its work."""

    def __init__(self, cuts: np.ndarray, work: np.ndarray) -> None:
        self.cuts, self.work = cuts, work
        self.tokens = np.diff(cuts)

    def received(self, owner: np.ndarray, ranks: int) -> np.ndarray:
        """Count the remote tokens whose keys every rank reads, `(ranks,)`.

        - `owner`: the rank of every chunk.
        """
        raise NotImplementedError

    def stats(self, owner: np.ndarray, ranks: int) -> BalanceStats:
        """Return the balance where chunk n is on rank `owner[n]`."""
        length = max(1, int(self.cuts[-1]))
        received = self.received(owner, ranks) / length
        return BalanceStats(
            _evenness(np.bincount(owner, self.work, ranks)),
            _evenness(np.bincount(owner, self.tokens, ranks)),
            float(received.mean()),
            float(received.max()),
        )

    def pieces(self, owner: np.ndarray) -> PieceList:
        """Return `(rank, start, stop)` of every chunk."""
        start, stop = self.cuts[:-1].tolist(), self.cuts[1:].tolist()
        return list(zip(owner.tolist(), start, stop, strict=True))


class IntervalChunks(Chunks):
    """Chunks that each read one range of keys: from `first[n]` to their own end."""

    def __init__(self, cuts: np.ndarray, work: np.ndarray, first: np.ndarray) -> None:
        super().__init__(cuts, work)
        self.first = first

    def received(self, owner: np.ndarray, ranks: int) -> np.ndarray:
        order = np.lexsort((self.first, owner))
        rank, start, stop = owner[order], self.first[order], self.cuts[1:][order]
        # The size of the union of a rank's ranges: every range adds what lies beyond those before
        # it. Ranks are laid end to end on one axis, so that one scan serves all of them.
        base = rank * (self.cuts[-1] + 1)
        union_end = np.maximum.accumulate(base + stop)
        end_before = np.concatenate([[0], union_end[:-1]])
        new = np.maximum(0, base + stop - np.maximum(base + start, end_before))
        return np.bincount(rank, new, ranks) - np.bincount(owner, self.tokens, ranks)


class RunChunks(Chunks):
    """Chunks of whole tile rows, which read runs of tiles of keys."""

    def __init__(self, rows: np.ndarray, runs: "RowRuns") -> None:
        cuts = np.minimum(rows * runs.tile, runs.length)
        work_before = np.concatenate([[0], runs.work.cumsum()])
        super().__init__(cuts, np.diff(work_before[rows]))
        self.rows, self.runs = rows, runs

    def received(self, owner: np.ndarray, ranks: int) -> np.ndarray:
        runs, row_owner = self.runs, np.repeat(owner, np.diff(self.rows))
        rank, width = row_owner[runs.row], runs.width
        reads = cover(rank, runs.start, runs.start + runs.count, ranks, width) > 0
        reads[row_owner, np.arange(width)] = False
        tile_sizes = np.full(width, runs.tile)
        tile_sizes[-1:] = runs.length - runs.tile * (width - 1)
        return reads @ tile_sizes


@dataclass(frozen=True)
class RowRuns:
    """The live tiles of a square mask, over batches, heads and masks: runs, and tiles per row."""

    length: int
    tile: int
    width: int  # tiles of a row, and rows
    row: np.ndarray
    start: np.ndarray
    count: np.ndarray
    weight: np.ndarray  # the work of a tile

    @property
    def work(self) -> np.ndarray:
        """Return the work of every row."""
        return np.bincount(self.row, self.count * self.weight, self.width)


# -- assignments -----------------------------------------------------------------------------------


def balance_masks(
    masks: list[Any], sizes: tuple[int, int, int, int], ranks: int, tile: int, slack: float
) -> PieceList:
    """Return the pieces of a layout for these masks."""
    is_long = sizes[2] >= ranks * _CHUNKS[-1] * _COARSE**2 * tile
    runs = row_runs(masks, sizes, tile * (_COARSE if is_long else 1), is_long)
    candidates = []
    for rows in _row_cuts(runs, ranks):
        chunks = RunChunks(rows, runs)
        candidates += [(chunks, owner) for owner in _assignments(chunks, ranks, slack)]
    return _best(candidates, runs.length, ranks, slack)


def balance_documents(rows: list[list[int]], ranks: int, tile: int, slack: float) -> PieceList:
    """Return the pieces of a layout for rows of packed causal documents."""
    length = sum(rows[0])
    starts = [np.concatenate([[0], np.cumsum([n for n in row if n])]) for row in rows]
    candidates = []
    for cuts in _token_cuts(length, ranks, tile):
        chunks = _document_chunks(cuts, starts)
        candidates += [(chunks, owner) for owner in _assignments(chunks, ranks, slack)]
    if all(np.array_equal(starts[0], row_starts) for row_starts in starts):
        for chunks_per_rank in _CHUNKS[1:3]:
            longest = max(tile, length // (ranks * chunks_per_rank))
            boundaries = starts[0]
            if longest >= _TILES_OF_CHUNK * tile:  # where documents end inside of tiles
                rounded = (boundaries + tile // 2) // tile * tile
                boundaries = np.unique([*rounded[rounded < length], length])
            chunks = _document_chunks(_document_cuts(boundaries, longest, tile), starts)
            candidates.append((chunks, _greedy(chunks, ranks)))
    return _best(candidates, length, ranks, slack)


def _best(candidates: Iterable, length: int, ranks: int, slack: float) -> PieceList:
    """Return, of the assignments within `slack`, the one that moves least; else the most even."""
    if not length:
        return []

    def cost(candidate: tuple[Chunks, np.ndarray]) -> tuple[float, float]:
        chunks, owner = candidate
        stats = chunks.stats(owner, ranks)
        excess = max(0.0, stats.work - 1 - slack, stats.tokens - 1 - max(slack, 0.05))
        return round(excess, 2), stats.received * stats.work

    chunks, owner = min(candidates, key=cost)
    return chunks.pieces(owner)


def _assignments(chunks: Chunks, ranks: int, slack: float) -> list[np.ndarray]:
    """Return the owners of chunks: contiguous, zigzag, and contiguous balanced by swaps."""
    count = len(chunks.tokens)
    index = np.arange(count)
    contiguous = index * ranks // max(1, count)
    half = index * 2 * ranks // max(1, count)
    zigzag = np.minimum(half, 2 * ranks - 1 - half)
    return [contiguous, zigzag, balance_by_swaps(chunks.work, contiguous, ranks, slack)]


def balance_by_swaps(
    work: np.ndarray, owner: np.ndarray, ranks: int, slack: float
) -> np.ndarray:  # fmt: skip
    """Swap chunks between ranks, two at a time, until no rank has more than `slack` above the mean,
    or no swap helps. Of swaps that help equally, take the one of the nearest chunks."""
    owner = owner.copy()
    if not len(work):
        return owner
    load = np.bincount(owner, work, ranks)
    mean, index = load.mean(), np.arange(len(work))
    partners = min(ranks, _PARTNERS[ranks > 16])
    for _ in range(8 * len(work)):
        busiest = int(load.argmax())
        if load[busiest] <= mean * (1 + slack):
            break
        candidates = np.flatnonzero(owner == busiest)
        lightest = np.argpartition(load, partners - 1)[:partners]
        is_partner = np.zeros(ranks, bool)
        is_partner[lightest] = True
        is_partner[busiest] = False
        offers = index[is_partner[owner]]
        if not len(candidates) or not len(offers):
            break
        # After a swap of chunks i and j the larger of both loads is this.
        relief = work[candidates][:, None] - work[offers]
        larger_load = np.maximum(load[busiest] - relief, load[owner[offers]] + relief)
        gain = load[busiest] - larger_load
        if gain.max() <= 1e-9 * mean:
            break
        distance = np.abs(candidates[:, None] - offers) / len(work)
        excess = load[busiest] - mean * (1 + slack)
        worth = np.minimum(gain, excess) / max(excess, 1e-30) - 0.1 * distance * (gain > 0)
        i, j = np.unravel_index(worth.argmax(), worth.shape)
        if gain[i, j] <= 0:
            i, j = np.unravel_index(gain.argmax(), gain.shape)
        chunk, offer = candidates[i], offers[j]
        partner = owner[offer]
        owner[chunk], owner[offer] = partner, busiest
        load[busiest] -= relief[i, j]
        load[partner] += relief[i, j]
    return owner


def _greedy(chunks: Chunks, ranks: int) -> np.ndarray:
    """Assign the heaviest chunk first, each to the rank with the least work and tokens so far."""
    owner = np.empty(len(chunks.work), np.int64)
    load = np.zeros((2, ranks))
    share = np.stack([chunks.work / max(1, chunks.work.sum()), chunks.tokens / chunks.cuts[-1]])
    for n in np.argsort(-share.max(0), kind="stable"):
        rank = int((load + share[:, n, None]).max(0).argmin())
        owner[n] = rank
        load[:, rank] += share[:, n]
    return owner


# -- chunks ---------------------------------------------------------------------------------------


def row_runs(
    masks: list[Any], sizes: tuple[int, int, int, int], tile: int, is_coarse: bool
) -> RowRuns:
    """Return the live tiles of masks for self-attention of sizes (b, h, length, length)."""
    length = sizes[2]
    width = -(-length // tile)
    columns: list[list[np.ndarray]] = []
    for mask in masks:
        for n, runs in enumerate(_tiles_of(mask, sizes, tile)):
            row, start, count = (
                x.cpu().numpy() for x in (runs.row() % max(1, width), runs.start, runs.count)
            )
            weight = np.full(len(row), _LIVE_SHARE if n and is_coarse else 1.0)
            columns.append([row, start, count, weight])
    return RowRuns(length, tile, width, *map(np.concatenate, zip(*columns, strict=True)))


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
    check_function("mask", mask, sizes)
    graph, captured = lower_mod("mask", mask, torch.float32)
    device = captured.tensors[0].device if captured.tensors else torch.device("cpu")
    tiles, _, _ = cached_build(graph, captured, sizes, (tile, tile), device)
    return [tiles.rows_full, tiles.rows_partial]


def _row_cuts(runs: RowRuns, ranks: int) -> list[np.ndarray]:
    """Return tile rows at which to cut the sequence, for several numbers of chunks."""
    counts = _chunks_per_rank(runs.width, ranks)
    return [_even_cuts(runs.width, ranks * count, 1) for count in counts]


def _token_cuts(length: int, ranks: int, tile: int) -> list[np.ndarray]:
    """Return tokens at which to cut the sequence, for several numbers of chunks."""
    most = max(1, -(-length // tile) // ranks)
    counts = {min(count, most) for count in (2, *_CHUNKS[1:3])}
    return [_even_cuts(length, ranks * count, tile) for count in sorted(counts)]


def _chunks_per_rank(tiles: int, ranks: int) -> list[int]:
    """Return numbers of chunks per rank to try; at most one chunk for each tile."""
    counts = sorted({min(count, max(1, tiles // ranks)) for count in (2, *_CHUNKS)})
    return counts if ranks <= 256 else counts[-2:]


def _even_cuts(length: int, count: int, tile: int) -> np.ndarray:
    """Cut a length into this many chunks, at multiples of the tile; anywhere, where there are fewer
    tiles than chunks."""
    if length < count * tile:
        tile = 1
    tiles = -(-length // tile)
    return np.minimum(np.arange(count + 1) * tiles // count * tile, length)


def _document_cuts(starts: np.ndarray, longest: int, tile: int) -> np.ndarray:
    """Cut at the starts of documents. Documents that are longer than `longest` are cut inside, and
    shorter ones share a chunk."""
    cuts = [0]
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if stop - start > longest:
            if cuts[-1] != start:
                cuts.append(start)
            parts = -(-(stop - start) // longest)
            size = -(-(stop - start) // (parts * tile)) * tile
            cuts += range(start + size, stop, size)
            cuts.append(stop)
        elif stop - cuts[-1] > longest and cuts[-1] != start:
            cuts.append(start)
    if cuts[-1] != starts[-1]:
        cuts.append(int(starts[-1]))
    return np.array(cuts)


def _document_chunks(cuts: np.ndarray, starts: list[np.ndarray]) -> IntervalChunks:
    """Return the chunks of causal documents; `starts` has their starts for every batch row."""
    pairs_before_cut, first_key = np.zeros(len(cuts)), None
    for row_starts in starts:
        size = np.diff(row_starts).astype(np.float64)
        pairs_before_document = np.concatenate([[0], (size * (size + 1) / 2).cumsum()])
        document = np.searchsorted(row_starts, cuts, side="right") - 1
        inside = (cuts - row_starts[document]).astype(np.float64)
        pairs_before_cut += pairs_before_document[document] + inside * (inside + 1) / 2
        first = row_starts[document[:-1]]
        first_key = first if first_key is None else np.minimum(first_key, first)
    assert first_key is not None
    return IntervalChunks(cuts, np.diff(pairs_before_cut), first_key)


def _evenness(load: np.ndarray) -> float:
    """Return the largest load over the mean."""
    mean = load.mean()
    return float(load.max() / mean) if mean > 0 else 1.0
