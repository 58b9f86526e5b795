"""The compiled kernels, run on the CPU instruction by instruction: copies, barriers and products as
the hardware has them, with the layouts and registers that the compiler chose."""

import re
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from cases import BY_NAME, problem
from checks import compare, run
from emulator.launch import emulating
from headway import backends
from headway.backends import hopper
from headway.backends.hopper import plan

from .test_simulated import choose

# Each for a part of its own: tails, groups of heads, masks per head and of many runs, each way to add
# up a gradient, pieces of a width and each kernel that widths have.
CASES = (
    "lengths_127_301_causal", "heads_6_3_score", "mask_by_batch_sink", "long_checker_even",
    "score_bias_keys_masked", "width_100_100", "width_192_128", "width_256_256",
)  # fmt: skip
WAYS = {
    "lagged": ("mask_by_batch_sink", "heads_8_2"),
    "whole": ("mask_by_batch_sink", "width_100_100"),
}


@pytest.fixture(autouse=True)
def few_processors():
    with (
        mock.patch.object(backends, "_CHECKED", ()),
        mock.patch.object(plan, "processors", return_value=2),
    ):
        yield


def wrong(name: str) -> list[str]:
    case = BY_NAME[name]
    made = run(problem(case, torch.bfloat16), "hopper", True)
    return compare(case, torch.bfloat16, made, True)


@pytest.mark.parametrize("name", CASES)
def test_table(name):
    with emulating("sm_90", hopper) as ran:
        assert wrong(name) == []
    assert {"forward", "row_kernel"} < {*ran}


@pytest.mark.parametrize(("way", "name"), [(way, n) for way in WAYS for n in WAYS[way]])
def test_other_ways(way, name, monkeypatch):
    choose(monkeypatch, way)
    with emulating("sm_90", hopper):
        assert wrong(name) == []


BROKEN = {
    "fences": (r"^\s*fence\.proxy\.async\.shared::cta;\n", "behind no fence"),
    "waits": (r"^\s*@!complete bra.uni waitLoop;\n", "more arrive|wrong, in"),
    "arrivals": (r"^\s*@%p\d+ mbarrier\.arrive\.shared.*\n", "nobody gets any further"),
    "bytes that are told": (r"^\s*@%p\d+ mbarrier\.arrive\.expect.*\n", "nobody gets any further"),
    "waits for stores": (r"^\s*cp\.async\.bulk\.wait_group.*\n", "wrong, in"),
    "waits for products": (r"^\s*wgmma\.wait_group.*\n", "threads of a warp part|nobody waits"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_kernel_is_found(what):
    pattern, said = BROKEN[what]
    count = 0

    def without(ptx: str) -> str:
        nonlocal count
        ptx, found = re.subn(pattern, "", ptx, flags=re.M)
        count += found
        return ptx

    with emulating("sm_90", hopper, without), pytest.raises(AssertionError, match=said):
        assert wrong("lengths_127_301_causal") == []
    assert count
