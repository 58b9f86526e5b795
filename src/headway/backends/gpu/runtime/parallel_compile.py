"""The first call of a kind: its kernels are compiled in parallel.

Triton compiles a kernel at its first launch, a second or more of one core; a forward and a backward
launch four kernels, one after the other. So the first call of a kind is rehearsed: buffers are
allocated, and launches only recorded. Then every kernel has a thread that compiles it (or reads it
from the cache on disk) and loads it. Triton's passes, LLVM and the assembler release Python's lock;
the front end holds it, so where several of Gluon's kernels are to be compiled, each has a process
(`compile_apart.py`).
All threads end before the call goes on and launches as usual. A kernel that failed to compile is
tried again there, and raises its own error. (Kernels that are launched without Triton's launcher
get none, which saves half a second of a C compiler after the slowest kernel.)
"""

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from importlib import import_module
from threading import Lock, Thread, get_ident
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

import triton

from ....surroundings import capturing
from ....types import Spec
from ...base import Call
from .device_guard import on
from .kernel_cache import in_processes, is_ready
from .triton_startup import wait_to_compile


class Recorded(NamedTuple):
    """A launch of a rehearsal.

    - `use_driver`: prepares to launch what is compiled without Triton's launcher; False where that
      is impossible.
    """

    fn: Any
    args: tuple
    options: dict[str, Any]
    use_driver: Callable[[Any], bool] | None

    def compile(self) -> Any:
        """The compiled kernel, which is not loaded."""
        return self.fn.warmup(*self.args, grid=(1, 1, 1), **self.options)

    def ready(self) -> None:
        """Compile the kernel and load it. The launch raises errors again."""
        try:
            compiled = self.compile()
        except Exception:  # noqa: BLE001
            return
        if self.use_driver is None or not self.use_driver(compiled):
            with suppress(OutOfResources):  # the launch takes a smaller tile
                compiled[1, 1, 1]  # loads it


rehearsals: dict[int, list[Recorded]] = {}  # by thread that rehearses
# Threads that rehearse and compile nothing afterwards, and for what room in shared memory.
_looking: dict[int, int | None] = {}
_begun: list[Thread] = []  # that compile for calls to come
_fixed: set[str] = set()  # modules
_lock = Lock()  # each module once, in the order of one thread
# Seconds in which a thread has Python's lock to itself. If all start at once they take turns, and
# none reaches LLVM before all have nearly done so.
_HEAD_START = 0.1
_LATE = "triton.experimental.gluon.nvidia.hopper"  # Triton imports it for its first argument

Forward, Backward = Callable[..., Any], Callable[..., Any]  # of a backend


def compile_training(
    plan: Any, spec: Spec, call: Call, forward: Forward, backward: Backward
) -> None:
    """Compile the kernels of a forward, and of its backward if there will be one."""
    if get_ident() in _looking:
        return
    plan.uncompiled = False
    if _is_trained(spec, call):
        compile_in_parallel(plan.device, steps_of(spec, call, forward, backward))


def compile_backward(plan: Any, backward: Callable[[], object]) -> None:
    """Compile the kernels of a backward."""
    if get_ident() in _looking:
        return
    plan.uncompiled = False
    compile_in_parallel(plan.device, backward)


def steps_of(
    spec: Spec, call: Call, forward: Forward, backward: Backward
) -> Callable[[], object]:  # fmt: skip
    """The forward of a call, and its backward if there will be one.

    The memory layout of the gradient of out is not known yet. It is taken to be q's, as it is where
    modules split and merge heads. Otherwise the backward compiles its own kernels.
    """
    tensors = call.captured.tensors[: spec.score_tensors]

    def steps() -> None:
        out, lse, *_ = forward(spec, call)
        if _is_trained(spec, call):
            needs = tuple([t.requires_grad and t.is_floating_point() for t in tensors])
            with suppress(Exception):  # the backward raises it
                backward(spec, call, out, lse, _like(call.q, call.v.shape[3]), None, needs)

    return steps


def _is_trained(spec: Spec, call: Call) -> bool:
    tensors = call.captured.tensors[: spec.score_tensors]
    return any(x is not None and x.requires_grad for x in (*call[:4], *tensors))


def compile_in_parallel(device: torch.device, steps: Callable[[], object]) -> None:
    """Compile and load the kernels that `steps` launches; nothing runs. Nested calls add theirs to
    the outer one."""
    if get_ident() in rehearsals or capturing(device):
        return
    kernels = _rehearsed(steps)
    if len(kernels) > 1:
        _make_ready(device, kernels)


