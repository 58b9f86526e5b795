"""The command line: `headway COMMAND ...`. Each command is a module here, imported when it runs."""

import importlib
import sys
from collections.abc import Callable

# The one table: a command is the module of that name in this package, with a function
# `main(arguments) -> exit status`, and a line for `headway --help`.
COMMANDS = {
    "train": "train a small language model on text that every Python brings",
    "sample": "let a trained model write",
    "mask": "draw a mask or a score in the terminal: which queries see which keys",
    "explain": "what would run for your score or mask function, and why",
    "profile": "where the time of your training step goes: attention, masks, host, the rest",
    "bench": "time forward and backward against what else you could use",
    "warm": "compile kernels ahead, for any card, into a folder that may be copied",
    "tune": "search for the fastest tiles of the GPU kernels on this card",
    "experiment": "claims about stable training that check themselves: scaling, qk-clip",
    "doctor": "versions, devices, backends, and why each is or is not available",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 2 for a mistake that the message explains."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        from headway import __version__

        print(f"headway {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"headway: no command {name!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        command = importlib.import_module(f"{__name__}.{name}").main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __name__.partition(".")[0]:
            raise
        print(
            f"headway {name}: {error.name} is not installed, which the command line needs: "
            "pip install 'headway[cli]'",
            file=sys.stderr,
        )
        return 2
    return _guarded(name, command, rest)


def usage() -> str:
    """What `headway --help` prints."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}}  {line}" for name, line in COMMANDS.items())
    return (
        "usage: headway COMMAND [options]\n\n"
        "Exact attention that trains: any score function, any mask, forward and backward.\n\n"
        f"{listed}\n\n"
        "`headway COMMAND --help` lists every option with its default."
    )


def _guarded(name: str, command: Callable[[list[str]], int], arguments: list[str]) -> int:
    from headway.errors import HeadwayError

    try:
        return command(arguments)
    except HeadwayError as error:
        print(f"headway {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        sys.stderr.close()
        return 141  # as a shell counts SIGPIPE
