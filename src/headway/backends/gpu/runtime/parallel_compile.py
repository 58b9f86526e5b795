"""The first call of a kind: its kernels are compiled side by side.

Triton compiles a kernel when it is first launched, a second or more of one core each, and a forward
and a backward launch four, one after the other. So the first call of a kind is rehearsed: buffers
are allocated, and launches only written down. Then every kernel has a thread that compiles it (or
reads it from Triton's cache) and loads it; Triton's passes, LLVM and the assembler leave Python's
lock to the others. All threads have ended before the call goes on and launches as ever: what could
not be compiled is tried again there, and fails with its own error. (Where launches do without
Triton's launcher none is made: a C compiler's half a second, after the dearest kernel's own time.)
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
from .triton_startup import able_to_compile

# By thread that rehearses: what would compile and load the kernels of its launches.
rehearsals: dict[int, list[Callable[[], None]]] = {}
_settled: set[str] = set()  # modules
_turn = Lock()  # to settle them: each once, in one thread's order
# Seconds in which a thread has Python's lock to itself. All at once, they take turns there, and
# none comes to LLVM before all have nearly done so.
_HEAD_START = 0.1
_LATE = "triton.experimental.gluon.nvidia.hopper"  # Triton imports it for its first argument


def compile_training(
    plan: Any, spec: Spec, call: Call, forward: Callable[..., Any], backward: Callable[..., Any]
) -> None:
    """Compile the kernels of a forward and of the backward that will follow, if one will.

    How the gradient of out will lie in memory nobody knows yet: as q does, which is so where
    modules take heads apart and put them together again. Otherwise the backward compiles its own.
    """
    plan.uncompiled = False
    tensors = call.captured.tensors[: spec.score_tensors]
    if not any(x is not None and x.requires_grad for x in (*call[:4], *tensors)):
        return

    def steps() -> None:
        out, lse, *_ = forward(spec, call)
        needs = tuple([t.requires_grad and t.is_floating_point() for t in tensors])
        with suppress(Exception):  # which is the backward's to raise
            backward(spec, call, out, lse, _like(call.q, call.v.shape[3]), None, needs)

    side_by_side(plan.device, steps)


def compile_backward(plan: Any, backward: Callable[[], object]) -> None:
    """Compile the kernels of a backward."""
    plan.uncompiled = False
    side_by_side(plan.device, backward)


def side_by_side(device: torch.device, steps: Callable[[], object]) -> None:
    """Compile and load what `steps` launches; nothing runs. Within other steps they are theirs."""
    if get_ident() in rehearsals or capturing(device):
        return
    kernels = rehearsals[get_ident()] = []
    try:
        steps()
    finally:
        del rehearsals[get_ident()]
    if len(kernels) > 1:
        # What is done once is not done by every thread, and what can be while Triton starts.
        with suppress(Exception):
            import_module(_LATE)
        able_to_compile()
        with _no_garbage_collected, ThreadPoolExecutor(len(kernels)) as pool:
            # Backwards: the last ones take longest.
            begun = []
            for ready in kernels[::-1]:
                begun.append(pool.submit(_on, device, ready))
                wait(begun[-1:], _HEAD_START)
            for compiling in begun:
                compiling.result()


def write_down(
    fn: Any, args: tuple, options: dict[str, Any], known: Callable[[Any], bool] | None
) -> None:
    """A launch of the rehearsal; interpreters compile nothing.

    - `known`: prepares to launch what is compiled without Triton's launcher; False where that
      cannot be.
    """

    def ready() -> None:
        try:
            compiled = fn.warmup(*args, grid=(1, 1, 1), **options)
        except Exception:  # noqa: BLE001  (the launch will raise it again)
            return
        if known is None or not known(compiled):
            with suppress(OutOfResources):  # the launch will find that out, and take a smaller tile
                compiled[1, 1, 1]  # loads it

    if isinstance(fn, triton.JITFunction):
        rehearsals[get_ident()].append(ready)


def settle(*modules: ModuleType) -> None:
    """Let Triton work out the keys of all functions of some modules now, in this order.

    The key of a function holds the constants of what it calls where that has a key already, and
    else does not: were it left to the order of calls, the kernels of a process would be others than
    those that an earlier one left in Triton's cache.
    """
    with _turn:
        for module in modules:
            if module.__name__ in _settled:
                continue
            _settled.add(module.__name__)
            for fn in list(vars(module).values()):
                if isinstance(fn, triton.JITFunction) and fn.__module__ == module.__name__:
                    fn.cache_key  # noqa: B018


class _NoGarbageCollected:
    """Triton parses what it compiles. Where garbage is collected meanwhile, finalizers let other
    threads go on, and CPython (seen with 3.11), which counts the depth of what all threads parse
    as one number, gives up: "AST constructor recursion depth mismatch". Until the last of the
    threads that are here has left: there is one collector for all."""

    def __init__(self) -> None:
        self.turn, self.inside, self.collects = Lock(), 0, False

    def __enter__(self) -> None:
        with self.turn:
            if not self.inside:
                self.collects = gc.isenabled()
                gc.disable()
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.turn:
            self.inside -= 1
            if not self.inside and self.collects:
                gc.enable()


_no_garbage_collected = _NoGarbageCollected()


def _on(device: torch.device, call: Callable[[], None]) -> None:
    with on(device):
        call()


def _like(q: Tensor, width: int) -> Tensor:
    """A gradient of out whose heads lie as q's do."""
    b, h, length = q.shape[:3]
    if q.stride(1) < q.stride(2):
        return q.new_empty(b, length, h, width).transpose(1, 2)
    return q.new_empty(b, h, length, width)
