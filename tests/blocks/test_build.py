"""Building tiles: the masks people use, at every corner of shapes and positions; what is refused;
what is remembered."""

import math
import sys
import time

import pytest
import torch

import headway
from headway.blocks import build, cached_build, clear_block_cache, intervals, quadtree
from headway.errors import ArgumentError, CapturedIndexError, ModError
from headway.mods import lower_mod
from headway.mods.bounds.interval import split, why_elements
from headway.types import Captured, Coords

from .dense import CPU, check_build, dense_mask, dense_state, tiles_state


def lowered(mask) -> tuple:
    return lower_mod("mask", mask, torch.float32)


def check(mask, shape, tile=(16, 16), coords=Coords()):
    return check_build(*lowered(mask), shape, tile, coords)


def ids(length: int, mean: int = 20) -> torch.Tensor:
    """Packed documents."""
    return (torch.rand(length) < 1 / mean).cumsum(0)


def common_masks() -> dict:
    one, many = ids(300), torch.stack([ids(300) for _ in range(3)])
    windows = torch.tensor([3, 40, 300, 17])
    relative = torch.rand(4, 601) < 0.05
    layout = torch.rand(4, 40, 40) < 0.4
    return {
        "all": headway.causal() | ~headway.causal(),
        "none": headway.causal() & ~headway.causal(),
        "causal": headway.causal(),
        "causal, aligned at the end": headway.causal(37),
        "window": headway.causal() & headway.sliding_window(40),
        "prefix": headway.causal() | headway.prefix(33),
        "prefix by batch": headway.causal() | headway.prefix(torch.tensor([0, 100, 64])),
        "documents": headway.document(one),
        "causal documents by batch": headway.causal() & headway.document(many),
        "unsorted documents": headway.document(one[torch.randperm(300)]),
        "padding": headway.padding(torch.tensor([1, 64, 299])),
        "padding by key": headway.padding(torch.rand(3, 300) < 0.9),
        "global": headway.sliding_window(9) | headway.global_tokens(3),
        "windows by head": lambda b, h, i, j: (i - j).abs() < windows[h],
        "table of distances": lambda b, h, i, j: relative[h, i - j + 300],
        "layout of blocks": lambda b, h, i, j: layout[h, i // 8, j // 8],
        "strided": lambda b, h, i, j: ((i - j) % 7 == 0) & (j <= i),
        "circle": lambda b, h, i, j: (i - 100) * (i - 100) + (j - 80) * (j - 80) < 70 * 70,
        "a float": lambda b, h, i, j: torch.exp(-(i - j).abs() / 30.0) > 0.2,
        "bits": lambda b, h, i, j: ((i ^ j) & 33) == 0,
        "always": lambda b, h, i, j: True,
    }


@pytest.mark.parametrize("name", common_masks())
@pytest.mark.parametrize(
    ("lengths", "tile"),
    [((300, 300), (16, 16)), ((300, 173), (32, 8)), ((1, 300), (16, 128)), ((129, 64), (64, 1))],
    ids=str,
)
def test_common_masks(name, lengths, tile):
    mask = common_masks()[name]
    if name == "padding by key":
        mask = headway.padding(mask.lengths[:, : lengths[1]])
    check(mask, (3, 4, *lengths), tile)


@pytest.mark.parametrize("name", ["causal documents by batch", "windows by head", "strided"])
def test_positions_of_a_part(name):
    mask = common_masks()[name]
    check(mask, (2, 3, 70, 100), coords=Coords(1, 1, 130, 90))
    q_pos, kv_pos = torch.randperm(300)[:70].sort().values, torch.randperm(300)[:100]
    check(mask, (2, 3, 70, 100), coords=Coords(1, 0, 0, 0, q_pos, kv_pos))
    q_pos = torch.stack([q_pos, q_pos.flip(0)]).to(torch.int32)
    check(mask, (2, 3, 70, 100), coords=Coords(0, 1, 0, 25, q_pos))


@pytest.mark.parametrize("shape", [(0, 1, 8, 8), (1, 1, 0, 8), (2, 0, 8, 0), (1, 2, 0, 0)], ids=str)
def test_nothing_to_build(shape):
    few = torch.zeros(4, dtype=torch.int64)
    graph, captured = lowered(lambda b, h, i, j: (i >= j) & (b + h >= few[i]))
    tiles, b, h = build(graph, captured, shape, (16, 16), CPU)
    assert (b, h) == shape[:2]
    assert tiles.rows_full.rows == b * h * math.ceil(shape[2] / 16)
    assert tiles.cols_partial.rows == b * h * math.ceil(shape[3] / 16)
    assert sum(len(t) for t in (*tiles.rows_full[1:], *tiles.rows_partial[1:])) == 0


@pytest.mark.parametrize("n", [2**31, 2**62 - 40, 2**62, 2**63 - 100, -(2**63) + 50])
def test_whole_numbers_that_wrap(n):
    """What is known not to leave int64 is not looked at; what may is, and wraps as in torch."""
    few = torch.tensor([n, 3 - n])
    for mask in (
        headway.causal(n),
        lambda b, h, i, j: i + n <= j + n - 20,
        lambda b, h, i, j: (i - j) * n < n,
        lambda b, h, i, j: (i - j) * (j + 1) * (i - n) < n,
        lambda b, h, i, j: (few[h] + i) - j < few[h],
        lambda b, h, i, j: (i - j).to(torch.int8) * 5 < 17,
    ):
        check(mask, (1, 2, 200, 170))
        check(mask, (1, 2, 40, 30), coords=Coords(q=2**62, kv=2**62 + 5))


def test_what_a_mask_ignores_is_built_once():
    for mask, want in (
        (headway.causal(), (1, 1)),
        (headway.document(torch.zeros(2, 64, dtype=torch.int64)), (2, 1)),
        (lambda b, h, i, j: i - j < h, (1, 3)),
    ):
        graph, captured = lowered(mask)
        tiles, *groups = build(graph, captured, (2, 3, 64, 64), (16, 16), CPU)
        assert tuple(groups) == want
        assert tiles.rows_full.rows == math.prod(want) * 4


def test_small_chunks_change_nothing(monkeypatch):
    """Depth first in chunks of 33 boxes, tiles cut into bands of 7 pairs, ids read 20 at a time."""
    monkeypatch.setattr(quadtree, "_BOXES", 33)
    monkeypatch.setattr(quadtree, "_PAIRS", 7)
    monkeypatch.setattr("headway.blocks.axis_bounds._POSITIONS", 20)
    for name in ("causal documents by batch", "bits", "layout of blocks", "table of distances"):
        check(common_masks()[name], (2, 2, 130, 90), (16, 8))


def test_large_tables_are_read_in_blocks(monkeypatch):
    monkeypatch.setattr("headway.mods.bounds.table_bounds._MAX_BYTES", 300)
    for name in ("layout of blocks", "table of distances"):
        check(common_masks()[name], (1, 2, 130, 90), (8, 8))


@pytest.mark.parametrize("length", [1 << 17, 1 << 20])
def test_work_and_memory_follow_the_edge(length, monkeypatch):
    """The boxes looked at grow with the length, not with its square; so does the result."""
    seen = 0
    bounds = quadtree.BoxBounds.__call__

    def counted(self, level, g, r, c):
        nonlocal seen
        seen += len(g)
        return bounds(self, level, g, r, c)

    monkeypatch.setattr(quadtree.BoxBounds, "__call__", counted)
    mask = headway.causal() & headway.sliding_window(4096) | headway.prefix(200)
    graph, captured = lowered(mask)
    tiles, _, _ = build(graph, captured, (1, 1, length, length), (128, 128), CPU)
    rows = length // 128
    assert seen < 40 * rows
    assert sum(t.numel() for t in tiles.flatten()) < 24 * rows
    band = 31 * (rows - 31) + 31 * 30 // 2  # full tiles inside the window
    assert int(tiles.rows_full.count.sum()) == band + (rows - 32) + 1


@pytest.fixture
def seen(monkeypatch):
    """How many pairs each evaluation looked at."""
    sizes = []
    real = quadtree.mask_at

    def counted(graph, captured, at):
        sizes.append(math.prod(torch.broadcast_shapes(*(x.shape for x in at.values.values()))))
        return real(graph, captured, at)

    monkeypatch.setattr(quadtree, "mask_at", counted)
    return sizes


@pytest.mark.parametrize("whole", [0, quadtree._SMALL_GRID], ids=["coarse to fine", "at once"])
def test_one_kept_and_one_dropped_pair_prove_a_tile_partial(seen, monkeypatch, whole):
    """Four corners of each partial tile; no pair of a tile that bounds decide."""
    monkeypatch.setattr(quadtree, "_SMALL_GRID", whole)
    monkeypatch.setattr(intervals, "interval_tiles", lambda *_: None)
    corners, cornered = quadtree.BoxBounds.corners, []
    monkeypatch.setattr(
        quadtree.BoxBounds,
        "corners",
        lambda self, g, r, c: (cornered.append(len(g)), corners(self, g, r, c))[1],
    )
    graph, captured = lowered(headway.causal() & headway.document(torch.arange(8192) // 2048))
    tiles, *_ = build(graph, captured, (1, 1, 8192, 8192), (128, 128), CPU)
    assert int(tiles.rows_partial.count.sum()) == 64
    assert sum(cornered) == 64
    assert not seen


def test_pairs_are_looked_at_in_bounded_chunks(seen):
    """16 million pairs that no bounds decide, in two tiles larger than a chunk."""
    odd = lambda b, h, i, j: ((i ^ j) & 0) == 0
    graph, captured = lowered(odd)
    tiles, *_ = build(graph, captured, (1, 1, 2048, 8192), (2048, 4096), CPU)
    assert tiles.rows_full.count.tolist() == [2]
    assert sum(seen) >= 2048 * 8192
    assert max(seen) <= quadtree._PAIRS


def test_equal_to_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask

    packed = ids(1000, 100)
    mask = headway.causal() & headway.document(packed)
    theirs = create_block_mask(
        lambda b, h, i, j: (j <= i) & (packed[i] == packed[j]), 1, 1, 1000, 1000, "cpu"
    )
    tiles, *_ = build(*lowered(mask), (1, 1, 1000, 1000), (128, 128), CPU)
    state = tiles_state(tiles, 1, 1, (8, 8))[0][0, 0]
    assert torch.equal(theirs.to_dense()[0, 0] > 0, state > 0)
    # Theirs calls a tile full only if the whole of it lies inside the lengths.
    for row in range(7):
        n = int(theirs.full_kv_num_blocks[0, 0, row])
        full = theirs.full_kv_indices[0, 0, row, :n]
        assert full.sort().values.tolist() == (state[row, :7] == 2).nonzero().flatten().tolist()


@pytest.mark.skipif(not hasattr(time, "thread_time"), reason="no clock for one thread")
@pytest.mark.parametrize("length", [1 << 14, 1 << 17])
def test_a_build_wakes_no_other_thread(length):
    """Its steps are short; on a busy machine each would wait for a second core."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        packed = headway.document(torch.arange(length) // 2000)  # this may wake them
        mask = headway.causal() & packed | headway.prefix(1000)
        build(*lowered(mask), (1, 1, length, length), (128, 128), CPU)
        time.sleep(0.05)  # what was awake goes to sleep
        process, thread = time.process_time(), time.thread_time()
        for _ in range(3):
            build(*lowered(mask), (1, 1, length, length), (128, 128), CPU)
        alone = time.thread_time() - thread
        assert time.process_time() - process < 1.25 * alone + 1e-3
    finally:
        torch.set_num_threads(before)


def test_counts_and_indices_are_those_of_flex_attention():
    """Of full and partial tiles, per row and per column."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask = headway.causal() & headway.sliding_window(300) & headway.document(ids(896, 200))
    theirs = create_block_mask(mask, None, None, 896, 896, "cpu", BLOCK_SIZE=128)
    ours = headway.block_mask(mask, 1, 1, 896, 896).tiles
    for runs, name in (
        (ours.rows_partial, "kv"), (ours.rows_full, "full_kv"),
        (ours.cols_partial, "q"), (ours.cols_full, "full_q"),
    ):  # fmt: skip
        counts, indices = (
            getattr(theirs, f"{name}_{what}")[0, 0] for what in ("num_blocks", "indices")
        )
        assert torch.equal(runs.per_row(), counts.long())
        listed = [row[:n].sort().values for row, n in zip(indices, counts.tolist(), strict=True)]
        assert torch.equal(runs.tiles(), torch.cat(listed).int())


# -- captured tensors out of range -----------------------------------------------------------------


@pytest.mark.parametrize("short", [1, 17, 129])
def test_ids_shorter_than_the_length(short):
    mask = headway.causal() & headway.document(torch.zeros(300 - short, dtype=torch.int64))
    with pytest.raises(CapturedIndexError, match=rf"shape \({300 - short},\).*\n.*ids\[q_idx\]"):
        check(mask, (1, 1, 300, 300))


def test_out_of_range_where_nothing_is_kept_is_legal():
    table = torch.rand(200) < 0.5  # negative distances do not exist; j > i would leave it
    few = torch.zeros(100, dtype=torch.int64)
    empty = torch.zeros(0, dtype=torch.bool)
    for mask in (
        lambda b, h, i, j: (j <= i) & table[i - j],
        lambda b, h, i, j: (j <= i) & table[199 - i + j],
        lambda b, h, i, j: (j < 50) & (few[i] == few[j]) & (i < 100),
        lambda b, h, i, j: (j < 50) & (i < 0) & empty[i],
    ):
        check(mask, (1, 1, 200, 200))
    with pytest.raises(CapturedIndexError, match=r"index 200 of dimension 0.*\(200,\)"):
        check(
            lambda b, h, i, j: (j <= i + 1) & table[i - j] | (j == 0) & table[i + 1],
            (1, 1, 200, 200),
        )
    with pytest.raises(CapturedIndexError):
        check(lambda b, h, i, j: ~empty[i], (1, 1, 20, 20))


def test_the_kept_pair_that_reads_past_the_end_may_be_one_in_a_tile():
    table = torch.ones(511, dtype=torch.bool)
    for keep in (True, False):
        mask = lambda b, h, i, j: table[i + j + 1] & ((i + j < 510) | keep)  # noqa: B023
        if keep:
            with pytest.raises(CapturedIndexError, match="index 511"):
                check(mask, (1, 1, 256, 256), (256, 256))
        else:
            check(mask, (1, 1, 256, 256), (256, 256))


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "tile", "message"),
    [
        ((1, 1, -1, 8), (16, 16), "q_len=-1 must be 0 or more"),
        ((1, 1, 8, -3), (16, 16), "kv_len=-3"),
        ((-1, 1, 8, 8), (16, 16), "b=-1"),
        ((1, 1, 8, 8), (0, 16), r"tile=\(0, 16\)"),
        ((1, 1, 8, 8), (16, -4), r"tile=\(16, -4\)"),
        ((1, 1, 2**35, 8), (1, 1), "int32 counts; use larger tiles"),
    ],
)
def test_impossible_shapes_are_named(shape, tile, message):
    with pytest.raises(ArgumentError, match=message):
        build(*lowered(headway.causal()), shape, tile, CPU)


def test_a_device_without_room_is_named(monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(quadtree.Search, "run", full)
    with pytest.raises(ArgumentError, match=r"device='cpu' has no room .*(?s:.)*2.00 GiB"):
        build(*lowered(headway.causal()), (1, 1, 64, 64), (16, 16), CPU)


def test_a_device_that_cannot_hold_one_is_named():
    for device in ["abacus", "meta", 1.5] + ["cuda"] * (not torch.cuda.is_available()):
        with pytest.raises(ArgumentError, match=f"device={device!r}"):
            headway.block_mask(headway.causal(), 1, 1, 64, 64, device=device)


def test_a_mask_that_is_not_boolean_is_refused():
    with pytest.raises(ModError, match="return a boolean"):
        headway.block_mask(lambda b, h, i, j: i - j, 1, 1, 64, 64)


# -- what fell back, and why -----------------------------------------------------------------------


def test_the_op_without_a_rule_is_named():
    assert why_elements(lowered(headway.causal() & headway.document(ids(50)))[0]) == []
    assert why_elements(lowered(lambda b, h, i, j: (i ^ 5) > (j << 2))[0]) == []  # of one position
    graph, _ = lowered(lambda b, h, i, j: ((i - j) ^ 3) < 5)
    (reason,) = why_elements(graph)
    assert reason.startswith("xor of i64 in `")
    assert "((i - j) ^ 3) < 5" in reason


def test_explain_names_the_op_that_fell_back():
    """And the result is right: `check` holds it to the definition."""
    q = torch.randn(1, 2, 100, 8)
    odd = lambda b, h, i, j: ((i - j) ^ 3) < 5
    check(odd, (1, 2, 100, 100))
    for mask in (odd, headway.block_mask(odd, 1, 1, 100, 100)):
        found = headway.explain(q, q, q, mask=mask)
        assert found.elements[0].startswith("xor of i64 in `odd = lambda b, h, i, j:")
        assert "pair by pair: xor of i64 in `odd" in str(found)
    assert headway.explain(q, q, q, mask=headway.causal()).elements == []
    assert "pair by pair" not in str(headway.explain(q, q, q))


def test_only_ops_on_both_positions_are_mixed():
    graph, _ = lowered(lambda b, h, i, j: (i * 2 + h > j // 3) & (b > 0) & (i > 7))
    cut = split(graph)
    # And those whose bounds are as good as numbers: `i > 7`.
    assert [graph.nodes[n].op for n in cut.mixed] == ["gt", "and", "gt", "and"]
    assert len(cut.head_values) == len(cut.cols) == 1
    assert len(cut.rows) == 2


# -- cache -----------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """How often tiles were really built."""
    clear_block_cache()
    count = []
    module = sys.modules["headway.blocks.build"]  # its name is the function's too
    real = module.build
    monkeypatch.setattr(module, "build", lambda *args: (count.append(1), real(*args))[1])
    yield count
    clear_block_cache()


def cached(mask, shape=(2, 2, 64, 64), coords=Coords()):
    graph, captured = lowered(mask)
    tiles, b, h = cached_build(graph, captured, shape, (16, 16), CPU, coords)
    want = dense_state(dense_mask(graph, captured, shape, coords), (16, 16))
    assert torch.equal(tiles_state(tiles, b, h, (4, 4))[0].expand(want.shape), want)
    return tiles


def test_the_same_mask_is_built_once(calls):
    packed = ids(64)
    first = cached(headway.document(packed) & headway.causal())
    assert cached(headway.document(packed) & headway.causal()) is first
    assert len(calls) == 1
    cached(headway.document(packed.clone()) & headway.causal())
    cached(headway.document(packed) & headway.causal(1))
    cached(headway.document(packed) & headway.causal(), coords=Coords(kv=1))
    assert len(calls) == 4
    # It looks at no batch and at no head.
    assert cached(headway.document(packed) & headway.causal(), coords=Coords(b=1, h=1)) is first
    assert len(calls) == 4


def test_calls_and_block_masks_share_what_is_remembered(calls):
    """However often a mask is given, and wherever: attention, explain, block_mask."""
    packed, q = ids(300), torch.randn(1, 2, 300, 8)
    mask = lambda: headway.causal() & headway.document(packed)
    for _ in range(2):
        headway.attention(q, q, q, mask=mask())
        headway.explain(q, q, q, mask=mask())
    built = len(calls)
    assert built <= 2  # tiles of the backend, and of explain
    first = headway.block_mask(mask(), 1, 1, 300, 300)
    assert headway.block_mask(mask(), 1, 1, 300, 300).tiles is first.tiles
    assert len(calls) <= built + 1
    packed[200:] += 1
    assert headway.block_mask(mask(), 1, 1, 300, 300).tiles is not first.tiles
    other = headway.block_mask(mask(), 1, 1, 300, 300, tile=(64, 128))
    assert other.tiles.rows_full.rows == 5


def test_a_written_tensor_is_noticed(calls):
    packed = ids(64)
    cached(headway.document(packed))
    packed[20:] += 1
    cached(headway.document(packed))
    positions = torch.arange(64)
    cached(headway.causal(), coords=Coords(q_pos=positions))
    positions.mul_(2)
    cached(headway.causal(), coords=Coords(q_pos=positions))
    assert len(calls) == 4


@pytest.mark.parametrize("alias", [lambda t: t.data, lambda t: t.numpy()], ids=["data", "numpy"])
def test_a_write_behind_the_counter_needs_a_clear(calls, alias):
    packed = ids(64)
    first = cached(headway.document(packed))
    alias(packed)[:] = 0
    graph, captured = lowered(headway.document(packed))
    assert cached_build(graph, captured, (2, 2, 64, 64), (16, 16), CPU) is not None
    assert cached_build(graph, captured, (2, 2, 64, 64), (16, 16), CPU)[0] is first  # as documented
    headway.clear_block_cache()
    assert cached(headway.document(packed)) is not first


def test_a_dead_tensor_is_not_mistaken_for_a_new_one(calls):
    for n in range(20):  # new tensors are likely to be given the same address
        packed = torch.zeros(64, dtype=torch.int64)
        packed[n:] = 1
        cached(headway.document(packed))
    assert len(calls) == 20


def test_inference_mode_remembers_what_has_a_counter(calls):
    outside = ids(64)
    with torch.inference_mode():
        packed = ids(64)
        cached(headway.document(packed))
        packed[10:] += 1  # no counter tells of it
        cached(headway.document(packed))
        assert len(calls) == 2
        tiles = cached(headway.causal())
        cached(headway.document(outside))
        assert len(calls) == 4
        cached(headway.causal())
        cached(headway.document(outside))
        assert len(calls) == 4
        outside[:7] -= 1  # as good as outside: a tensor keeps its counter here
        cached(headway.document(outside))
        assert len(calls) == 5
    assert not any(t.is_inference() for t in tiles.flatten())
    cached(headway.causal())
    cached(headway.document(outside))
    assert len(calls) == 5


def test_numbers_that_compare_equal_are_told_apart(calls):
    graph, _ = lowered(lambda b, h, i, j: (i - j).abs() < 3)
    for zero in (0.0, -0.0):
        captured = Captured([], [], [zero])
        cached_build(graph, captured, (1, 1, 64, 64), (16, 16), CPU)
    assert len(calls) == 2


def test_positions_of_queries_and_of_keys_are_told_apart(calls):
    positions = torch.arange(64).flip(0)
    for coords in (Coords(q_pos=positions), Coords(kv_pos=positions)):
        cached(headway.causal() & headway.sliding_window(9), coords=coords)
    assert len(calls) == 2
