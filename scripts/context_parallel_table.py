"""Print the table of docs/recipes/context-parallel.md: how even layouts are, and what they move.

A million tokens over 8, 64 and 1,024 ranks; nothing is computed but the layouts. Of every layout:
the work of the busiest rank over the mean, and the keys that a rank is sent, as a share of all.
"""

import sys
import time

import numpy as np

import headway as hw
from headway.distributed.balance import (
    RowRuns,
    RunChunks,
    balance_documents,
    balance_masks,
    row_runs,
)
from headway.distributed.layout import Layout

LENGTH, TILE = 1 << 20, 128


def documents(rng: np.random.Generator, long: bool) -> list[int]:
    """Lengths from a lognormal distribution; with one of half of the whole, if `long`."""
    mean, spread, most = (8.5, 1.5, 1 << 17) if long else (7.6, 1.3, 1 << 16)
    lengths = np.minimum(np.exp(rng.normal(mean, spread, 2000)).astype(int) + 16, most)
    if long:
        lengths = np.concatenate([[LENGTH // 2], lengths])
    lengths = lengths[lengths.cumsum() < LENGTH]
    lengths = np.append(lengths, LENGTH - lengths.sum())
    return (rng.permutation(lengths) if long else lengths).tolist()


def main() -> None:
    """The table, row by row."""
    rng = np.random.default_rng(0)
    short, long = documents(rng, False), documents(rng, True)
    causal = hw.causal()
    cases = [
        ("causal", causal, None),
        ("window of 4,096", causal & hw.sliding_window(4096), None),
        (f"{len(short)} documents", causal & hw.document.from_lengths(short), short),
        ("one document of half, short ones", causal & hw.document.from_lengths(long), long),
    ]
    print("| mask | ranks | contiguous | zigzag | balanced | of_lengths |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, mask, lengths in cases:
        runs = row_runs([mask], (1, 1, LENGTH, LENGTH), TILE, is_coarse=False)
        for ranks in (8, 64, 1024):
            began = time.perf_counter()
            balanced = balance_masks([mask], (1, 1, LENGTH, LENGTH), ranks, TILE, 0.03)
            took = time.perf_counter() - began
            row = [
                shown(Layout.contiguous(LENGTH, (0, ranks)), runs),
                shown(Layout.zigzag(LENGTH, (0, ranks)), runs),
                shown(Layout(LENGTH, balanced, (0, ranks)), runs),
            ]
            if lengths is not None:
                began = time.perf_counter()
                pieces = balance_documents([lengths], ranks, TILE, 0.03)
                also = time.perf_counter() - began
                row.append(exact(lengths, pieces, ranks))
                print(f"{name}, {ranks}: {also * 1e3:.0f} ms of_lengths", file=sys.stderr)
            else:
                row.append("")
            print(f"{name}, {ranks}: {took * 1e3:.0f} ms balanced", file=sys.stderr)
            print(f"| {name} | {ranks:,} | " + " | ".join(row) + " |", flush=True)


def shown(layout: Layout, runs: RowRuns) -> str:
    """Of a layout that cuts at tiles."""
    cuts = np.unique(np.concatenate([layout.table[:, 1], [LENGTH]]))
    rows = np.unique(cuts // TILE)
    stats = RunChunks(rows, runs).stats(owners(layout.table.numpy(), rows), layout.ranks)
    return f"{stats.work:.2f}, {stats.received:.1%}"


def owners(table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The rank of every chunk between two rows of tiles."""
    order = table[:, 1].argsort()
    at = np.searchsorted(table[order, 1], rows[:-1] * TILE, side="right") - 1
    return table[order[at], 0]


def exact(lengths: list[int], pieces: list, ranks: int) -> str:
    """Of a layout that need not cut at tiles: kept pairs, and tokens."""
    from headway.distributed.balance import _document_chunks

    starts = np.concatenate([[0], np.cumsum(lengths)])
    table = np.array(sorted(pieces, key=lambda p: p[1]))
    cuts = np.append(table[:, 1], LENGTH)
    stats = _document_chunks(cuts, [starts]).stats(table[:, 0], ranks)
    return f"{stats.work:.2f}, {stats.received:.1%} (tokens {stats.tokens:.2f})"


if __name__ == "__main__":
    main()
