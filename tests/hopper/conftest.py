"""A Triton that cannot compile the kernels has nothing to test here, but that it is refused."""

from importlib.util import find_spec

from headway.backends import hopper

WHY_NOT = "no Triton" if find_spec("triton") is None else hopper.wrong_triton()
collect_ignore_glob = ["test_[!w]*.py"] if WHY_NOT else []


def pytest_report_header() -> str:
    return f"Hopper's kernels: {WHY_NOT or 'compiled and simulated'}"
