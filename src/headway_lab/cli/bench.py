"""`headway bench`: a progress bar, every case when it is done, and the targets at the end."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..bench.case import Case
from ..bench.cases import every, select
from ..bench.peers import PEERS, Peer
from ..bench.results import FAIL, NOISE, NOT_RUN, PASS, WRONG, Machine, Result, describe, here, load
from ..bench.run import Options, bench

STYLES = {PASS: "green", FAIL: "red", NOISE: "yellow", WRONG: "bold red", NOT_RUN: "yellow"}


@dataclass(frozen=True)
class Arguments(Options):
    """Time forward, backward and block masks of Headway and of other libraries.

    Every result is first checked against float64. A wrong one is not timed, and the exit status is
    then 1. All libraries of a case take turns in one process, and their medians are compared.
    """

    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the cases, their tags and the peers, and run nothing."""

    def __post_init__(self) -> None:
        """Skip the checks: `Options` makes them, where the parser does not frame their messages."""


def main(arguments: list[str]) -> int:
    """Run `headway bench`; return exit status 0, or 1 if a result was wrong."""
    options = tyro.cli(Arguments, args=arguments, prog="headway bench")
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has room for whole lines
    if options.list:
        console.print(listing(), highlight=False, soft_wrap=True)
        return 0
    return run_in_terminal(
        Options(**{f.name: getattr(options, f.name) for f in fields(Options)}), console
    )


def run_in_terminal(options: Options, console: Console) -> int:
    """Run the bench in a terminal; return 1 if a result was wrong, else 0."""
    cases = select(options.cases, options.device, options.context_parallel)
    if options.output is None:
        console.print("nothing is written: --output FILE keeps the figures", soft_wrap=True)
    if load() > 1:
        _warn_of_load(console)
    progress = Progress(
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
        console=console, transient=True,
    )  # fmt: skip
    with progress:
        task = progress.add_task("", total=len(cases))

        def show(case: Case, results: list[Result]) -> None:
            progress.advance(task)
            console.print(title(case), soft_wrap=True)
            console.print(lines(results))

        path, results = bench(
            options, show, begin=lambda case: progress.update(task, description=case.name)
        )
    with_target = [result for result in results if result.target]
    if len(cases) > 1 and with_target:
        console.print(Text("targets", "bold"))
        console.print(targets(with_target))
    console.print(summary(here(options.device), results), soft_wrap=True, highlight=False)
    if load() > options.threads + 1:
        _warn_of_load(console)
    if path is not None:
        console.print(f"written: {path}", soft_wrap=True, highlight=False)
    return int(any(result.verdict == WRONG for result in results))


def _warn_of_load(console: Console) -> None:
    busy = f"other programs run here (load {load():.1f}): do not trust these figures"
    console.print(busy, style="yellow", soft_wrap=True, highlight=False)


def title(case: Case) -> Text:
    """Return the heading of a case: its name and shape."""
    about = describe(case)
    extra = " with statistics" * case.stats + (f" std {case.std:g}" if case.std != 1 else "")
    extra += f" dropout {case.dropout:g}" if case.dropout else ""
    heads = f"{case.hq}" if case.hk == case.hq else f"{case.hq}/{case.hk}"
    mods = " ".join(str(about[mod]) for mod in ("score", "mask") if about[mod])
    width = f"{case.d}" if case.dv is None else f"{case.d}/{case.dv}"
    sizes = f"({case.b}, {heads}, {case.length}, {width}) {case.dtype}"
    if case.d == 0:  # a block mask
        sizes = f"({case.b}, {heads}, {case.length}, {case.length})"
    shape = f"  {sizes} {mods}{extra}"
    return Text.assemble((case.name, "bold"), (shape, "dim"))


def lines(results: Iterable[Result]) -> Table:
    """Return a table of the contestants of one case: per direction, Headway first."""
    table = Table.grid(padding=(0, 2))
    for name in ("direction", "who", "median", "spread", "speed", "roof", "ratio", "rest"):
        left_aligned = name in ("direction", "who", "rest")
        table.add_column(justify="left" if left_aligned else "right", no_wrap=name != "rest")
    direction = None  # of the row above
    for r in results:
        rest = Text(r.note, "dim")
        if r.verdict:
            rest = Text.assemble(
                f"{r.target} " if r.target else "", (r.verdict, STYLES[r.verdict]), "  ", rest
            )
        table.add_row(
            f"  {r.direction}" if r.direction != direction else "", r.contestant,
            "" if r.median is None else f"{number(r.median)} {r.unit}", spread(r),
            "" if r.gflops is None else f"{number(r.gflops)} GFLOP/s",
            "" if r.gflops is None or not r.roof else f"{r.gflops / r.roof:.0%}",
            "" if r.ratio is None else f"{r.ratio:.2f}x", rest,
        )  # fmt: skip
        direction = r.direction
    return table


def targets(results: Iterable[Result]) -> Table:
    """Return a table of targets, and what was reached."""
    table = Table.grid(padding=(0, 2))
    for r in results:
        reached = f"{number(r.median or 0)} {r.unit}" if r.ratio is None else f"{r.ratio:.2f}x"
        against = "" if r.contestant == "headway" else f"vs {r.contestant}"
        verdict = Text(r.verdict, STYLES[r.verdict])
        table.add_row(f"  {r.case}", r.direction, against, reached, r.target, verdict)
    return table


def spread(r: Result) -> str:
    """Return half the distance between the quartiles, as a share of the median."""
    if r.median is None or r.low is None or r.high is None or r.runs < 2:
        return ""
    return f"±{(r.high - r.low) / 2 / abs(r.median or 1):.0%}"


def number(x: float) -> str:
    """Format a number with three digits or more: 0.123, 12.3, 1,234."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.3g}"


def summary(machine: Machine, results: list[Result]) -> str:
    """Describe machine, versions, commit, and the count of verdicts."""
    counts = [(name, sum(r.verdict == name for r in results)) for name in STYLES]
    listed = ", ".join(f"{count} {name}" for name, count in counts if count)
    return (
        f"{machine.device}, {machine.capability}, {machine.cores} cores; torch {machine.torch}, "
        f"headway {machine.headway}, commit {machine.commit or 'unknown'}\n{listed}".rstrip()
    )


def listing() -> str:
    """Return the cases, tags and peers, for `--list`."""
    listed = ["cases (select by name, part of a name, or tag):"]
    listed += [f"  {case.name:42} {', '.join(case.tags)}" for case in every()]
    listed += ["peers:"]
    listed += [f"  {name:24} {peer.note}{_installed(peer)}" for name, peer in PEERS.items()]
    return "\n".join(listed)


def _installed(peer: Peer) -> str:
    if not peer.package:
        return ""
    return f" ({peer.installed or f'left out: {peer.package} is not installed'})"
