"""What `make test` leaves out of the tables of kernels takes no code that it does not take as well.

Code is known by what kernels are compiled for and, in the simulator, by the steps from one line of
a kernel to another (`tools/launch_features.py`).
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

TESTS = Path(__file__).parents[1]
TABLES = [
    "hopper/test_simulated.py", "hopper/test_emulated.py",
    "hopper/test_graphs.py", "hopper/test_compile.py", "triton/test_emulated.py",
]  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_the_cases_that_stay_take_all_code(table, tmp_path):
    file = tmp_path / "features"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "",
         "-p", "tools.launch_features", "--features", file, TESTS / table],
        capture_output=True, text=True, cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    tests = json.loads(file.read_text())
    kept = {x for test in tests.values() if not test["long"] for x in test["features"]}
    assert kept
    lost = {
        name: sorted({*test["features"]} - kept)
        for name, test in tests.items()
        if {*test["features"]} - kept
    }
    assert lost == {}
