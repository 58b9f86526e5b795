"""What depends on the inside of transformers, with the oldest version that is supported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.prefix) / "oldest"
PINNED = re.search(
    r"^transformers==(.+)$", (ROOT / "constraints-transformers.txt").read_text(), re.MULTILINE
)
PROGRAM = """
import sys, pytest, transformers
assert transformers.__version__ == sys.argv[1], transformers.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[2]]))
"""


def test_the_oldest_supported_transformers():
    assert PINNED is not None
    if not FOLDER.is_dir():
        pytest.skip("scripts/setup.sh puts the oldest transformers into .venv/oldest")
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    tests = Path(__file__).with_name("test_transformers_inside.py")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, PINNED[1], str(tests)],
        env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
