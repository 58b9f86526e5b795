"""The kernels compile for compute capability 9.0 with no GPU there, and what they need.

In a process of its own: the compiler and Triton's interpreter do not live in one. The other widths
and kinds of calls are in `full.py`.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
HERE = Path(__file__).parent

# Matrix instructions are m64nNk16 for two consumers. Forward: Q k^T before the loops, in each of the
# two loops (full and partial tiles) with P v, and P v after. Backward: S before, five products in
# each loop. A few numbers of a CTA that are spilled once and read once cost nothing; none may be
# read in a loop that multiplies.
PINS = {
    ("forward", "128/128", "causal"): {"hgmma": 96, "shared": 197232, "spills": 80},
    ("backward", "128/128", "plain"): {"hgmma": 80, "shared": 214896, "spills": 64},
    ("backward", "256/256", "causal"): {
        "registers": 128,
        "hgmma": 136,
        "shared": 222812,
        "spills": 60,
    },
}


def report(direction: str, widths: str, *names: str) -> list[dict]:
    """What `aot.py` prints."""
    done = subprocess.run(
        [sys.executable, HERE / "aot.py", direction, widths, *names],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("direction", "widths", "name"), PINS)
def test_compiles(direction, widths, name):
    (made,) = report(direction, widths, name)
    pin = PINS[direction, widths, name]
    assert {k: made[k] for k in ("registers", "serialized", "loops")} == {
        "registers": pin.get("registers", 168), "serialized": 0, "loops": 0
    }  # fmt: skip
    assert (made["hgmma"], made["shared"]) == (pin["hgmma"], pin["shared"])
    assert made["spills"] <= pin["spills"]
