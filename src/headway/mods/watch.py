"""What ran while a function was traced: the proof that `capture.reads` saw all of it.

A graph may be used again if everything that its trace read is unchanged. `reads` follows names, so
it has missed nothing if only functions ran whose names it followed, and no code in C that reads by
itself. Both show in Python's profiling events.
"""

import os
import sys
import types
from functools import lru_cache
from typing import Any

from .fixed import is_fixed_builtin, shown
from .places import PACKAGE, TORCH, Place, quote

_PYTHON = os.path.dirname(os.__file__) + os.sep


class Watch:
    """A context manager that looks on in this thread.

    - `codes`: the functions that ran, with a place where they were called.
    - `impure`: a function written in C that may read anything; None if there was none.
    - `blind`: nothing can be seen, since a profiler has the place.
    """

    def __init__(self) -> None:
        self.codes: dict[types.CodeType, Place] = {}
        self.impure: str | None = None
        self.blind = False

    def __enter__(self) -> "Watch":
        self.root = sys._getframe(1)
        self.before = sys.getprofile()
        # A profiler written in C cannot be put back from Python. (From 3.12 on it does not show.)
        self.blind = not isinstance(
            self.before, types.NoneType | types.FunctionType | types.MethodType
        )
        if not self.blind:
            sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        if not self.blind:
            sys.setprofile(self.before)
        del self.root

    def _event(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code not in self.codes and not self._is_internal(frame):
                caller = frame.f_back or frame
                self.codes[code] = caller.f_code.co_filename, caller.f_lineno
        elif event != "c_call" or self.impure is not None or is_fixed_builtin(arg):
            return
        elif not self._is_internal(frame):
            place = frame.f_code.co_filename, frame.f_lineno
            self.impure = f"calls {shown(arg)}{quote(place)}"

    def _is_internal(self, frame: types.FrameType | None) -> bool:
        """Whether it reads nothing of the user's but what it is given: it is of torch or Headway,
        or of Python's own library, run by these, or an import, which these make."""
        internal: bool | None = None
        of_user = False
        while frame is not None and frame is not self.root:
            whose = _whose_file(_file_of(frame))
            if whose == "import":
                return True
            if whose == "internal" and internal is None:
                internal = not of_user
            of_user = of_user or whose == "user"
            frame = frame.f_back
        return not of_user if internal is None else internal

    def unfollowed(self, codes: set[types.CodeType]) -> str | None:
        """What ran that a walk did not follow, which has seen these functions; None if nothing."""
        if self.blind:
            return "was traced while a profiler ran"
        for code, place in self.codes.items():
            if code not in codes and code.co_name != "__del__":
                return f"runs {code.co_qualname}, which no name leads to{quote(place)}"
        return self.impure


def _file_of(frame: types.FrameType) -> str:
    """The file of its code; of code that was written by `exec`, as a dataclass's, the module's."""
    file = frame.f_code.co_filename
    if file[:1] != "<" or file.startswith("<frozen "):
        return file
    module = sys.modules.get(frame.f_globals.get("__name__", ""))
    mine = module is not None and vars(module) is frame.f_globals
    return getattr(module, "__file__", None) or file if mine else file


@lru_cache(maxsize=1024)
def _whose_file(file: str) -> str:
    if file.startswith("<frozen "):
        return "import"
    if file.startswith((PACKAGE, TORCH)):
        return "internal"
    if os.path.basename(file) in ("contextlib.py", "enum.py"):
        return "internal"
    packages = os.sep + "site-packages" + os.sep
    return "python" if file.startswith(_PYTHON) and packages not in file else "user"
