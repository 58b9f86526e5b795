"""The tiles of a rank's queries, as the global block mask has them, are those of the dense mask."""

import random
from unittest.mock import patch

import numpy as np
import pytest
import torch

import headway as hw
from headway.blocks import clear_block_cache, intervals, quadtree
from headway.distributed import Layout
from headway.distributed.context import Layouts
from headway.distributed.exchange.comm_plan import SequenceShards
from headway.distributed.exchange.global_mask import global_mask
from headway.distributed.exchange.plan_inputs import plan_inputs
from headway.distributed.exchange.plans import make_plan
from headway.mods import lower_mod
from headway.resolve import prepare

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


def plan_of(layout: Layout, mask, name: str) -> list:
    """Return what the plan of a rank says: who sends what to whom, and its tiles."""
    q, k = (torch.zeros(1, h, layout.local, 8) for h in (4, 2))
    spec, call = prepare(q, k, k, None, mask, backend="reference", keys=Layouts.of(layout))
    clear_block_cache()
    shards = (SequenceShards(layout.table, layout.ranks),) * 2
    inputs = plan_inputs(spec.replace(exchange=None), call, *shards, None, layout.rank, False)
    with patch.object(torch.distributed, "get_rank", lambda group: layout.rank):
        plan = make_plan(name, inputs, None)
    parts = [inputs.kv_requirements(range(4)), inputs.rank_pairs, inputs.longest_work_tile]
    for chunk in getattr(plan, "chunks", ()):
        comm = chunk.comm
        parts += [comm.incoming, comm.outgoing, comm.local, comm.tokens_read]
    for holder in getattr(plan, "chunks", [plan]):
        for shard in holder.shards:
            inner = getattr(shard, "plan", None)  # of Ulysses: a plan of some heads
            for part in [shard] if inner is None else inner.shards:
                parts += [part.rows, part.coords[:4], part.tile_info]
                parts += [] if part.tiles is None else [t.tolist() for t in part.tiles.flatten()]
    if plan.name == "ulysses":
        places = [(n, layout.ranks) for n in range(layout.ranks)]
        by_rank = torch.cat([layout.on(place).positions for place in places])
        assert torch.equal(by_rank[plan.q.to_sequence], torch.arange(layout.length))
        assert torch.equal(torch.arange(layout.length)[plan.q.to_ranks], by_rank)
    return parts


@pytest.mark.parametrize("seed", range(16))
def test_plans_from_intervals_are_those_of_the_search(seed):
    draw = random.Random(seed)
    ranks, length = draw.choice((2, 3, 8)), 128 * draw.randrange(30, 60) - draw.choice((0, 0, 50))
    lengths = []
    while sum(lengths) < length:
        lengths.append(draw.choice((1, 40, 300, 128, 1000)))
    lengths[-1] -= sum(lengths) - length
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    masks = (
        hw.causal(), hw.causal() & hw.document(ids), hw.document(ids[None]),
        hw.causal() & hw.document(ids) & hw.sliding_window(200), hw.chunked(500) & hw.causal(),
        lambda b, h, i, j: (i >= j) & ((i - j).abs() < 300) & (ids[i] == ids[j]),
        hw.causal() & hw.document(ids % 4), hw.causal() | hw.prefix(300),
    )  # fmt: skip
    mask, name = draw.choice(masks), draw.choice(("auto", "heads", "gather", "ulysses"))
    place = draw.randrange(ranks), ranks
    layout = draw.choice((
        lambda: Layout.zigzag(length, place), lambda: Layout.contiguous(length, place),
        lambda: Layout.of_lengths([n for n in lengths if n], place),
        lambda: Layout.balanced(length, place, mask, h=4),
    ))()  # fmt: skip
    with patch.object(quadtree, "_SMALL_GRID", 0):
        plan = plan_of(layout, mask, name)
        with patch.object(intervals, "interval_tiles", lambda *_: None):
            searched = plan_of(layout, mask, name)
    assert len(plan) == len(searched)
    for one, other in zip(plan, searched, strict=True):
        np.testing.assert_equal(one, other)
