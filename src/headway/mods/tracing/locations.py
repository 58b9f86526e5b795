"""Find the user's source line, for messages and for comments in generated kernels."""

import linecache
import os
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch

Location = tuple[str, int]  # file, line

PACKAGE = str(Path(__file__).parents[2]) + os.sep
TORCH = os.path.dirname(torch.__file__) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep


def user_location(stop: CodeType) -> Location | None:
    """Return the innermost line of the user's that is running, below the frame of `stop`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not stop:
        file = frame.f_code.co_filename
        if not is_internal_file(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def is_internal_file(file: str) -> bool:
    """Return whether a file is torch's or this package's, but not one of masks or scores."""
    if file.startswith(PACKAGE):
        return os.path.basename(file) not in ("masks.py", "scores.py")
    return file.startswith((TORCH, "<")) or os.path.basename(file) == "contextlib.py"


@lru_cache(maxsize=1024)
def file_owner(file: str) -> str:
    """Return whose code is in a file: "internal", "import", "python" or "user"."""
    if file.startswith("<frozen importlib"):
        return "import"
    if file.startswith((PACKAGE, TORCH)):
        return "internal"
    if file == _STDLIB + "enum.py":  # the walk follows every member of an enum
        return "internal"
    packages = os.sep + "site-packages" + os.sep
    of_python = file.startswith((_STDLIB, "<frozen ")) and packages not in file
    return "python" if of_python else "user"


def location_in_traceback(error: BaseException) -> Location | None:
    """Return the innermost line of the user's that an exception went through."""
    traceback, location = error.__traceback__, None
    while traceback is not None:
        if not is_internal_file(traceback.tb_frame.f_code.co_filename):
            location = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
    return location


def find_line(functions: Iterable[Any], line: str) -> Location | None:
    """Return the location of a stripped source line in functions, nested ones included."""
    codes = [code for fn in functions if (code := getattr(fn, "__code__", None)) is not None]
    while codes:
        code = codes.pop()
        for number in sorted({n for _, _, n in code.co_lines() if n}):
            if linecache.getline(code.co_filename, number).strip() == line:
                return code.co_filename, number
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return None


def quote(location: Location | None) -> str:
    """Return a location as Python's tracebacks show it, to end an error message with."""
    if not location:
        return ""
    source = linecache.getline(*location).strip()
    return f'\n  File "{location[0]}", line {location[1]}\n    {source}'
