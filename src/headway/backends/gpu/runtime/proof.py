"""What the results of compiled kernels depend on, besides their inputs: card, driver, compilers,
sources."""

from hashlib import sha256
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend
from triton.runtime import cache

from . import kernel_cache
from .triton_startup import start_triton, wait_to_compile

_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGE = Path(__file__).parents[3]
_SOURCES = "backends", "blocks", "mods"


def proof_of(device: torch.device) -> tuple[Path, dict[str, str]] | None:
    """The folder of the kernels; and by name all on which it depends what kernels compute on a
    card. None where the version of the driver is not known."""
    start_triton()
    wait_to_compile()
    if not _DRIVER.exists():
        return None
    card = torch.cuda.get_device_properties(device)
    target = GPUTarget("cuda", 10 * card.major + card.minor, 32)
    return kernel_cache.folder(), {
        "card": f"{card.name}, {card.major}.{card.minor}, {card.multi_processor_count}",
        "driver": _DRIVER.read_text().strip(),
        "CUDA of PyTorch": str(torch.version.cuda),
        "Triton": sha256(cache.triton_key().encode()).hexdigest(),
        "assembler": make_backend(target).hash(),
        "options of Triton": repr(sorted(get_cache_invalidating_env_vars().items())),
        "sources": sources(),
    }


def sources() -> str:
    """A hash of the sources that decide what kernels are compiled and launched."""
    found = sha256()
    for folder in _SOURCES:
        for file in sorted((_PACKAGE / folder).rglob("*.py")):
            found.update(file.relative_to(_PACKAGE).as_posix().encode() + b"\0")
            found.update(file.read_bytes())
    return found.hexdigest()
