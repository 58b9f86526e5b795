"""The tiles of a rank's queries, as the global block mask has them, are those of the dense mask."""

import random

import numpy as np
import pytest
import torch

import headway as hw
from headway.distributed import Layout
from headway.distributed.exchange.comm_plan import SequenceShards
from headway.distributed.exchange.global_mask import global_mask
from headway.mods import lower_mod

TILE = 128


def dense_states(kept: torch.Tensor) -> torch.Tensor:
    """Return 0, 1, 2 for every tile of bool `(rows, keys)` that is empty, partial, full."""
    rows, keys = (-(-n // TILE) for n in kept.shape)
    states = torch.zeros(rows, keys, dtype=torch.uint8)
    for r in range(rows):
        for c in range(keys):
            part = kept[r * TILE : (r + 1) * TILE, c * TILE : (c + 1) * TILE]
            states[r, c] = int(part.any()) + int(part.all())
    return states


@pytest.mark.parametrize("seed", range(12))
def test_tiles_of_every_rank(seed):
    draw = random.Random(seed)
    ranks, length = draw.choice((2, 3)), draw.choice((700, 1024, 1500))
    cuts = sorted(draw.sample(range(1, length), draw.choice((0, 3, 9, 40))))
    cuts = [0, *cuts, length]
    pieces = [(draw.randrange(ranks), *cuts[n : n + 2]) for n in range(len(cuts) - 1)]
    table = Layout(length, pieces, (0, ranks)).table
    q, kv = SequenceShards(table, ranks), SequenceShards(torch.tensor([[0, 0, length]]), ranks)
    ids = torch.randint(0, 5, (length,)).sort().values
    masks = {
        "causal": hw.causal(), "window": hw.causal() & hw.sliding_window(200),
        "documents": hw.causal() & hw.document(ids), "prefix": hw.causal() | hw.prefix(300),
        "heads": lambda b, h, i, j: (j <= i) | (j % 128 < 64 * h),
    }  # fmt: skip
    name = draw.choice(list(masks))
    graph, captured = lower_mod("mask", masks[name], torch.float32)
    heads = 3 if name == "heads" else 1
    sizes, device = (1, heads), torch.device("cpu")
    mask = global_mask(graph, captured, None, None, sizes, (0, 0), q, kv, device)
    assert mask is not None
    i, j = torch.arange(length)[:, None], torch.arange(length)
    square = {
        "causal": j <= i, "window": (j <= i) & (i - j < 200), "prefix": (j < 300) | (j <= i),
        "documents": (j <= i) & (ids[:, None] == ids),
    }  # fmt: skip
    for rank in range(ranks):
        positions = np.concatenate(
            [np.zeros(0, np.int64), *[np.arange(a, b) for a, b in q.ranges_of(rank)]]
        )
        tiles = mask.select(range(heads), rank, None)
        for h in range(heads):
            kept = square[name] if heads == 1 else (j <= i) | (j % 128 < 64 * h)
            states = dense_states(kept[positions])
            rows, columns = states.shape
            for of_rows, right in ((True, states), (False, states.T)):
                full, partial = tiles.rows_full, tiles.rows_partial
                if not of_rows:
                    full, partial = tiles.cols_full, tiles.cols_partial
                width, count = (columns, rows) if of_rows else (rows, columns)
                seen = full.dense(width).to(torch.uint8) * 2 + partial.dense(width)
                assert torch.equal(seen[h * count : (h + 1) * count], right), (name, rank, of_rows)
