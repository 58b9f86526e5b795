"""The kernels themselves, on the CPU: Triton's interpreter runs them on small cases of the table."""

from importlib.util import find_spec

import pytest

from interpreted import interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

PARTS = 2  # the suite runs them side by side


@pytest.mark.parametrize("part", range(PARTS))
def test_table(part):
    assert interpreted("interpret_cases.py", part, PARTS) == {}


@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_written_after_a_capture_counts(part):
    assert interpreted("interpret_graphs.py", part, PARTS) == {}


@pytest.mark.parametrize("part", range(PARTS))
def test_tangents(part):
    """Of the table, of what moves, and of kernels with a fault, each of which is found."""
    assert interpreted("interpret_tangents.py", part, PARTS) == {}


def test_rows_of_ranks():
    assert interpreted("interpret_ranks.py") == {}


def test_deterministic_gradients_of_captured_tensors():
    assert interpreted("interpret_exact_sums.py") == {}


def test_ops_by_series():
    """Values and derivatives of the ops that kernels have no instruction for."""
    assert interpreted("interpret_ops.py") == {}
