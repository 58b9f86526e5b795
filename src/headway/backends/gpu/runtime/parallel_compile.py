"""The first call of a kind: its kernels are compiled in parallel.

Triton compiles a kernel at its first launch, a second or more of one core; a forward and a backward
launch four kernels, one after the other. So the first call of a kind is rehearsed: buffers are
allocated, and launches only recorded. Then every kernel has a thread that compiles it (or reads it
from Triton's cache) and loads it. Triton's passes, LLVM and the assembler release Python's lock.
All threads end before the call goes on and launches as usual. A kernel that failed to compile is
tried again there, and raises its own error. (Kernels that are launched without Triton's launcher
get none, which saves half a second of a C compiler after the slowest kernel.)
"""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from importlib import import_module
from threading import Lock, get_ident
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

import triton

from ....types import Spec
from ...base import Call
from .device_guard import capturing, on
from .triton_startup import wait_to_compile

# By thread that rehearses: functions that compile and load the kernels of its launches.
rehearsals: dict[int, list[Callable[[], None]]] = {}
_fixed: set[str] = set()  # modules
_lock = Lock()  # each module once, in the order of one thread
# Seconds in which a thread has Python's lock to itself. If all start at once they take turns, and
# none reaches LLVM before all have nearly done so.
_HEAD_START = 0.1
_LATE = "triton.experimental.gluon.nvidia.hopper"  # Triton imports it for its first argument


def compile_training(
    plan: Any, spec: Spec, call: Call, forward: Callable[..., Any], backward: Callable[..., Any]
) -> None:
    """Compile the kernels of a forward, and of its backward if there will be one.

    The memory layout of the gradient of out is not known yet. It is taken to be q's, as it is where
    modules split and merge heads. Otherwise the backward compiles its own kernels.
    """
    plan.uncompiled = False
    tensors = call.captured.tensors[: spec.score_tensors]
    if not any(x is not None and x.requires_grad for x in (*call[:4], *tensors)):
        return

    def steps() -> None:
        out, lse, *_ = forward(spec, call)
        needs = tuple([t.requires_grad and t.is_floating_point() for t in tensors])
        with suppress(Exception):  # the backward raises it
            backward(spec, call, out, lse, _like(call.q, call.v.shape[3]), None, needs)

    compile_in_parallel(plan.device, steps)


def compile_backward(plan: Any, backward: Callable[[], object]) -> None:
    """Compile the kernels of a backward."""
    plan.uncompiled = False
    compile_in_parallel(plan.device, backward)


def compile_in_parallel(device: torch.device, steps: Callable[[], object]) -> None:
    """Compile and load the kernels that `steps` launches; nothing runs. Nested calls add theirs to
    the outer one."""
    if get_ident() in rehearsals or capturing(device):
        return
    kernels = rehearsals[get_ident()] = []
    try:
        steps()
    finally:
        del rehearsals[get_ident()]
    if len(kernels) > 1:
        # Done once here and not by every thread, and while Triton starts.
        with suppress(Exception):
            import_module(_LATE)
        wait_to_compile()
        with _no_garbage_collected, ThreadPoolExecutor(len(kernels)) as pool:
            # In reverse order: the last ones take longest.
            begun = []
            for ready in kernels[::-1]:
                begun.append(pool.submit(_on, device, ready))
                wait(begun[-1:], _HEAD_START)
            for compiling in begun:
                compiling.result()


def record_launch(
    fn: Any, args: tuple, options: dict[str, Any], use_driver: Callable[[Any], bool] | None
) -> None:
    """Record a launch of the rehearsal; the interpreter compiles nothing.

    - `known`: prepares to launch what is compiled without Triton's launcher; False where that
      is impossible.
    """

    def ready() -> None:
        try:
            compiled = fn.warmup(*args, grid=(1, 1, 1), **options)
        except Exception:  # noqa: BLE001  (the launch will raise it again)
            return
        if use_driver is None or not use_driver(compiled):
            with suppress(OutOfResources):  # the launch raises it again, and takes a smaller tile
                compiled[1, 1, 1]  # loads it

    if isinstance(fn, triton.JITFunction):
        rehearsals[get_ident()].append(ready)


def fix_cache_keys(*modules: ModuleType) -> None:
    """Let Triton compute the cache keys of all functions of some modules now, in this order.

    The key of a function contains the constants of the functions it calls if those have keys
    already, and else does not. If keys depended on the order of calls, a process would not find the
    kernels that an earlier one left in Triton's cache.
    """
    with _lock:
        for module in modules:
            if module.__name__ in _fixed:
                continue
            _fixed.add(module.__name__)
            for fn in list(vars(module).values()):
                if isinstance(fn, triton.JITFunction) and fn.__module__ == module.__name__:
                    fn.cache_key  # noqa: B018


class _NoGarbageCollected:
    """Inside, garbage is not collected, until the last thread has left: all share one collector.

    Triton parses the kernels' source. If garbage is collected meanwhile, finalizers let other
    threads run. CPython (seen with 3.11) counts the depth of all threads' parsers in one number,
    and raises "AST constructor recursion depth mismatch".
    """

    def __init__(self) -> None:
        self.lock, self.inside, self.collects = Lock(), 0, False

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.collects = gc.isenabled()
                gc.disable()
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside and self.collects:
                gc.enable()


_no_garbage_collected = _NoGarbageCollected()


def _on(device: torch.device, call: Callable[[], None]) -> None:
    with on(device):
        call()


def _like(q: Tensor, width: int) -> Tensor:
    """A gradient of out with the memory layout of q."""
    b, h, length = q.shape[:3]
    if q.stride(1) < q.stride(2):
        return q.new_empty(b, length, h, width).transpose(1, 2)
    return q.new_empty(b, h, length, width)
