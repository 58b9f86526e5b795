"""Which work tiles are shared out (stream_k.py)."""

from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as some

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from headway.backends.hopper.config import FLAGS, FWD_TILE_SHAPES, first_fit
from headway.backends.hopper.fwd.stream_k import MIN_SAVED_BLOCKS, StreamKShares

Q_IN_REGISTERS = next(row for row in FWD_TILE_SHAPES if row.q_in_registers and row.consumers == 2)
MLA = first_fit(FWD_TILE_SHAPES, 192, 128)


@given(
    tiles=some.integers(1, 5000),
    blocks=some.integers(1, 2000),
    ctas=some.integers(1, 264),
    how=some.sampled_from(FWD_TILE_SHAPES),
)
def test_every_block_is_of_one_share(tiles, blocks, ctas, how):
    made = StreamKShares.of(tiles, blocks, ctas, how)
    shares = made.tickets - made.whole_tiles
    if not made.share_blocks:
        assert made == (tiles, tiles, 0, 0)
        return
    assert made.shared_blocks == (tiles - made.whole_tiles) * blocks
    assert (shares - 1) * made.share_blocks < made.shared_blocks <= shares * made.share_blocks
    assert made.share_blocks <= blocks  # so a share is of two work tiles at most
    assert shares <= ctas
    assert shares * how.consumers <= FLAGS
    assert blocks - made.share_blocks >= MIN_SAVED_BLOCKS


@pytest.mark.parametrize(
    ("how", "tiles", "blocks", "shared"),
    [
        (Q_IN_REGISTERS, 2048, 64, True),  # 2 x 16 heads of 8k, on an H200
        (Q_IN_REGISTERS, 2112, 64, False),  # whole waves
        (Q_IN_REGISTERS, 8, 512, True),  # 8 heads of 128 queries, 65,536 keys
        (Q_IN_REGISTERS, 1024, 8, False),  # 1k: too little to save
        (MLA, 2048, 64, False),  # saves less than it costs
        (MLA, 8, 512, True),
        (FWD_TILE_SHAPES[0], 2752, 64, False),
    ],
)
def test_where_it_pays(how, tiles, blocks, shared):
    assert (StreamKShares.of(tiles, blocks, 132, how).share_blocks > 0) == shared
