"""What ran while a function was traced: the proof that `capture.reads` saw all of it.

A graph may be used again if everything that its trace read is unchanged. `reads` follows names, so
it has missed nothing if only functions ran whose names it followed, and no code in C that reads by
itself. Both show in Python's profiling events.
"""

import gc
import os
import sys
import types
from functools import lru_cache
from typing import Any

import torch
from torch.nn.modules import module as _modules

from .locations import PACKAGE, TORCH, Place, quote
from .purity import asks_of_torch, is_fixed_builtin, is_fixed_code, shown

_PYTHON = os.path.dirname(os.__file__) + os.sep
# Written in Python up to PyTorch 2.13.
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
_CALL_MODULE = torch.nn.Module._call_impl.__code__


class Watch:
    """A context manager that looks on in this thread.

    - `codes`: the functions that ran, with a place where they were called.
    - `impure`: a function written in C that may read anything, or one of torch's that reads more
      than its arguments; None if there was none.
    - `asked`: it is one of torch's: what it answers may depend on what surrounds the call.
    - `applied`: where a `torch.autograd.Function` was called, whose backward no trace sees.
    - `hooked`: where a module with backward hooks was called, which no trace sees either.
    - `blind`: nothing can be seen, since a profiler has the place.
    """

    def __init__(self) -> None:
        self.codes: dict[types.CodeType, Place] = {}
        self.impure: str | None = None
        self.asked = False
        self.applied: str | None = None
        self.hooked: str | None = None
        self.blind = False

    def __enter__(self) -> "Watch":
        self.root = sys._getframe(1)
        self.before = sys.getprofile()
        # A profiler written in C cannot be put back from Python. (From 3.12 on it does not show.)
        self.blind = not isinstance(
            self.before, types.NoneType | types.FunctionType | types.MethodType
        )
        if not self.blind:
            self.collects = gc.isenabled()
            gc.disable()  # what a collection runs is no part of the function
            sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        if not self.blind:
            sys.setprofile(self.before)
            if self.collects:
                gc.enable()
        del self.root

    def _event(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code is _APPLY:
                self._applied(frame.f_back)
            if code is _CALL_MODULE and has_backward_hooks(frame.f_locals["self"]):
                self._hooked(frame)
            if code not in self.codes and not self._is_internal(frame):
                caller = frame.f_back or frame
                self.codes[code] = caller.f_code.co_filename, caller.f_lineno
            elif code.co_filename.startswith(TORCH) and not is_fixed_code(
                frame.f_globals.get("__name__")
            ):
                self._asked(frame.f_back, code.co_qualname)
        elif event != "c_call":
            return
        elif getattr(arg, "__name__", "") == "apply" and _is_of_autograd(arg.__self__):
            self._applied(frame)
        elif asks_of_torch(arg):
            self._asked(frame, shown(arg))
        elif self.impure is None and not is_fixed_builtin(arg) and not self._is_internal(frame):
            place = frame.f_code.co_filename, frame.f_lineno
            self.impure = f"calls {shown(arg)}{quote(place)}"

    def _asked(self, caller: types.FrameType | None, name: str) -> None:
        """A function of torch's was called that is no op; it counts if the user called it."""
        if caller is not None and not self.asked and not self._is_internal(caller):
            self.asked = True
            place = caller.f_code.co_filename, caller.f_lineno
            self.impure = self.impure or f"calls torch's {name}{quote(place)}"

    def _hooked(self, frame: types.FrameType | None) -> None:
        while frame is not None and self._is_internal(frame):
            frame = frame.f_back
        if frame is not None and self.hooked is None:
            self.hooked = quote((frame.f_code.co_filename, frame.f_lineno))

    def _applied(self, frame: types.FrameType | None) -> None:
        if frame is not None and self.applied is None and not self._is_internal(frame):
            self.applied = quote((frame.f_code.co_filename, frame.f_lineno))

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


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks of a module, or of all modules, are called in a backward."""
    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or _modules._global_backward_hooks
        or _modules._global_backward_pre_hooks
    )


def _is_of_autograd(owner: Any) -> bool:
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


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
    if file.startswith("<frozen importlib"):
        return "import"
    if file.startswith((PACKAGE, TORCH)):
        return "internal"
    if file in (_PYTHON + "contextlib.py", _PYTHON + "enum.py"):
        return "internal"
    packages = os.sep + "site-packages" + os.sep
    of_python = file.startswith((_PYTHON, "<frozen ")) and packages not in file
    return "python" if of_python else "user"
