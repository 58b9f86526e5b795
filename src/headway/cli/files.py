"""Load what a user's file defines, for commands that take FILE:NAME."""

import runpy
import sys
from pathlib import Path
from typing import Any

from ..errors import ArgumentError


def from_file(text: str) -> Any:
    """Return the object of FILE:NAME. The file is run, as by python FILE, except under __main__.

    **Raises:** `ArgumentError` where there is no such file or name, or the file cannot be run.
    """
    file, colon, name = text.rpartition(":")
    if not colon:
        raise ArgumentError(f"{text!r} is a file; write {text}:NAME")
    if not Path(file).is_file():
        raise ArgumentError(f"there is no file {file!r}")
    folder = str(Path(file).resolve().parent)
    sys.path.insert(0, folder)  # as Python has it: the file may import its neighbours
    try:
        names = runpy.run_path(file)
    # Whatever goes wrong in the user's file is told in one line.
    except (Exception, SystemExit) as error:
        raise ArgumentError(f"{file} could not be run: {type(error).__name__}: {error}") from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    value = names
    for part in name.split("."):
        try:
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        except (KeyError, AttributeError):
            functions = [n for n, x in names.items() if callable(x) and n[0] != "_"]
            raise ArgumentError(
                f"{file} has no {name!r}; there are {', '.join(functions) or 'no functions'}"
            ) from None
    return value
