"""The command line: `headway COMMAND ...`.

A command is a module with a function `main(arguments) -> exit status`, imported when it runs. Those
of the library lie in this package. Other packages add theirs by the entry-point group
"headway.commands": an entry point names a table like `COMMANDS`, whose modules lie beside it.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

# A command, and its line for `headway --help`.
COMMANDS = {
    "mask": "draw a mask or a score in the terminal: which queries attend to which keys",
    "explain": "print which backend would run your score or mask function, and why",
    "profile": "print where the time of a training step goes: attention, masks, host, the rest",
    "warm": "compile kernels ahead of time, for any GPU, into a folder that you may copy",
    "tune": "search for the fastest tiles of the Triton kernels on this GPU",
    "doctor": "print versions, devices and backends, and why each is or is not available",
}

_GROUP = "headway.commands"
# The workshop's entry point, as pyproject.toml has it: a checkout on PYTHONPATH has no metadata.
_WORKSHOP = EntryPoint("workshop", "headway_lab.cli:COMMANDS", _GROUP)


def find_commands() -> dict[str, tuple[str, str]]:
    """Return every command's module and its line for `headway --help`, of other packages too."""
    points = {point.name: point for point in entry_points(group=_GROUP)}
    if _WORKSHOP.name not in points and importlib.util.find_spec(_WORKSHOP.module.split(".")[0]):
        points[_WORKSHOP.name] = _WORKSHOP
    tables = {__name__: COMMANDS, **{point.module: point.load() for point in points.values()}}
    return {
        name: (f"{package}.{name}", line)
        for package, table in tables.items()
        for name, line in table.items()
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
    commands = find_commands()
    if name not in commands:
        print(f"headway: no command {name!r}; there are: {', '.join(commands)}", file=sys.stderr)
        return 2
    module, _ = commands[name]
    try:
        command = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("headway", module.split(".")[0]):
            raise
        print(
            f"headway {name}: {error.name} is not installed, which the command line needs: "
            "pip install filelock rich safetensors tyro",
            file=sys.stderr,
        )
        return 2
    return _guarded(name, command, rest)


def usage() -> str:
    """Return what `headway --help` prints."""
    commands = find_commands()
    width = max(map(len, commands))
    listed = "\n".join(f"  {name:{width}}  {line}" for name, (_, line) in commands.items())
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
