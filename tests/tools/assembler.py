"""From a kernel's PTX to machine code, once: Triton stops at PTX, and `assembled` goes on as it would.
What it makes is in Triton's cache from then on."""

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
from triton.runtime.cache import get_cache_manager


@contextmanager
def up_to_ptx() -> Iterator[None]:
    """Inside, Triton compiles for NVIDIA as far as PTX. Its cache keeps that apart from whole kernels."""
    add_stages: Callable = CUDABackend.add_stages
    hash_of: Callable = CUDABackend.hash

    def without_assembler(self: Any, stages: dict, *args: Any) -> None:
        add_stages(self, stages, *args)
        stages["cubin"] = lambda ptx, metadata: b""

    with (
        mock.patch.object(CUDABackend, "add_stages", without_assembler),
        mock.patch.object(CUDABackend, "hash", lambda self: f"{hash_of(self)}-up-to-ptx"),
    ):
        yield


def assembled(compiled: Any) -> tuple[str, bytes]:
    """What ptxas says of a kernel, and its machine code. Raises RuntimeError with ptxas' words."""
    ptx = compiled.asm["ptx"]
    arch = re.search(r"\.target (\w+)", ptx)[1]  # type: ignore[index]
    tool = get_ptxas(int(re.search(r"\d+", arch)[0]))  # type: ignore[index]
    options = (getattr(compiled.metadata, "ptx_options", None) or "").split()
    known = "\n".join([tool.version, *options, ptx])
    cache = get_cache_manager(hashlib.sha256(known.encode()).hexdigest())
    if code := cache.get_file("kernel.cubin"):
        return Path(code).with_name("report.txt").read_text(), Path(code).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        done = subprocess.run(
            [tool.path, "-v", "-lineinfo", f"--gpu-name={arch}", *options, file,
             "-o", file.with_suffix(".cubin")],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        code = file.with_suffix(".cubin").read_bytes()
        cache.put(done.stderr, "report.txt", binary=False)
        cache.put(code, "kernel.cubin")
        return done.stderr, code
