"""`headway experiment`."""

import importlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from headway.cli.options import default_words
from headway.errors import ArgumentError

from ..experiments import Experiment


@dataclass(frozen=True)
class Arguments:
    """Train small models from scratch and check a claim.

    scaling: with Adafactor, you can fold 1/sqrt(d) into the initial query weights instead of
    scaling logits. With Adam this acts as a higher learning rate of the queries.

    qk-clip: QK-Clip keeps attention logits from exploding, and the loss is not worse.

    The command prints a table, draws the curves, and exits with status 1 if the claim fails.
    """

    name: Annotated[Literal["scaling", "qk-clip"], tyro.conf.Positional]
    """Claim to check."""
    steps: Annotated[int | None, default_words("120 for scaling, 200 for qk-clip")] = None
    """Training steps of every run. The checks expect the default."""
    threads: Annotated[int | None, default_words("PyTorch's choice")] = None
    """CPU threads."""
    out: Path = Path("experiments")
    """Folder for the picture."""


def main(arguments: list[str]) -> int:
    """Run `headway experiment`; return 0 if every check passed, else 1."""
    options = tyro.cli(Arguments, args=arguments, prog="headway experiment")
    for option, number in (("--steps", options.steps), ("--threads", options.threads)):
        if number is not None and number < 1:
            raise ArgumentError(f"{option} {number} must be at least 1")
    path = options.out / f"{options.name}.png"
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # before the minutes that it takes
    except OSError as error:
        raise ArgumentError(
            f"--out {options.out}: {error.strerror}; name another folder"
        ) from error
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = Console()
    module = importlib.import_module(f"headway_lab.experiments.{options.name.replace('-', '_')}")
    began = time.perf_counter()
    with console.status("...") as status:
        log = lambda text: status.update(f"{text} ({time.perf_counter() - began:.0f} s)")
        steps = {} if options.steps is None else {"steps": options.steps}
        experiment: Experiment = module.run(log=log, **steps)
    _print(console, experiment, time.perf_counter() - began)
    try:
        experiment.draw(path)
        console.print(f"curves: {path}", highlight=False)
    except ModuleNotFoundError as error:
        console.print(f"no curves: {error.name} is not installed; pip install matplotlib")
    except OSError as error:
        console.print(f"no curves: {path} could not be written ({error.strerror})", highlight=False)
    return 0 if experiment.passed else 1


def _print(console: Console, experiment: Experiment, seconds: float) -> None:
    table = Table(title=experiment.title, title_justify="left")
    for number, column in enumerate(experiment.columns):
        table.add_column(column, justify="right" if number else "left")
    for row in experiment.rows:
        table.add_row(*row)
    console.print(table)
    for check in experiment.checks:
        mark = "[green]holds[/]" if check.passed else "[bold red]fails[/]"
        console.print(f"  {mark}  {check.statement}", highlight=False)
    console.print(f"\n{experiment.reading}\n", highlight=False)
    passed = sum(check.passed for check in experiment.checks)
    console.print(
        f"{passed} of {len(experiment.checks)} checks hold, {seconds:.0f} s", highlight=False
    )
