"""Record which functions run during a trace, to check that `collect_reads` followed them all.

A graph may be reused if everything that its trace read is unchanged. `collect_reads` follows names,
so it is complete if only functions ran that it followed, and no function in C that reads more than
its arguments. Python's profiling events show both.
"""

import gc
import os
import sys
import threading
import types
from typing import Any

import torch
from torch.nn.modules import module as _modules

from .locations import TORCH, Location, file_owner, quote
from .purity import display_name, is_pure_builtin, is_pure_module, queries_torch_state

# `Function.apply` is written in Python up to PyTorch 2.13.
_APPLY_CODE = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
_MODULE_CALL_CODE = torch.nn.Module._call_impl.__code__
# Methods of `Module` that read by names in the caller's code, or nothing: calls, attributes.
_MODULE_CODES = {
    getattr(torch.nn.Module, name).__code__
    for name in ("_call_impl", "_wrapped_call_impl", "__getattr__", "__setattr__")
}
_MODULE_INIT_CODE = torch.nn.Module.__init__.__code__
_OF_MODULES = os.path.dirname(_modules.__file__) + os.sep


class CallRecorder:
    """A context manager that records the calls of this thread by `sys.setprofile`.

    - `called`: the code objects that ran, each with a location of a call.
    - `opaque_call`: a call of a function that is not pure, for messages; None if there was none.
    - `queried_torch`: a function was called that queries torch's state, such as autocast: its
      answer depends on the surroundings of the call.
    - `autograd_function`: a `torch.autograd.Function` was called, whose backward a trace loses.
    - `modules`: by id the modules that ran methods of PyTorch's, each with a method and a line.
    - `made`: the modules that were made meanwhile.
    - `hooked_module`: the line that calls a module with backward hooks, which a trace loses too.
    - `profiler_active`: another profiler is running, so nothing can be recorded.
    """

    def __init__(self) -> None:
        self.called: dict[types.CodeType, Location] = {}
        self.opaque_call: str | None = None
        self.queried_torch = False
        self.autograd_function = False
        self.modules: dict[int, tuple[torch.nn.Module, str, str]] = {}
        self.made: dict[int, torch.nn.Module] = {}
        self.hooked_module: str | None = None
        self.profiler_active = False
        self.thread, self.collecting = threading.get_ident(), False

    def __enter__(self) -> "CallRecorder":
        self.outer_frame = sys._getframe(1)
        self.other_profiler = sys.getprofile()
        # A profiler written in C cannot be put back from Python. (From 3.12 on it does not show.)
        self.profiler_active = not isinstance(
            self.other_profiler, types.NoneType | types.FunctionType | types.MethodType
        )
        if not self.profiler_active:
            gc.callbacks.insert(0, self._begin_collection)
            gc.callbacks.append(self._end_collection)
            sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        if not self.profiler_active:
            sys.setprofile(self.other_profiler)
            gc.callbacks.remove(self._begin_collection)
            gc.callbacks.remove(self._end_collection)
        del self.outer_frame

    def _begin_collection(self, phase: str, _: dict) -> None:
        """Note, before other callbacks, that a garbage collection begins in this thread: what it
        finalizes is not of the function, nor what these call. (Switching collections off would
        change what a function can ask.)"""
        if phase == "start" and threading.get_ident() == self.thread:
            self.collecting = True

    def _end_collection(self, phase: str, _: dict) -> None:
        """Note, after other callbacks, that it ends."""
        if phase == "stop" and threading.get_ident() == self.thread:
            self.collecting = False

    def _event(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if self.collecting:
            return
        if event == "call":
            code = frame.f_code
            if code is _APPLY_CODE:
                self.autograd_function = True
            if code is _MODULE_CALL_CODE and has_backward_hooks(frame.f_locals["self"]):
                self.hooked_module = self.hooked_module or self._users_line(frame) or None
            if code.co_filename.startswith(_OF_MODULES) and code not in _MODULE_CODES:
                self._note_module(frame)
            if code not in self.called and not self._is_internal(frame):
                caller = frame.f_back or frame
                self.called[code] = caller.f_code.co_filename, caller.f_lineno
            elif code.co_filename.startswith(TORCH) and not is_pure_module(
                frame.f_globals.get("__name__")
            ):
                self._note_query(frame.f_back, code.co_qualname)
        elif event != "c_call":
            return
        elif getattr(arg, "__name__", "") == "apply" and _is_autograd_function(arg.__self__):
            self.autograd_function = True
        elif queries_torch_state(arg):
            self._note_query(frame, display_name(arg))
        elif self.opaque_call is None and not is_pure_builtin(arg) and not self._is_internal(frame):
            place = frame.f_code.co_filename, frame.f_lineno
            self.opaque_call = f"calls {display_name(arg)}{quote(place)}"

    def _note_module(self, frame: types.FrameType) -> None:
        """Note that a method of PyTorch's reads a module, or that one is made."""
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(module, torch.nn.Module):
            if code is _MODULE_INIT_CODE:
                self.made[id(module)] = module
            elif id(module) not in self.modules:
                self.modules[id(module)] = module, code.co_qualname, self._users_line(frame)

    def _note_query(self, caller: types.FrameType | None, name: str) -> None:
        """Note that the user's code called a function of torch's that is not an op."""
        if caller is not None and not self.queried_torch and not self._is_internal(caller):
            self.queried_torch = True
            place = caller.f_code.co_filename, caller.f_lineno
            self.opaque_call = self.opaque_call or f"calls torch's {name}{quote(place)}"

    def _users_line(self, frame: types.FrameType | None) -> str:
        """Return the line of the user's code that led to a frame, for messages."""
        while frame is not None and self._is_internal(frame):
            frame = frame.f_back
        return "" if frame is None else quote((frame.f_code.co_filename, frame.f_lineno))

    def _is_internal(self, frame: types.FrameType | None) -> bool:
        """Return whether a frame reads nothing of the user's except its arguments.

        It runs code of torch or Headway, code of Python's library that these called, or an import.
        """
        internal: bool | None = None
        of_user = False
        while frame is not None and frame is not self.outer_frame:
            owner = file_owner(_source_file(frame))
            if owner == "import":
                return True
            if owner == "internal" and internal is None:
                internal = not of_user
            of_user = of_user or owner == "user"
            frame = frame.f_back
        return not of_user if internal is None else internal

    def untracked_call(self, followed: set[types.CodeType], modules: set[int]) -> str | None:
        """Return a message about a call that is opaque or of code not in `followed`, or None.

        - `modules`: the ids of modules that were followed to all that they have.
        """
        if self.profiler_active:
            return "was traced while a profiler ran"
        for code, place in self.called.items():
            if code not in followed and code.co_name != "__del__":
                return f"runs {code.co_qualname}, which no name leads to{quote(place)}"
        for number, (module, method, line) in self.modules.items():
            if number not in modules and number not in self.made:
                return f"calls {method} of a {type(module).__qualname__}{line}"
        return self.opaque_call


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module has hooks, or all modules have hooks for the backward."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or has_backward_hooks(module)


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module, or all modules, have hooks that are called in a backward."""
    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or _modules._global_backward_hooks
        or _modules._global_backward_pre_hooks
    )


def _is_autograd_function(owner: Any) -> bool:
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def _source_file(frame: types.FrameType) -> str:
    """Return the file of a frame's code; for code made by `exec`, the file of its module."""
    file = frame.f_code.co_filename
    if file[:1] != "<" or file.startswith("<frozen "):
        return file
    module = sys.modules.get(frame.f_globals.get("__name__", ""))
    is_of_module = module is not None and vars(module) is frame.f_globals
    return getattr(module, "__file__", None) or file if is_of_module else file
