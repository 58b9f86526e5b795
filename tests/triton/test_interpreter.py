"""The kernels themselves, on the CPU: Triton's interpreter runs them on small cases of the table.

The interpreter is chosen when Triton is first imported, so these run in a process of their own.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
TOOLS = Path(__file__).parents[1] / "tools"

PARTS = 2  # the suite runs them side by side


def interpreted(script: str, *arguments: object) -> dict[str, str]:
    """What a script prints last."""
    done = subprocess.run(
        [sys.executable, TOOLS / script, *map(str, arguments)],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


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
