"""`headway doctor`: a report on this machine, in which no failed probe hides the others."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What changes how kernels are compiled, what runs, and how fast.
_VARIABLES = ("CUDA_", "KMP_", "MKL_", "OMP_", "PYTORCH_", "TORCH", "TRITON_", "XDG_CACHE_HOME")
_PACKAGES = (
    "torch", "triton", "numpy", "flash-attn-4", "transformers", "safetensors", "tyro", "rich",
    "matplotlib",
)  # fmt: skip


# Unlike other commands it uses no tyro and rich: it has to run where only PyTorch is installed.
def main(arguments: list[str]) -> int:
    """Run `headway doctor`; return exit status 0, whatever the report says."""
    parser = argparse.ArgumentParser(
        "headway doctor",
        description="Print what Headway finds on this machine: paste it into a bug report.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    options = parser.parse_args(arguments)
    findings = examine()
    if options.json:
        print(json.dumps(findings, indent=2))
        return 0
    for section, entries in findings.items():
        print(section)
        if not isinstance(entries, dict):
            entries = {"": entries}
        width = max(map(len, entries), default=0)
        for name, value in entries.items():
            print(f"  {name:{width}}  {value}")
    return 0


def examine() -> dict[str, Any]:
    """Return every section of the report. A probe that fails leaves its error as the answer."""
    probes = {
        "versions": _versions, "machine": _machine, "devices": _devices, "backends": _backends,
        "tuned tiles": _tuned, "environment": _environment,
    }  # fmt: skip
    return {section: _guard(probe) for section, probe in probes.items()}


def _guard(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 a report about a broken machine must not break
        return f"unknown: {type(error).__name__}: {error}"


def _versions() -> dict[str, str]:
    import headway

    versions = {
        "headway": f"{headway.__version__} ({_home()})",
        "commit": _guard(lambda: commit() or _installed_commit() or "unknown: not from git"),
        "python": f"{platform.python_version()} ({sys.executable})",
    }
    for name in _PACKAGES:
        versions[name] = _guard(lambda n=name: _installed(n))
    return versions


def _home() -> Path:
    """Return the folder of the package that runs."""
    return Path(__file__).resolve().parents[1]


def commit() -> str:
    """Return the commit of the checkout that the package runs from, or "" outside of one."""

    def git(*arguments: str) -> str | None:
        try:
            process = subprocess.run(
                ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True
            )
        except OSError:  # no git
            return None
        return process.stdout.strip() if process.returncode == 0 else None

    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return ""  # not in a checkout, or in somebody else's
    dirty = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{git('rev-parse', '--short=12', 'HEAD')}{dirty}"


def _installed_commit() -> str:
    """Return the commit that pip wrote down, as it does for `pip install git+...`."""
    try:
        package = importlib.metadata.distribution("headway")
    except importlib.metadata.PackageNotFoundError:
        return ""
    if Path(str(package.locate_file("headway"))).resolve() != _home():
        return ""  # another installation than the one that runs
    origin = json.loads(package.read_text("direct_url.json") or "{}")
    return origin.get("vcs_info", {}).get("commit_id", "")


def _installed(name: str) -> str:
    """Return the version in the package's metadata, without importing the package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        module = importlib.util.find_spec(name)
        return "not installed" if module is None else "found, but with no version"


def _machine() -> dict[str, str]:
    return {
        "system": platform.platform(),
        "processor": _guard(processor),
        "cores": _guard(lambda: str(os.cpu_count())),
        "memory": _guard(_memory),
    }


def processor() -> str:
    """Return the name of the CPU."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except FileNotFoundError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _memory() -> str:
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"


def _devices() -> dict[str, str]:
    import torch

    capability = torch.backends.cpu.get_cpu_capability
    devices = {"cpu": _guard(lambda: f"{capability()}, {torch.get_num_threads()} threads")}
    count = _guard(torch.cuda.device_count)
    build = torch.version.cuda or torch.version.hip
    if not isinstance(count, int):
        devices["cuda"] = count
    elif count:
        devices["cuda"] = f"{build}, which PyTorch is built for"
        for n in range(count):
            devices[f"cuda:{n}"] = _guard(lambda n=n: _gpu(n))
    elif build:
        devices["cuda"] = f"none seen (PyTorch is built for {build}: look at the driver)"
    else:
        devices["cuda"] = "none: this PyTorch is built for the CPU only"
    devices["driver"] = _guard(_driver)
    return devices


def _driver() -> str:
    """Return NVIDIA's driver, and the newest CUDA that it runs."""
    import torch

    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi here"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    words = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()
    driver = words[0] if words else "nvidia-smi says nothing"
    if not torch.version.cuda:
        return driver
    newest = torch._C._cuda_getDriverVersion()  # pyrefly: ignore[missing-attribute]
    return f"{driver}, for CUDA up to {newest // 1000}.{newest % 1000 // 10}"


def _gpu(n: int) -> str:
    import torch

    gpu = torch.cuda.get_device_properties(n)
    return f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"


def _backends() -> dict[str, str]:
    from headway.backends import table

    return {
        row.name: f"{'available' if row.available else 'not available'}: {row.reason}"
        for row in table()
    }


def _tuned() -> dict[str, str]:
    """Describe where `headway tune` keeps its results, for which GPUs there are some, and where the
    tile sizes of each GPU here were measured."""
    import torch

    from headway.backends.triton import saved

    files = sorted(path.stem for path in saved.folder().glob("*.json"))
    count = _guard(torch.cuda.device_count)
    here = {
        f"cuda:{n}": _guard(lambda n=n: saved.measured_on(torch.device("cuda", n)))
        for n in range(count if isinstance(count, int) else 0)
    }
    return {"files": f"{saved.folder()}: {', '.join(files) or 'nothing yet'}", **here}


def _environment() -> dict[str, str]:
    """Return the environment variables that matter, as they are set."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)} or {
        "": "no variable of CUDA, OpenMP, PyTorch or Triton is set"
    }
