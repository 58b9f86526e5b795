"""Deliberately wrong backends go through the check that the right ones pass; each must fail it.

The faults are those of published kernels and of every first draft (`faults.py`). Most leave the
forward right, or all but a few rows of one head.
"""

import pytest
import torch

import checks
from cases import BY_NAME
from checks import check
from headway import backends

from . import faults

FAULTS = [f for f in vars(faults).values() if isinstance(f, type) and getattr(f, "cases", "")]
PAIRS = [(fault, BY_NAME[name]) for fault in FAULTS for name in fault.cases.split()]
HALF = list({fault: (fault, case) for fault, case in PAIRS if "half" in case.tags}.values())
CASES = sorted({case.name for _, case in PAIRS})
NARROW = [
    (fault, BY_NAME[name])
    for fault in vars(faults).values()
    if isinstance(fault, type)
    for name in getattr(fault, "half", "").split()
]


def _ids(pairs):
    return [f"{fault.__name__}-{case}" for fault, case in pairs]


@pytest.fixture
def use(monkeypatch):
    """Register a backend as "wrong"."""
    return lambda backend: monkeypatch.setitem(backends._BACKENDS, "wrong", backend())


def _found_wrong(case, dtype) -> set[str]:
    with pytest.raises(AssertionError) as failure:
        check(case, "wrong", dtype)
    lines = [line.strip() for line in str(failure.value).splitlines()[1:]]
    found = {line.partition(":")[0].removeprefix("grad ") for line in lines}
    if any("changed its input" in line for line in lines):
        found.add("changed")
    if found - {"out", "lse", "max_logit", "q", "k", "v", "sink", "changed"}:
        found.add("captured")
    return found


@pytest.mark.parametrize(("fault", "case"), PAIRS, ids=_ids(PAIRS))
def test_fault_is_caught(fault, case, use):
    use(fault)
    found = _found_wrong(case, torch.float32)
    assert found >= set(fault.shows.split())
    assert not found & set(fault.hides.split())


@pytest.mark.parametrize(("fault", "case"), HALF, ids=_ids(HALF))
def test_fault_is_caught_in_bfloat16(fault, case, use):
    use(fault)
    assert _found_wrong(case, torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_the_same_cases_pass(case, use):
    use(faults.Right)
    check(BY_NAME[case], "wrong", torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize(("fault", "case"), NARROW, ids=_ids(NARROW))
def test_narrow_accumulators_are_caught(fault, case, dtype, use, monkeypatch):
    use(fault)
    found = _found_wrong(case, dtype)
    assert found >= set(fault.shows.split())
    assert not found & set(fault.hides.split())
    # With more allowed for the factors of products, still.
    monkeypatch.setattr(checks, "_TENSOR_CORES", ("wrong",))
    assert _found_wrong(case, dtype)


@pytest.mark.parametrize(("fault", "case"), NARROW, ids=_ids(NARROW))
def test_nothing_else_is_wrong_with_them(fault, case, use):
    use(fault)
    check(case, "wrong", torch.float32)
    use(faults.Right)
    check(case, "wrong", torch.bfloat16)
