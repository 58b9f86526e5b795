"""One measurement, the machine that it was made on, and the CSV that keeps both."""

import csv
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from headway.cli.doctor import commit as commit
from headway.cli.doctor import processor as processor
from headway.errors import ArgumentError, HeadwayError

from .case import Case
from .timing import Timing

UNTOLD = re.compile(r"nvidia|cpu|processor|\d+gb|hbm\d*e?")  # words that tell no card from another


@dataclass(frozen=True)
class Machine:
    """The machine: columns that every line of the CSV has."""

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
    """Describe this machine, with PyTorch's current number of threads."""
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
    """Return the environment of a process that finds this package in the same place."""
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))} | more


class ChildFailed(HeadwayError, RuntimeError):
    """A measurement in a process of its own ended without an answer."""


def ask_process(command: list[str], question: object, **more: str) -> Any:
    """Return the answer of a fresh Python: a question on its input, the answer its last line.

    **Raises:** `ChildFailed` with its last words. `more`: of its environment.
    """
    process = subprocess.run(
        [sys.executable, *command], input=json.dumps(question), capture_output=True, text=True,
        env=environment(**more),
    )  # fmt: skip
    if process.returncode:
        last_line = process.stderr.strip().splitlines()[-1:] or ["nothing on standard error"]
        raise ChildFailed(
            f"the process that measured it ended with {process.returncode}: {last_line[0]}"
        )
    return json.loads(process.stdout.splitlines()[-1])


def has_amx() -> bool:
    """Return True if this CPU has AMX, which multiplies bfloat16 in tiles."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def load() -> float:
    """Return the load average of the last minute, this process included; 0.0 if unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


PASS, FAIL, NOISE, WRONG, NOT_RUN = "pass", "fail", "noise", "wrong", "not run"


class Error(NamedTuple):
    """The error of a result, |x - truth| / |truth| of the worst head, and its limit."""

    what: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """True within the limit; NaN does not pass."""
        return self.error <= self.limit


@dataclass(frozen=True)
class Result:
    """A contestant in one direction of one case. Fields that do not apply are None or ""."""

    case: str
    direction: str
    contestant: str
    unit: str = "ms"  # of median, low and high
    median: float | None = None
    low: float | None = None  # quartiles
    high: float | None = None
    runs: int = 0
    gflops: float | None = None  # products of kept pairs only
    roof: float | None = None  # GFLOP/s of a matrix product, in this dtype or float32
    pairs: int | None = None  # that the mask keeps, over batches and heads
    tiles: int | None = None  # live, of 128 x 128
    error: float | None = None  # of the worst output; see measure.py
    limit: float | None = None
    ratio: float | None = None  # this contestant's time over Headway's: above 1, Headway is faster
    target: str = ""
    verdict: str = ""
    note: str = ""

    def timed(self, timing: Timing, unit: str = "ms") -> "Result":
        """Return the result with the numbers of a timing: seconds, or for "%" a share."""
        factor = {"ms": 1e3, "µs": 1e6, "%": 1e2}[unit]
        median, low, high = (round(factor * t, 5) for t in timing[:3])
        return replace(self, unit=unit, median=median, low=low, high=high, runs=timing.runs)

    def used(self, size: int) -> "Result":
        """Return the result with the bytes that one run took."""
        return replace(self, unit="MB", median=round(size / 1e6, 1), runs=1)

    def checked(self, errors: Iterable[Error]) -> "Result":
        """Return the result with the worst of its errors; beyond its limit the verdict is wrong."""
        worst = max(errors, key=lambda e: e.error / e.limit if e.passed else float("inf"))
        result = replace(self, error=worst.error, limit=worst.limit)
        if worst.passed:
            return result
        note = f"{worst.what} is off by {worst.error:.1e}, {worst.limit:.1e} are allowed"
        return replace(result, verdict=WRONG, note=note)

    def not_run(self, why: object) -> "Result":
        """Return the result of what could not run: a reason, or the first line of an error."""
        return replace(self, verdict=NOT_RUN, note=str(why))

    def at_most(self, limit: float | None) -> "Result":
        """Return the result with a target for its median, in its unit, if there is one.

        A median below 0, a difference of two times that noise hides, meets no target.
        """
        if limit is None:
            return self
        median = self.median or 0.0
        low, high = (median if x is None else x for x in (self.low, self.high))
        passed = None if median < 0 or low <= limit < high else median <= limit
        return self.asked(f"<= {limit:g} {self.unit}", passed)

    def asked(self, target: str, passed: bool | None) -> "Result":
        """Return the result with a target and its verdict; None: the times are too noisy to say."""
        return replace(self, target=target, verdict={True: PASS, False: FAIL, None: NOISE}[passed])


def describe(case: Case) -> dict[str, object]:
    """Return the columns that describe a case."""
    shape = {
        name: getattr(case, name)
        for name in ("b", "hq", "hk", "length", "d", "dtype", "std", "stats", "dropout")
    } | {"dv": case.widths[1]}
    mods = {"score": case.score, "mask": case.mask}
    return shape | {name: "" if make is None else _name(make()) for name, make in mods.items()}


def _name(mod: Callable) -> str:
    """Return the text of a value of the library, or the name of a function."""
    return getattr(mod, "__qualname__", None) or str(mod)


# TFLOP/s of kept pairs, by case, direction and contestant.
Speeds = dict[tuple[str, str, str], float]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def speeds_in(path: Path) -> tuple[str, Speeds]:
    """Return the device and all speeds of a file of results. Raises ArgumentError."""
    try:
        rows = _rows(path)
        return rows[0].get("device", ""), {
            (row["case"], row["direction"], row["contestant"]): float(row["gflops"]) / 1e3
            for row in rows
            if row["gflops"]
        }
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}") from error
    except (KeyError, ValueError, IndexError) as error:
        raise ArgumentError(f"{path} is not a file of `headway bench`: {error!r}") from error


class ResultsFile:
    """A CSV file that gets every line as soon as it is known; with None for a path, nothing."""

    def __init__(self, path: Path | None, resume: bool = False) -> None:
        self.path, self.resume = path, resume
        self.file: TextIO | None = None
        self.done: frozenset[str] = frozenset()

    def __enter__(self) -> "ResultsFile":
        if self.path is None:
            return self
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            resumed = self.resume and self.path.exists()
            columns = [f.name for f in fields(Machine)] + ["load", "case", "measure"]
            columns += list(describe(Case("")))
            columns += [f.name for f in fields(Result) if f.name != "case"]
            if resumed:
                rows = _rows(self.path)
                if rows and list(rows[0]) != columns:
                    raise ArgumentError(
                        f"--resume: {self.path} has other columns than this version writes; "
                        "name another file"
                    )
                self.done = frozenset(row["case"] for row in rows)
            mode = "a" if resumed else "x"
            self.file = open(self.path, mode, newline="", encoding="utf-8")
        except FileExistsError:
            raise ArgumentError(
                f"--output {self.path} exists; move it, give another name, or add --resume"
            ) from None
        except OSError as error:
            raise ArgumentError(f"--output {self.path}: {error.strerror}") from error
        self.writer = csv.DictWriter(self.file, columns, lineterminator="\n")
        if not resumed:
            self.writer.writeheader()
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()

    def add(self, machine: Machine, load: float, case: Case, results: Iterable[Result]) -> None:
        """Write the lines of one case."""
        if self.file is None:
            return
        common = asdict(machine) | {"load": round(load, 2), "measure": case.measure}
        for result in results:
            self.writer.writerow(common | describe(case) | asdict(result))
        self.file.flush()
