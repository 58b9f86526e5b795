"""Which ranks are shared out (stream_k.py)."""

from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as some

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from headway.backends.hopper.config import FORWARD, first_fit
from headway.backends.hopper.fwd.stream_k import LEAST, MOST, Shares

HELD = next(row for row in FORWARD if row.q_in_registers and row.consumers == 2)
MLA = first_fit(FORWARD, 192, 128)


@given(
    ranks=some.integers(1, 5000),
    blocks=some.integers(1, 2000),
    ctas=some.integers(1, 264),
    how=some.sampled_from(FORWARD),
)
def test_every_block_is_of_one_share(ranks, blocks, ctas, how):
    made = Shares.of(ranks, blocks, ctas, how)
    shares = made.tickets - made.whole
    if not made.share:
        assert made == (ranks, ranks, 0, 0)
        return
    assert made.several == (ranks - made.whole) * blocks
    assert (shares - 1) * made.share < made.several <= shares * made.share
    assert made.share <= blocks  # so a share is of two ranks at most
    assert shares <= ctas
    assert shares * how.consumers <= MOST
    assert blocks - made.share >= LEAST


@pytest.mark.parametrize(
    ("how", "ranks", "blocks", "shared"),
    [
        (HELD, 2048, 64, True),  # 2 x 16 heads of 8k, on an H200
        (HELD, 2112, 64, False),  # whole rounds
        (HELD, 8, 512, True),  # 8 heads of 128 queries, 65,536 keys
        (HELD, 1024, 8, False),  # 1k: too little to save
        (MLA, 2048, 64, False),  # saves less than it costs
        (MLA, 8, 512, True),
        (FORWARD[0], 2752, 64, False),
    ],
)
def test_where_it_pays(how, ranks, blocks, shared):
    assert (Shares.of(ranks, blocks, 132, how).share > 0) == shared
