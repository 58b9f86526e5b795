"""A share of `make fuzz` in every run of the tests."""

import pytest

from long import long_unless

from .calls import fuzz
from .workers import case

pytestmark = pytest.mark.usefixtures("one_thread")
CASES = 300  # about 20 s, a third of them in `make test`


@pytest.mark.parametrize("part", long_unless((0, 2), range(6)))
def test_random_calls(part):
    seeds = range(part, CASES, 6)
    failed = [made for seed in seeds if (made := case(seed, "cpu", "cpu", 0)).fails]
    shown = [f"{fuzz(f.seed, 'cpu')}\n    {f.error or f.ratios}" for f in failed[:3]]
    assert not failed, "\n\n".join(
        [f"seeds {[f.seed for f in failed]} (python -m fuzz --seed N)", *shown]
    )


def test_a_seed_is_the_same_call_every_time():
    assert fuzz(7, "cpu") == fuzz(7, "cpu")
    assert str(fuzz(7, "triton", 40)) == str(fuzz(7, "triton", 40))


def test_structures_are_shared():
    """What kernels are compiled for is that of the structure; the rest is another's."""
    one, other = fuzz(3, "triton", 40), fuzz(43, "triton", 40)
    assert (one.score, one.mask, one.dtype, one.case.d) == (
        other.score,
        other.mask,
        other.dtype,
        other.case.d,
    )
    assert one.case != other.case
