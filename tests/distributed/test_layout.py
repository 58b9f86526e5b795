"""Layouts as values: what they hold, how even they are, how they travel."""

import pickle
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

import headway as hw
from headway.distributed import Layout
from headway.distributed.exchange.global_mask import coords_of
from headway.errors import ArgumentError
from processes import run_ranks


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("length", [0, 1, 3, 61, 256])
def test_every_token_once(length, ranks):
    mask = hw.causal() & hw.sliding_window(7)
    makers = (
        Layout.contiguous,
        Layout.zigzag,
        lambda n, mesh: Layout.of_lengths([n // 3, n - n // 3], mesh, tile=8),
        lambda n, mesh: Layout.balanced(n, mesh, mask, tile=8),
    )
    for make in makers:
        layouts = [make(length, (r, ranks)) for r in range(ranks)]
        assert all(layout == layouts[0] and hash(layout) == hash(layouts[0]) for layout in layouts)
        positions = torch.cat([layout.positions for layout in layouts])
        assert torch.equal(positions.sort().values, torch.arange(length))
        assert layouts[0].sizes == tuple(layout.local for layout in layouts)
        again = pickle.loads(pickle.dumps(layouts[-1].using("ulysses")))
        assert again == layouts[-1]
        assert (again.rank, again.plan) == (ranks - 1, "ulysses")
        assert torch.equal(again.positions, layouts[-1].positions)


def test_pieces_cover_the_sequence_once():
    for pieces in ([(0, 0, 5)], [(0, 0, 5), (1, 4, 10)], [(0, 1, 10)], [(0, 0, 11)]):
        with pytest.raises(ArgumentError, match="cover positions 0 to 10 once"):
            Layout(10, pieces, (0, 2))
    with pytest.raises(ArgumentError, match="ranks"):
        Layout(10, [(2, 0, 10)], (0, 2))
    assert Layout(10, [(1, 5, 10), (0, 0, 3), (0, 3, 5)], (0, 2)).pieces == ((0, 0, 5), (1, 5, 10))


def test_errors_say_the_way_out():
    for mesh, word in (((2, 2), "rank, ranks"), ("cp", "DeviceMesh")):
        with pytest.raises(ArgumentError, match=word):
            Layout.contiguous(8, mesh)
    layout = Layout.contiguous(8, (0, 2))
    with pytest.raises(ArgumentError, match="must be one of"):
        layout.using("rings")
    with pytest.raises(ArgumentError, match=r'was removed.*using\("heads"\)'):
        layout.using("ring")
    with pytest.raises(ArgumentError, match="dim="):
        layout.shard(torch.zeros(8, 3))
    with pytest.raises(ArgumentError, match="for 2 ranks"):
        layout.on((0, 3))
    with pytest.raises(ArgumentError, match="add up to"):
        Layout.of_lengths([[3, 4], [3, 3]], (0, 2))
    q = torch.randn(1, 1, 4, 8)
    for given, word in ((layout, "no mesh yet"), ("zigzag", "pass a layout, as from headway")):
        with pytest.raises(ArgumentError, match=word):
            hw.attention(q, q, q, layout=given)


def work(layout, kept):
    """Kept pairs of every rank, over the mean."""
    rows = kept.sum(1).double()
    load = torch.stack([
        rows[torch.cat([torch.arange(a, b) for r, a, b in layout.pieces if r == rank])].sum()
        for rank in range(layout.ranks)
    ])  # fmt: skip
    return (load.max() / load.mean()).item()


def test_balance():
    length, ranks = 4096, 4
    lengths = [1800, 40, 900, 256, 700, 300, 100]
    i, j = torch.arange(length)[:, None], torch.arange(length)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    kept = (i >= j) & (documents[:, None] == documents)
    mask = hw.causal() & hw.document.from_lengths(lengths)
    assert work(Layout.contiguous(length, (0, ranks)), kept) > 1.7
    assert work(Layout.of_lengths(lengths, (0, ranks), tile=16), kept) <= 1.05
    assert work(Layout.balanced(length, (0, ranks), mask, tile=16), kept) <= 1.06
    assert work(Layout.zigzag(length, (0, ranks)), i >= j) <= 1.001
    assert work(Layout.balanced(length, (0, ranks), hw.causal(), tile=16), i >= j) <= 1.04
    # Several masks: their work together. A block mask knows its own.
    both = Layout.balanced(length, (0, ranks), [hw.causal(), mask], tile=32)
    assert work(both, kept.int() + (i >= j)) <= 1.06
    block = hw.block_mask(mask, 1, 1, length, length, tile=32)
    assert Layout.balanced(length, (0, ranks), block, tile=32) == Layout.balanced(
        length, (0, ranks), mask, tile=32
    )
    # Documents that end inside of tiles are cut at tiles, where the sequence is long.
    draw = random.Random(0)
    for _ in range(20):
        documents = [draw.randrange(1, 9000) for _ in range(draw.choice((30, 200)))]
        many = draw.choice((2, 4, 8))
        packed = Layout.of_lengths(documents, (0, many))
        assert not any(start % 128 for _, start, _ in packed.pieces)
        assert max(packed.sizes) <= 1.06 * sum(documents) / many
    # Whole documents where they fit: nothing is cut, so nothing has to be sent.
    even = Layout.of_lengths([1024] * 4, (0, ranks))
    assert even == Layout.contiguous(length, (0, ranks))


def tensors(world: int, rank: int) -> None:
    group = dist.group.WORLD
    for length in (0, 1, 13):
        g = torch.Generator().manual_seed(length)
        x, w = (torch.randn(2, length, 3, generator=g) for _ in range(2))
        for layout in (Layout.contiguous(length, group), Layout.zigzag(length, group)):
            local = layout.shard(x).requires_grad_()
            whole = layout.unshard(local)
            assert torch.equal(whole, x)
            (grad,) = torch.autograd.grad((whole * w).sum(), local)
            torch.testing.assert_close(grad, layout.shard(w) * world)
            for by in (1, -2, 40):
                moved = torch.full_like(x, -7.0)
                back = torch.zeros_like(w)
                for p in range(length):
                    if 0 <= p + by < length:
                        moved[:, p], back[:, p + by] = x[:, p + by], w[:, p]
                found = layout.shift(local, by, fill=-7)
                assert torch.equal(found, layout.shard(moved))
                (grad,) = torch.autograd.grad((found * layout.shard(w)).sum(), local)
                assert torch.equal(grad, layout.shard(back))
    tokens = torch.arange(26).view(1, 26)
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        here = Layout.zigzag(26, group).shard(tokens.to(dtype))
        assert torch.equal(Layout.zigzag(26, group).unshard(here), tokens.to(dtype))


def test_tensors(tmp_path):
    run_ranks(2, (tensors,), tmp_path)


def test_explained():
    layout = Layout.zigzag(1000, (1, 4))
    q, k, v = (torch.randn(1, h, layout.local, 16) for h in (8, 2, 2))
    text = str(hw.explain(q, k, v, mask=hw.causal() & hw.sliding_window(100), layout=layout))
    assert "1,000 tokens over 4 ranks; rank 1 holds 250 in 2 pieces" in text
    assert ", the cheapest; the forward sends" in text
    assert "not ulysses: " in text
    named = hw.explain(q, k, v, layout=layout.using("gather"))
    assert any("plan: gather, as named" in line for line in named.over_ranks)
    assert hw.explain(q, k, v).over_ranks == []


@pytest.mark.parametrize("seed", range(20))
def test_positions_in_tiles(seed):
    """What kernels are promised of positions holds, wherever they read the first of 128 alone; and
    of pieces that are cut between tiles it is promised."""
    draw = np.random.default_rng(seed)
    unit = (1, 64, 128)[seed % 3]
    sides = []
    for _ in range(2):
        cuts = np.sort(draw.choice(40, 2 * draw.integers(1, 6), replace=False)) * unit
        sides.append(cuts.reshape(-1, 2))
    q, kv = sides
    at = coords_of((3, 5), q, kv, torch.device("cpu"))
    tables = at.positions(*((x[:, 1] - x[:, 0]).sum() for x in (q, kv)), torch.device("cpu"))
    for x, (found,) in zip(sides, tables, strict=True):
        assert found.tolist() == [n for a, b in x for n in range(a, b)]
        if at.straight_below:
            for part in found.split(128):
                assert (part - part[0] == torch.arange(len(part))).all()
            assert found.max() < at.straight_below
    read = at.q_pos is not None or at.kv_pos is not None
    assert at[:2] == (3, 5)
    assert not read or unit < 128 or at.straight_below > 0
