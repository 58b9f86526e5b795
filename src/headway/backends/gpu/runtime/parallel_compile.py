"""Compile all kernels of a first call in parallel: 2.5 s, not 6.4, on an H200 (docs/lab/runs.md).

Triton compiles a kernel at its first launch, which takes seconds of one core. A forward and a
backward launch four kernels, one after the other. So the first call of a kind does a dry run:
buffers are allocated, and launches only recorded. Then one thread per kernel compiles it, or reads
it from the cache on disk, and loads it. Triton's passes, LLVM and the assembler release Python's
lock. The front end holds it, so several Gluon kernels get a process each (`compile_apart.py`).

The call waits for all threads, then launches as usual. A kernel that failed to compile is tried
again by its launch, which raises the error.
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
from .kernel_cache import in_processes, state_of
from .triton_startup import wait_for_triton


class RecordedLaunch(NamedTuple):
    """A launch of a dry run.

    - `use_driver`: prepare launches of the compiled kernel without Triton's launcher; False if that
      is impossible.
    """

    fn: Any
    args: tuple
    options: dict[str, Any]
    use_driver: Callable[[Any], bool] | None

    def compile(self) -> Any:
        """Compile the kernel without loading it, and return it."""
        return self.fn.warmup(*self.args, grid=(1, 1, 1), **self.options)

    def compile_and_load(self) -> None:
        """Compile the kernel and load it. The launch raises errors again."""
        try:
            compiled = self.compile()
        except Exception:  # noqa: BLE001
            return
        if self.use_driver is None or not self.use_driver(compiled):
            with suppress(OutOfResources):  # the launch takes a smaller tile
                compiled[1, 1, 1]  # loads it


dry_runs: dict[int, list[RecordedLaunch]] = {}  # by thread
# Threads in `inspect_launches`, and the shared memory that their kernels may have.
_inspecting: dict[int, int | None] = {}
_precompiling: list[Thread] = []  # threads that compile kernels of later calls
_fixed_modules: set[str] = set()
_fixed_lock = Lock()  # one thread fixes each module once
# Seconds in which a thread has Python's lock to itself. If all start at once they take turns, and
# none reaches LLVM before all have nearly done so.
_HEAD_START = 0.1
_LATE_IMPORT = "triton.experimental.gluon.nvidia.hopper"  # by Triton, for its first argument

BackendForward, BackendBackward = Callable[..., Any], Callable[..., Any]


def compile_training(
    plan: Any, spec: Spec, call: Call, forward: BackendForward, backward: BackendBackward
) -> None:
    """Compile the kernels of a forward, and of its backward if there will be one."""
    if get_ident() in _inspecting:
        return
    plan.uncompiled = False
    if _is_trained(spec, call):
        compile_in_parallel(plan.device, steps_of(spec, call, forward, backward))


def compile_backward(plan: Any, backward: Callable[[], object]) -> None:
    """Compile the kernels of a backward."""
    if get_ident() in _inspecting:
        return
    plan.uncompiled = False
    compile_in_parallel(plan.device, backward)


def steps_of(
    spec: Spec, call: Call, forward: BackendForward, backward: BackendBackward
) -> Callable[[], object]:  # fmt: skip
    """Return a function that runs the forward of a call, and its backward if there will be one.

    The memory layout of the gradient of out is unknown yet. It is assumed to be q's, as in modules
    that split and merge heads. For another layout the backward compiles its own kernels.
    """
    tensors = call.captured.tensors[: spec.score_tensors]

    def steps() -> None:
        out, lse, *_ = forward(spec, call)
        if _is_trained(spec, call):
            needs = tuple([t.requires_grad and t.is_floating_point() for t in tensors])
            dout = _empty_like_q(call.q, call.v.shape[3])
            with suppress(Exception):  # the backward raises it
                backward(spec, call, out, lse, dout, None, needs)

    return steps


def _is_trained(spec: Spec, call: Call) -> bool:
    inputs = call.q, call.k, call.v, call.sink, *call.captured.tensors[: spec.score_tensors]
    return any(tensor is not None and tensor.requires_grad for tensor in inputs)


def compile_in_parallel(device: torch.device, steps: Callable[[], object]) -> None:
    """Compile and load the kernels that `steps` launches, without running them. A call within
    `steps` adds its kernels to the outer ones."""
    if get_ident() in dry_runs or capturing(device):
        return
    launches = _dry_run(steps)
    if len(launches) > 1:
        _compile_and_load(device, launches)


def precompile(device: torch.device, steps: Callable[[], object]) -> None:
    """Start to compile and load the kernels that `steps` launches, for a later call. The first
    launch of any kernel waits for them (`wait_for_precompiled`)."""
    if get_ident() in dry_runs or capturing(device):
        return
    # No daemon: when a process ends, Python stops daemons inside the compiler's C++, which aborts
    # the process ("terminate called without an active exception").
    thread = Thread(target=_compile_in_background, args=(device, _dry_run(steps)))
    _precompiling.append(thread)
    thread.start()


def wait_for_precompiled() -> None:
    """Wait until everything that `precompile` started is compiled."""
    for thread in list(_precompiling):
        thread.join()
        with suppress(ValueError):  # another thread has waited, too
            _precompiling.remove(thread)


def inspect_launches(
    steps: Callable[[], object], shared_memory: int | None = None
) -> list[RecordedLaunch]:
    """Return the launches of `steps`, without running or compiling any.

    - `shared_memory`: bytes that a CTA may have. If given, every kernel is compiled, one after the
      other, and refused as its launch would be if it needs more.
    """
    thread_id = get_ident()
    _inspecting[thread_id] = shared_memory
    try:
        with no_garbage_collected:
            return _dry_run(steps)
    finally:
        del _inspecting[thread_id]


_STATES = {
    "loaded": "compiled in this process", "cached": "compiled, on disk", "": "to be compiled",
}  # fmt: skip


@torch.no_grad()
def compile_states(
    spec: Spec, call: Call, forward: BackendForward, backward: BackendBackward
) -> list[str]:
    """Return a line for every kernel of a call that says whether it is compiled. Nothing runs."""
    if get_ident() in dry_runs or capturing(call.q.device):
        return []
    launches = inspect_launches(steps_of(spec, call, forward, backward))
    wait_for_triton()
    with no_garbage_collected:
        states = [(one.fn.__name__, state_of(one.fn, one.args, one.options)) for one in launches]
    return [f"{name}: {_STATES[state]}" for name, state in dict.fromkeys(states)]


def _dry_run(steps: Callable[[], object]) -> list[RecordedLaunch]:
    launches = dry_runs[get_ident()] = []
    try:
        steps()
    finally:
        del dry_runs[get_ident()]
    return launches


def _compile_and_load(
    device: torch.device, launches: Sequence[RecordedLaunch], in_background: bool = False
) -> None:  # fmt: skip
    """Compile and load kernels, each in a thread. Gluon kernels get a process each if there are
    several, or if the call goes on meanwhile."""
    # Imported once, and not by every thread at the same time.
    with suppress(Exception):
        import_module(_LATE_IMPORT)
    wait_for_triton()
    # In reverse order: the last ones take longest.
    gluon = [launch for launch in launches[::-1] if launch.fn.is_gluon()]
    others = [launch for launch in launches[::-1] if not launch.fn.is_gluon()]
    use_processes = in_background or len(gluon) > 1
    with no_garbage_collected, ThreadPoolExecutor(max(len(launches), 1)) as pool:
        compilations = []
        for launch in (*gluon, *others):
            compilations.append(pool.submit(_compile_on, device, launch, use_processes))
            if not (use_processes and launch.fn.is_gluon()):
                wait(compilations[-1:], _HEAD_START)
        for compilation in compilations:
            compilation.result()


def _compile_in_background(device: torch.device, launches: Sequence[RecordedLaunch]) -> None:
    with suppress(RuntimeError):  # the process ends: no pool takes more work
        _compile_and_load(device, launches, in_background=True)


def record_launch(
    fn: Any, args: tuple, options: dict[str, Any], use_driver: Callable[[Any], bool] | None
) -> None:
    """Record a launch of the dry run; the interpreter compiles nothing."""
    if isinstance(fn, triton.JITFunction):
        launch = RecordedLaunch(fn, args, options, use_driver)
        limit = _inspecting.get(get_ident())
        if limit is not None and (needed := launch.compile().metadata.shared) > limit:
            raise OutOfResources(needed, limit, "shared memory")
        dry_runs[get_ident()].append(launch)


def fix_cache_keys(*modules: ModuleType) -> None:
    """Compute Triton's cache keys of all functions of some modules now, in this order.

    The key of a function contains the constants of the functions it calls only if those have keys
    already. If keys depended on the order of calls, a process would miss kernels that an earlier
    one left in Triton's cache.
    """
    with _fixed_lock:
        for module in modules:
            if module.__name__ in _fixed_modules:
                continue
            _fixed_modules.add(module.__name__)
            for fn in list(vars(module).values()):
                if isinstance(fn, triton.JITFunction) and fn.__module__ == module.__name__:
                    fn.cache_key  # noqa: B018


class _NoGarbageCollected:
    """A context that disables garbage collection until the last thread has left it.

    Triton parses the kernels' source. A collection meanwhile runs finalizers, which let other
    threads run. CPython (seen with 3.11) counts the depth of all threads' parsers in one number,
    and raises "AST constructor recursion depth mismatch".
    """

    def __init__(self) -> None:
        self.lock, self.threads, self.was_enabled = Lock(), 0, False

    def __enter__(self) -> None:
        with self.lock:
            if not self.threads:
                self.was_enabled = gc.isenabled()
                gc.disable()
            self.threads += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.threads -= 1
            if not self.threads and self.was_enabled:
                gc.enable()


no_garbage_collected = _NoGarbageCollected()


def _compile_on(device: torch.device, launch: RecordedLaunch, in_process: bool) -> None:
    with on(device), in_processes() if in_process else nullcontext():
        launch.compile_and_load()


def _empty_like_q(q: Tensor, width: int) -> Tensor:
    """Return an empty gradient of out with the memory layout of q."""
    b, h, q_len = q.shape[:3]
    if q.stride(1) < q.stride(2):
        return q.new_empty(b, q_len, h, width).transpose(1, 2)
    return q.new_empty(b, h, q_len, width)
