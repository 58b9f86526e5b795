"""In which order CTAs take the tile columns of documents."""

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import headway as hw
from headway.backends.gpu.runtime.call_plan import TileSchedule
from headway.backends.hopper.bwd.document_order import by_documents

from .test_segments import LENGTH, MASKS, TILE, schedule_of


@pytest.mark.parametrize("name", MASKS)
def test_by_documents(name):
    """Every column once; those whose queries end together follow each other, longest first, and of
    these groups the one with the longest column comes first."""
    schedule = schedule_of(MASKS[name], 2, 3)
    order = by_documents(schedule, LENGTH).tolist()
    assert sorted(order) == list(range(schedule.tile_rows * schedule.b * schedule.h))
    live = schedule.full.dense(-(-LENGTH // TILE[0])) | schedule.partial.dense(
        -(-LENGTH // TILE[0])
    )
    work = live.sum(1)
    group = [
        (c // schedule.tile_rows, int(live[c].nonzero().max()) + 1 if work[c] else 0) for c in order
    ]
    first = [n for n in range(len(order)) if n == 0 or group[n] != group[n - 1]]
    assert len(first) == len(set(group))
    assert work[order][first].diff().le(0).all()
    for a, b in zip(first, [*first[1:], len(order)], strict=True):
        assert work[order[a:b]].diff().le(0).all()


def test_documents_of_one_size():
    """Of every head one after the other, and not the first columns of all of them."""
    ids = torch.arange(2048) // 512
    mask = hw.block_mask(hw.causal() & hw.document(ids), 1, 1, 2048, 2048, tile=(128, 128))
    tiles = mask.tiles
    schedule = TileSchedule(
        tiles.cols_full, tiles.cols_partial, tiles.col_order, 1, 1, 16, 128, 128, 1
    )
    assert by_documents(schedule, 2048).tolist() == list(range(16))
    assert tiles.col_order[:4].tolist() == [0, 4, 8, 12]
