"""The limit of kernels that hold T - lse in float32: rows whose every score is a large minimum.

What they do instead is what `explain` says and no more: other rows are right, and nothing is NaN.
"""

import math
from importlib.util import find_spec

import pytest
import torch

import headway as hw
from headway.backends import get
from headway.backends.gpu import MAX_LSE, limits
from headway.resolve import prepare
from interpreted import interpreted


@pytest.fixture(scope="module")
def found() -> dict[float, dict[str, float]]:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return {float(n): off for n, off in interpreted("interpret_far_rows.py").items()}


def test_other_rows_are_right(found):
    for off in found.values():
        assert max(off["out of others"], off["gradients of others"]) < 1e-5
        assert all(map(math.isfinite, off.values()))


def test_up_to_the_limit_errors_grow_with_the_scores(found):
    for least in (-1e4, -1e6):
        assert found[least]["gradients of far"] <= -least / MAX_LSE
        assert found[least]["out of far"] <= -least / MAX_LSE


def test_beyond_it_there_are_no_gradients(found):
    assert found[-1e9]["out of far"] < 1e-5
    assert found[-1e9]["largest gradient"] == 0
    (least,) = (n for n in found if n < -1e38)  # in units of log 2 it is -inf
    assert found[least]["largest out"] == found[least]["largest gradient"] == 0


def test_explain_names_it():
    q, k, v = torch.randn(3, 1, 1, 8, 8)
    for score, some in ((None, False), (hw.softcap(5.0), True)):
        spec, _ = prepare(q, k, v, score, None, backend="reference")
        for name in ("triton", "hopper"):
            assert get(name).limits is limits
            assert bool(get(name).limits(spec)) == some
        assert not get("cpu").limits(spec)
        assert not get("reference").limits(spec)
        assert not hw.explain(q, k, v, score).limits


def test_it_is_printed(monkeypatch):
    q, k, v = torch.randn(3, 1, 1, 8, 8)
    monkeypatch.setattr(get("cpu"), "limits", limits)
    assert not hw.explain(q, k, v).limits
    (limit,) = hw.explain(q, k, v, hw.softcap(5.0)).limits
    assert f"a limit: {limit}" in str(hw.explain(q, k, v, hw.softcap(5.0)))
