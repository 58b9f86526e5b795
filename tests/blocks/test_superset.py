"""What may be visited whatever is in a mask's tensors: never too little, and what is known of it."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import headway as hw
from headway.blocks import superset_tiles
from headway.errors import CapturedIndexError
from headway.mods import lower_mod

from .dense import CPU, dense_mask, dense_state, tiles_state
from .test_random_masks import problems


def state_of(graph, captured, shape, tile, coords=hw.types.Coords()):
    tiles, b, h = superset_tiles(graph, captured, shape, tile, CPU, coords)
    grid = tuple(-(-n // t) for n, t in zip(shape[2:], tile, strict=True))
    by_row, by_col = tiles_state(tiles, b, h, grid)
    assert torch.equal(by_row, by_col)
    assert not (by_row == 2).any()
    return by_row.expand(*shape[:2], *grid)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(problems())
def test_every_tile_that_a_mask_keeps_pairs_of_is_visited(problem):
    graph, captured, shape, tile, coords = problem
    try:
        want = dense_state(dense_mask(graph, captured, shape, coords), tile)
    except CapturedIndexError:
        return
    assert not (want > state_of(graph, captured, shape, tile, coords) * 2).any()


LENGTHS, IDS = torch.tensor([3, 5]), torch.zeros(40, dtype=torch.int64)


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (hw.causal() & hw.padding(LENGTHS), hw.causal()),
        (
            hw.document(IDS) & ~~hw.causal() & hw.sliding_window(9),
            hw.causal() & hw.sliding_window(9),
        ),
        (~(~hw.causal() | hw.document(IDS)), hw.causal()),
        (~(hw.causal() & hw.document(IDS)) & ~hw.causal(), ~hw.causal()),
        (lambda b, h, i, j: (i >= j) & (i - j < LENGTHS[h]), hw.causal()),
        (lambda b, h, i, j: torch.where(LENGTHS[b] > 4, i >= j, i == j), hw.causal()),
        (hw.causal() | hw.padding(LENGTHS), None),
        (hw.padding(LENGTHS), None),
    ],
)
def test_the_part_that_depends_on_no_tensor_counts(mask, most):
    shape, tile = (2, 2, 40, 40), (8, 8)
    state = state_of(*lower_mod("mask", mask, torch.float32), shape, tile)
    if most is None:
        assert (state == 1).all()
    else:
        want = hw.block_mask(most, *shape, tile=tile).to_dense()
        assert torch.equal(state > 0, (want > 0).expand_as(state))
