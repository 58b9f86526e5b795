"""Everything but the inputs on which results of compiled kernels depend.

`first_use.py` keeps a passed self-test on disk under it, so that the test, 3 to 5 s of compiling,
runs once per GPU, driver, compiler and source version.
"""

from hashlib import sha256
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend
from triton.runtime import cache

from . import kernel_cache
from .triton_startup import wait_for_triton

_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGE = Path(__file__).parents[3]
_SOURCES = "backends", "blocks", "mods"


def proof_of(device: torch.device) -> tuple[Path, dict[str, str]] | None:
    """Return the folder of the kernels, and by name everything on which their results depend on a
    GPU. Return None if the version of the driver is unknown."""
    wait_for_triton()
    if not _DRIVER.exists():
        return None
    gpu = torch.cuda.get_device_properties(device)
    target = GPUTarget("cuda", 10 * gpu.major + gpu.minor, 32)
    return kernel_cache.folder(), {
        "card": f"{gpu.name}, {gpu.major}.{gpu.minor}, {gpu.multi_processor_count}",
        "driver": _DRIVER.read_text().strip(),
        "CUDA of PyTorch": str(torch.version.cuda),
        "Triton": sha256(cache.triton_key().encode()).hexdigest(),
        "assembler": make_backend(target).hash(),
        "options of Triton": repr(sorted(get_cache_invalidating_env_vars().items())),
        "sources": sources(),
    }


def sources() -> str:
    """Return a hash of the sources that decide which kernels are compiled and launched."""
    digest = sha256()
    for folder in _SOURCES:
        for file in sorted((_PACKAGE / folder).rglob("*.py")):
            digest.update(file.relative_to(_PACKAGE).as_posix().encode() + b"\0")
            digest.update(file.read_bytes())
    return digest.hexdigest()
