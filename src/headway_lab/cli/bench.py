"""`headway bench`."""

from dataclasses import dataclass, fields

import tyro
from rich.console import Console

from ..bench import Options
from ..bench.report import listing, run


@dataclass(frozen=True)
class Arguments(Options):
    """Time forward, backward and the building of block masks against what you could use instead.

    Every result is first checked against float64, and a wrong one is never timed. All contestants
    of a case run in one process, in turns; medians are compared. Exit status 1 if one was wrong.
    """

    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the cases, their tags and the peers, and run nothing."""

    def __post_init__(self) -> None:
        """The options are checked where they are made: the parser would frame what is said."""


def main(arguments: list[str]) -> int:
    """Exit status 0, or 1 if a result was wrong."""
    asked = tyro.cli(Arguments, args=arguments, prog="headway bench")
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has room for whole lines
    if asked.list:
        console.print(listing(), highlight=False, soft_wrap=True)
        return 0
    return run(Options(**{f.name: getattr(asked, f.name) for f in fields(Options)}), console)
