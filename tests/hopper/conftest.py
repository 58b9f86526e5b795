"""A Triton that cannot compile the kernels has nothing to test here, but that it is refused."""

from importlib.util import find_spec
from pathlib import Path

from headway.backends import hopper

WHY_NOT = "no Triton" if find_spec("triton") is None else hopper.wrong_triton()
HERE = Path(__file__).parent
collect_ignore = [
    file.name for file in HERE.glob("test_*.py") if WHY_NOT and file.name != "test_availability.py"
]


def pytest_report_header() -> str:
    return f"Hopper's kernels: {WHY_NOT or 'compiled and simulated'}"
