"""What a user's file defines, for commands that take FILE:NAME."""

import runpy
import sys
from pathlib import Path
from typing import Any

from ..errors import ArgumentError


def from_file(text: str) -> Any:
    """What FILE:NAME names. The file is run, as by python FILE, but for what is under __main__.

    **Raises:** `ArgumentError` where there is no such file or name, or the file cannot be run.
    """
    file, colon, name = text.rpartition(":")
    if not colon:
        raise ArgumentError(f"{text!r} is a file; write {text}:NAME")
    if not Path(file).is_file():
        raise ArgumentError(f"there is no file {file!r}")
    beside = str(Path(file).resolve().parent)
    sys.path.insert(0, beside)  # as Python has it: the file may import its neighbours
    try:
        names = runpy.run_path(file)
    # Whatever goes wrong in the user's file is told in one line.
    except (Exception, SystemExit) as error:
        raise ArgumentError(f"{file} could not be run: {type(error).__name__}: {error}") from error
    finally:
        if beside in sys.path:
            sys.path.remove(beside)
    found = names
    for part in name.split("."):
        try:
            found = found[part] if isinstance(found, dict) else getattr(found, part)
        except (KeyError, AttributeError):
            there = [n for n, x in names.items() if callable(x) and n[0] != "_"]
            raise ArgumentError(
                f"{file} has no {name!r}; there are {', '.join(there) or 'no functions'}"
            ) from None
    return found
