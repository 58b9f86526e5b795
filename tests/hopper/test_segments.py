"""Segments: which tile columns go together, and what a visit of a block of queries is."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import headway as hw
from headway.backends.gpu.runtime.call_plan import TileSchedule
from headway.backends.hopper.bwd.segment_table import FIRST, LAST, ROWS, VISIT, Segments

LENGTH = 1000
TILE = (128, 256)  # of queries and of keys
IDS = torch.arange(LENGTH)
EACH = torch.stack([IDS // 256, IDS // 400 * 2])
MASKS = {
    "causal": lambda b, h, i, j: i >= j,
    "packed": hw.causal() & hw.document(IDS // 256),
    "by_batch": hw.causal() & hw.document(EACH),
    "unaligned": hw.document(IDS // 300),
    "some": hw.document(torch.tensor([0, 1, 1, 2]).repeat_interleave(256)[:LENGTH]),
    "padded": hw.document(IDS // 256) & (lambda b, h, i, j: i < 700),
    "by_head": lambda b, h, i, j: (i // 256 == j // 256) & (i - j < 400 * h),
    "crossed": lambda b, h, i, j: (i // 256 + j // 256) == 3,
    "nothing": lambda b, h, i, j: i < 0,
}


def schedule_of(mask, b: int, h: int) -> TileSchedule:
    made = hw.block_mask(mask, b, h, LENGTH, LENGTH, tile=TILE)
    tiles, (b, h), columns = made.tiles, made.shape[:2], made.grid[1]
    runs = tiles.cols_full, tiles.cols_partial, tiles.col_order
    return TileSchedule(*runs, b, h, columns, TILE[1], TILE[0], 1)


@pytest.mark.parametrize("sub", [1, 2])
@pytest.mark.parametrize("name", MASKS)
def test_segments(name, sub):
    """Every block of queries is visited within one segment only, and as often and in the order that
    its kinds say; and no segment could be cut."""
    b, h = 2, 3
    schedule = schedule_of(MASKS[name], b, h)
    made = Segments(schedule, sub, b * h, LENGTH)
    work = made.work(torch.device("cpu"))
    kinds, per, blocks = torch.from_numpy(made.kinds), TILE[0] // ROWS, -(-LENGTH // ROWS)
    # What a work tile visits, as kernels do.
    live = schedule.full.dense(-(-LENGTH // TILE[0])) | schedule.partial.dense(
        -(-LENGTH // TILE[0])
    )
    live[:, 0] |= ~live.any(1)
    visits = live.repeat_interleave(per, 1)[:, :blocks].repeat_interleave(sub, 0)
    total, equal, span = work.items[:3].tolist()
    items = work.items[3:].view(-1, 3).tolist()
    assert total == equal * len(items) == made.total
    assert equal * schedule.b * schedule.h == b * h
    assert span == made.span == kinds.shape[1]
    of_head = schedule.tile_rows * sub
    owner: dict[tuple[int, int], int] = {}
    tiles_seen, sizes = [], []
    for n, (first, many, block) in enumerate(items):
        sizes.append(0)
        tiles_seen += range(first, first + many)
        assert first // of_head == (first + many - 1) // of_head
        count = visits[first : first + many].sum(0)
        so_far = torch.zeros_like(count)
        for tile in range(first, first + many):
            for at in visits[tile].nonzero().flatten().tolist():
                assert owner.setdefault((first // of_head, at), n) == n
                so_far[at] += 1
                kind = VISIT + FIRST * (so_far[at] == 1) + LAST * (so_far[at] == count[at])
                assert kinds[tile, at - block] == kind
                sizes[-1] += 1
            assert kinds[tile].count_nonzero() == visits[tile].sum()
        # It cannot be cut: some block is visited on both sides of every column.
        for cut in range(first + sub, first + many, sub):
            before, after = visits[first:cut], visits[cut : first + many]
            last = before.any(0).nonzero().max()
            assert after.any(0).nonzero().min() <= last
    assert sorted(tiles_seen) == list(range(len(visits)))
    for kind, bits in zip((FIRST, LAST), work.visit_bits.T, strict=True):
        assert torch.equal(bits[:, None] >> torch.arange(span) & 1, kinds // kind % 2)
    assert sizes == sorted(sizes, reverse=True)
    every = {(g, at) for g in range(schedule.b * schedule.h) for at in range(blocks)}
    assert work.everywhere == (set(owner) == every)


def test_without_a_mask_a_head_is_a_segment():
    schedule = TileSchedule(None, None, None, 1, 1, 4, 128, 64, 1)
    made = Segments(schedule, 1, 6, 500)
    work = made.work(torch.device("cpu"))
    assert work.items.tolist() == [6, 6, 8, 0, 4, 0]
    assert made.kinds.tolist() == [[VISIT + FIRST] * 8, *[[VISIT] * 8] * 2, [VISIT + LAST] * 8]
    assert work.visit_bits.tolist() == [[255, 0], [0, 0], [0, 0], [0, 255]]
    assert work.everywhere


@pytest.mark.parametrize(
    ("sizes", "heads", "balanced"),
    [([1] * 8, 1, True), ([1] * 9, 1, False), ([1], 64, True), ([9, 1, 1, 1], 1, False),
     ([2, *[1] * 7], 1, False), ([2, *[1] * 7], 16, True)],
)  # fmt: skip
def test_balance(sizes, heads, balanced):
    """On eight processors: no round that leaves many idle, and no segment that outlasts the rest."""
    columns = len(sizes)
    ends = torch.tensor([0, *sizes]).cumsum(0)
    runs = SimpleNamespace(
        full=(torch.arange(columns + 1), ends[:-1], torch.tensor(sizes)),
        partial=(torch.zeros(columns + 1, dtype=torch.long), ends[:0], ends[:0]),
        b=1, h=1, tile_rows=columns, step=64,
    )  # fmt: skip
    assert Segments(runs, 1, heads, 64 * int(ends[-1])).balanced(8, 1 / 8) == balanced
