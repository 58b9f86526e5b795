"""Launches through NVIDIA's driver itself pass what Triton's launcher would."""

import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from headway.backends import hopper

TOOLS = Path(__file__).parents[1] / "tools"
COMPILER = shutil.which("gcc")

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if COMPILER is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
    pytest.skip("no C compiler, which Triton's launcher needs", allow_module_level=True)


def test_every_parameter_is_what_tritons_launcher_passes_byte_for_byte(tmp_path):
    from triton.backends.nvidia import driver

    folder = Path(driver.__file__).parent / "include"
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{folder}",
         "-o", tmp_path / "libcuda.so.1", TOOLS / "fake_cuda.c"], check=True,
    )  # fmt: skip
    ran = subprocess.run(
        [sys.executable, TOOLS / "compare_launches.py", tmp_path], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    there = [] if hopper.wrong_triton() else ["preprocess_kernel", "backward", "postprocess_dq"]
    for name in ("forward", "backward_q", "backward_kv", *there):
        assert f"'{name}'" in ran.stdout, ran.stdout
