"""Where in the user's code we are, for messages and for comments in generated kernels."""

import linecache
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import torch

Place = tuple[str, int]  # file, line

PACKAGE = str(Path(__file__).parents[2]) + os.sep
TORCH = os.path.dirname(torch.__file__) + os.sep


def user_place(stop: CodeType) -> Place | None:
    """The innermost line of the user's that is running, below the frame of `stop`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not stop:
        file = frame.f_code.co_filename
        if not _is_machinery(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def _is_machinery(file: str) -> bool:
    """torch, and this package except the library's own masks and scores."""
    if file.startswith(PACKAGE):
        return os.path.basename(file) not in ("masks.py", "scores.py")
    return file.startswith((TORCH, "<")) or os.path.basename(file) == "contextlib.py"


def place_in_traceback(error: BaseException) -> Place | None:
    """The innermost line of the user's that an exception went through."""
    tb, place = error.__traceback__, None
    while tb is not None:
        if not _is_machinery(tb.tb_frame.f_code.co_filename):
            place = tb.tb_frame.f_code.co_filename, tb.tb_lineno
        tb = tb.tb_next
    return place


def place_of_line(functions: Iterable[Any], line: str) -> Place | None:
    """Where a line of source, stripped, stands in functions or what they define inside."""
    codes = [code for fn in functions if (code := getattr(fn, "__code__", None)) is not None]
    while codes:
        code = codes.pop()
        for at in sorted({n for _, _, n in code.co_lines() if n}):
            if linecache.getline(code.co_filename, at).strip() == line:
                return code.co_filename, at
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return None


def quote(place: Place | None) -> str:
    """A place as Python's tracebacks show it, to end an error message with."""
    if not place:
        return ""
    return f'\n  File "{place[0]}", line {place[1]}\n    {linecache.getline(*place).strip()}'