def begin(device: torch.device, steps: Callable[[], object]) -> None:
    """Begin to compile and load the kernels that `steps` launches, for a call that is to come; the
    first launch of any kernel waits until that is done (`wait_for_begun`)."""
    if get_ident() in rehearsals or capturing(device):
        return
    # No daemon: when a process ends, Python stops daemons inside the compiler's C++, which aborts
    # the process ("terminate called without an active exception").
    begun = Thread(target=_make_ready_ahead, args=(device, _rehearsed(steps)))
    _begun.append(begun)
    begun.start()


def wait_for_begun() -> None:
    """Wait until all that was begun is done."""
    for begun in list(_begun):
        begun.join()
        with suppress(ValueError):  # another thread has waited, too
            _begun.remove(begun)


def look(steps: Callable[[], object], room: int | None = None) -> list[Recorded]:
    """The launches of `steps`, of which nothing runs and nothing is compiled.

    - `room`: bytes of shared memory of a CTA. Every kernel is then compiled, one after the other;
      what needs more is refused, as a launch would refuse it.
    """
    me = get_ident()
    _looking[me] = room
    try:
        with no_garbage_collected:
            return _rehearsed(steps)
    finally:
        del _looking[me]


_STATES = {
    "loaded": "compiled in this process", "cached": "compiled, on disk", "": "to be compiled",
}  # fmt: skip


@torch.no_grad()
def states_of(spec: Spec, call: Call, forward: Forward, backward: Backward) -> list[str]:
    """The kernels of a call, each with whether it is compiled. Nothing is computed."""
    if get_ident() in rehearsals or capturing(call.q.device):
        return []
    kernels = look(steps_of(spec, call, forward, backward))
    wait_to_compile()
    with no_garbage_collected:
        found = [(x.fn.__name__, is_ready(x.fn, x.args, x.options)) for x in kernels]
    return [f"{name}: {_STATES[state]}" for name, state in dict.fromkeys(found)]


def _rehearsed(steps: Callable[[], object]) -> list[Recorded]:
    kernels = rehearsals[get_ident()] = []
    try:
        steps()
    finally:
        del rehearsals[get_ident()]
    return kernels


def _make_ready(
    device: torch.device, kernels: Sequence[Recorded], apart: bool = False
) -> None:  # fmt: skip
    """Compile and load kernels, each in a thread; with `apart`, or if there are several of Gluon,
    these each in a process."""
    # Done once here and not by every thread, and while Triton starts.
    with suppress(Exception):
        import_module(_LATE)
    wait_to_compile()
    # In reverse order: the last ones take longest.
    gluon = [kernel for kernel in kernels[::-1] if kernel.fn.is_gluon()]
    rest = [kernel for kernel in kernels[::-1] if not kernel.fn.is_gluon()]
    apart = apart or len(gluon) > 1
    with no_garbage_collected, ThreadPoolExecutor(max(len(kernels), 1)) as pool:
        begun = []
        for kernel in (*gluon, *rest):
            begun.append(pool.submit(_on, device, kernel.ready, apart))
            if not (apart and kernel.fn.is_gluon()):
                wait(begun[-1:], _HEAD_START)
        for compiling in begun:
            compiling.result()


def _make_ready_ahead(device: torch.device, kernels: Sequence[Recorded]) -> None:
    """`_make_ready` while other work goes on."""
    with suppress(RuntimeError):  # the process ends: no pool takes more work
        _make_ready(device, kernels, apart=True)


def record_launch(
    fn: Any, args: tuple, options: dict[str, Any], use_driver: Callable[[Any], bool] | None
) -> None:
    """Record a launch of the rehearsal; the interpreter compiles nothing."""
    if isinstance(fn, triton.JITFunction):
        found = Recorded(fn, args, options, use_driver)
        room = _looking.get(get_ident())
        if room is not None and (needed := found.compile().metadata.shared) > room:
            raise OutOfResources(needed, room, "shared memory")
        rehearsals[get_ident()].append(found)


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


no_garbage_collected = _NoGarbageCollected()


def _on(device: torch.device, call: Callable[[], None], apart: bool) -> None:
    with on(device), in_processes() if apart else nullcontext():
        call()


def _like(q: Tensor, width: int) -> Tensor:
    """A gradient of out with the memory layout of q."""
    b, h, length = q.shape[:3]
    if q.stride(1) < q.stride(2):
        return q.new_empty(b, length, h, width).transpose(1, 2)
    return q.new_empty(b, h, length, width)
