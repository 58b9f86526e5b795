"""The kernels on a card of compute capability 9.0, in processes of their own: a hang is killed and
is a failure like another. `tools/bring_up.py` runs the same by hand."""

from importlib.util import find_spec

import pytest
import torch

if (
    find_spec("triton") is None
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
):
    pytest.skip("needs Triton and a Hopper GPU", allow_module_level=True)

from cases import CASES
from tools import bring_up

HALF = [case.name for case in CASES if "half" in case.tags]
PARTS = 8


@pytest.mark.timeout(1800)  # a dozen checks, each of which compiles for 10 to 20 s beside others
@pytest.mark.parametrize("part", range(4))
def test_features(part):
    lines = bring_up.watched("check", list(bring_up.CHECKS)[part::4], 60)
    assert [line for line in lines if not line.rstrip().endswith(" ok")] == []


@pytest.mark.parametrize("part", range(PARTS))
def test_table(part):
    lines = bring_up.watched("table", HALF[part::PARTS], 60)
    assert [line for line in lines if not line.rstrip().endswith((" ok", " refused"))] == []


def test_many_calls_have_the_same_bits():
    lines = bring_up.watched("again", list(bring_up.AGAIN), 60)
    assert [line for line in lines if not line.rstrip().endswith(" ok")] == []
