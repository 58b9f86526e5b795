"""`headway doctor`."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape


@dataclass(frozen=True)
class Arguments:
    """Print what Headway finds on this machine: paste it into a bug report."""

    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """As one JSON object."""


def main(arguments: list[str]) -> int:
    """Exit status 0, whatever is found: it reports, it does not judge."""
    asked = tyro.cli(Arguments, args=arguments, prog="headway doctor")
    findings = examine()
    if asked.json:
        print(json.dumps(findings, indent=2))
        return 0
    console = Console(highlight=False)
    for section, entries in findings.items():
        console.print(f"[bold]{section}[/bold]")
        if not isinstance(entries, dict):
            entries = {"": entries}
        width = max(map(len, entries), default=0)
        for name, value in entries.items():
            console.print(f"  {name:{width}}  {escape(str(value))}", soft_wrap=True)
    return 0


def examine() -> dict[str, Any]:
    """Every section of the report. A probe that fails leaves its error in place of its answer."""
    return {
        section: _guard(probe)
        for section, probe in (
            ("versions", _versions),
            ("machine", _machine),
            ("devices", _devices),
            ("backends", _backends),
        )
    }


def _guard(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 a report about a broken machine must not break
        return f"unknown: {type(error).__name__}: {error}"


def _versions() -> dict[str, str]:
    names = ("torch", "triton", "safetensors", "matplotlib", "transformers")
    versions = {"python": f"{platform.python_version()} ({sys.executable})"}
    versions["headway"] = _guard(lambda: _imported("headway"))
    for name in names:
        versions[name] = _guard(lambda n=name: _installed(n))
    return versions


def _imported(name: str) -> str:
    module = importlib.import_module(name)
    return f"{module.__version__} ({os.path.dirname(module.__file__ or '?')})"


def _installed(name: str) -> str:
    """The version from the package's metadata: the package itself is not imported."""
    if importlib.util.find_spec(name) is None:
        return "not installed"
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "found, but with no version"


def _machine() -> dict[str, str]:
    return {
        "system": platform.platform(),
        "processor": _guard(_processor),
        "cores": _guard(lambda: str(os.cpu_count())),
        "memory": _guard(_memory),
    }


def _processor() -> str:
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

    devices = {
        "cpu": _guard(
            lambda: f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        )
    }
    count = _guard(torch.cuda.device_count)
    if not isinstance(count, int):
        devices["cuda"] = count
    elif count == 0:
        build = torch.version.cuda or torch.version.hip
        devices["cuda"] = (
            f"none seen (PyTorch is built for {build}: look at the driver)"
            if build
            else "none: this PyTorch is built for the CPU only"
        )
    else:
        for n in range(count):
            devices[f"cuda:{n}"] = _guard(lambda n=n: _gpu(n))
    return devices


def _gpu(n: int) -> str:
    import torch

    facts = torch.cuda.get_device_properties(n)
    return f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory / 2**30:.0f} GiB"


def _backends() -> dict[str, str]:
    from headway.backends import table

    return {
        row.name: f"{'available' if row.available else 'not available'}: {row.reason}"
        for row in table()
    }
