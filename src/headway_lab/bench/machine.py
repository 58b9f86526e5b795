"""Where and with what numbers were measured: they mean nothing without it."""

import os
import platform
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch

from headway.cli.doctor import commit as commit
from headway.cli.doctor import processor as processor

from .timing import compare

UNTOLD = re.compile(r"nvidia|cpu|processor|\d+gb|hbm\d*e?")  # words that tell no card from another


@dataclass(frozen=True)
class Machine:
    """Columns that every line of the CSV carries."""

    date: str  # UTC
    commit: str  # "" where the package is not in a git checkout; "-dirty" with local changes
    headway: str
    torch: str
    python: str
    system: str
    device: str  # name of the CPU or GPU
    cores: int
    threads: int
    capability: str  # the instruction set that PyTorch uses, or the GPU's compute capability
    isa: str  # a limit on instruction sets (see child.py); "" for none

    @property
    def card(self) -> str:
        """A name for a folder: h200, a100-sxm4, cpu-intel-xeon-amx."""
        name = re.sub(r"\(\w+\)|@.*", " ", self.device.lower())  # (R), (TM); the clock
        words = [w for w in re.findall("[a-z0-9]+", name) if not UNTOLD.fullmatch(w)]
        if not self.capability.startswith("sm_"):
            words = ["cpu", *words, *self.capability.lower().split()[-1:]]
        return "-".join(words)


def here(device: str, isa: str = "") -> Machine:
    """This machine, with PyTorch's number of threads as it is set now."""
    from headway import __version__

    if torch.device(device).type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    else:
        name, capability = processor(), torch.backends.cpu.get_cpu_capability()
        if has_amx():
            capability += " AMX"
    return Machine(
        datetime.now(UTC).isoformat(timespec="seconds"), commit(), __version__, torch.__version__,
        platform.python_version(), platform.platform(), name, os.cpu_count() or 0,
        torch.get_num_threads(), capability, isa,
    )  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    """Of a process that finds this package where this one has it."""
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))} | more


def has_amx() -> bool:
    """Whether this CPU multiplies bfloat16 in tiles."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def load() -> float:
    """Programs that ran or wanted to in the last minute, this one included; 0.0 if unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def peak(device: str) -> int:
    """Bytes: the most that this process has had resident, or has had allocated on its GPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # Not `ru_maxrss`: on Linux that begins with the parent's peak in a process it has started.
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


@cache
def roof(dtype: str, device: str) -> float:
    """FLOP/s of a square matrix product in this dtype."""
    n = 8192 if torch.device(device).type == "cuda" else 1024
    a = torch.randn(n, n).to(device, getattr(torch, dtype))
    timing = compare({"mm": lambda: a @ a}, 5, device)["mm"]
    return 2 * n**3 / timing.low
