"""Run the table: select cases, measure them, write the CSV."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

from headway.cli.options import default_words
from headway.errors import ArgumentError

from . import child, decode, first_call, ranks
from .case import Case
from .cases import select
from .forward_mode import measure_jvp
from .measure import measure_build, measure_long, measure_time
from .overhead import graph, host, overhead
from .results import Machine, Result, ResultsFile, has_amx, here, load
from .row_statistics import measure_statistic
from .timing import Tick
from .training import recording, train, training

Show = Callable[[Case, list[Result]], object]


@dataclass(frozen=True)
class Options:
    """The options of `headway bench`."""

    cases: tuple[str, ...] = ()
    """Names of cases, parts of names, or tags. Without them all cases run."""
    device: str = "cpu"
    """Device to time: cpu or cuda."""
    context_parallel: bool = False
    """Run only the cases that split one sequence over all GPUs of this machine."""
    threads: int = 2
    """CPU threads of PyTorch."""
    repeats: int = 7
    """Runs of every library. If a run takes seconds, there are two."""
    output: Annotated[Path | None, default_words("none", "PATH")] = None
    """CSV to write, or an existing folder: then FOLDER/GPU/bench-DATE.csv is written."""
    seconds: Annotated[float | None, default_words("none", "FLOAT")] = None
    """Start no case after this many seconds. The cases run in the order of `--list`."""
    resume: bool = False
    """Skip the cases that are in the CSV of --output, and append the others to it."""

    def __post_init__(self) -> None:
        for name in ("threads", "repeats"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"--{name} {getattr(self, name)} must be 1 or more")
        if self.seconds is not None and not self.seconds >= 0:
            raise ArgumentError(f"--seconds {self.seconds:g} must be 0 or more")
        if self.resume and (self.output is None or self.output.is_dir()):
            shown = "no --output" if self.output is None else f"--output {self.output}, a folder"
            raise ArgumentError(f"--resume with {shown}: name the CSV that is to go on")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ArgumentError(f"--device {self.device!r}: {error}") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ArgumentError(f"--device {self.device}: PyTorch sees no GPU (`headway doctor`)")
        if device.type not in ("cpu", "cuda"):
            raise ArgumentError(f"--device {self.device}: there are cases for cpu and cuda only")


def bench(
    options: Options,
    show: Show = lambda case, results: None,
    begin: Callable[[Case], object] = lambda case: None,
    tick: Tick = lambda: None,
) -> tuple[Path | None, list[Result]]:
    """Run the selected cases; return the path of the CSV, or None, and every result.

    `begin` is called before a case, `tick` after every round of timings, `show` after a case, when
    its lines are in the CSV. PyTorch's number of threads is put back afterwards.
    """
    cases = select(options.cases, options.device, options.context_parallel)
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        machine = here(options.device)
        path = place(options.output, machine)
        all_results: list[Result] = []
        start = time.monotonic()
        with ResultsFile(path, options.resume) as book:
            for case in cases:
                if case.name in book.done:
                    continue
                if options.seconds is not None and time.monotonic() - start > options.seconds:
                    break
                begin(case)
                case_machine, results = measure(case, machine, options, tick)
                book.add(case_machine, load(), case, results)
                show(case, results)
                all_results += results
        return path, all_results
    finally:
        torch.set_num_threads(threads)


def place(output: Path | None, machine: Machine) -> Path | None:
    """Return the CSV that `--output` means: a new one of the machine, if it is a folder."""
    if output is None or not output.is_dir():
        return output
    stamp = machine.date[:19].replace(":", "")
    return output / machine.card / f"bench-{stamp}.csv"


def measure(
    case: Case, machine: Machine, options: Options, tick: Tick
) -> tuple[Machine, list[Result]]:
    """Measure one case, here or in another process; return the machine and the results."""
    device, repeats = options.device, options.repeats
    if case.isa and not has_amx():
        return machine, [Result(case.name, "", "headway").not_run("this CPU has no AMX to hide")]
    if case.isa or case.measure in child.MEMORY:
        return child.ask(case, device, repeats, case.isa)
    return machine, MEASURES[case.measure](case, device, repeats, tick)


MEASURES: dict[str, Callable[[Case, str, int, Tick], list[Result]]] = {
    "time": measure_time, "forward mode": measure_jvp, "recording": recording,
    "overhead": partial(overhead, compiled=False),
    "overhead, compiled": partial(overhead, compiled=True), "host": host, "graph": graph,
    "first call": first_call.measure,
    "first call, no byte code": partial(first_call.measure, byte_code=False),
    "long": measure_long, "train": train, "decode": decode.decode, "decode, host": decode.grows,
    "write": decode.writes, "entropy": partial(measure_statistic, entropy=True),
    "expect": partial(measure_statistic, entropy=False),
    "block mask": measure_build, "training": training, "ranks": ranks.measure,
}  # fmt: skip
