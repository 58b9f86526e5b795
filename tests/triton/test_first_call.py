"""The first call of a kind: its kernels are compiled side by side, and launched as ever.

The driver is a stand-in for a GPU's: kernels are compiled for it, and launches are written down.
"""

import gc
import subprocess
import sys
import threading
import traceback
from concurrent.futures import wait
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

import headway as hw

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

import triton
from headway.backends import get
from headway.backends.gpu.device import maths
from headway.backends.gpu.runtime import call_plan, parallel_compile
from headway.backends.triton import kernel_backward, kernel_forward, main_loop, tile
from tools.compile_triton import launching

ALL = ["forward", "backward_q", "backward_kv"]


@pytest.fixture(scope="module")
def device():
    with launching("sm_90") as seen:
        yield seen


@pytest.fixture
def compiled(device, monkeypatch):
    """Names of the kernels that are compiled, or read from Triton's cache, and by which thread."""
    call_plan.clear()
    device.clear()
    names: list[tuple[str, int]] = []
    compile_one = JITFunction._do_compile

    def listen(self, *args, **kwargs):
        names.append((self.__name__, threading.get_ident()))
        return compile_one(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "_do_compile", listen)
    for fn in (kernel_forward.forward, kernel_backward.backward_q, kernel_backward.backward_kv):
        fn.device_caches.clear()
    return names


def heads(layout: str = "together") -> torch.Tensor:
    """(1, 2, 32, 16): heads lie beside each other as modules make them, or one after the other."""
    x = torch.randn(1, 32, 2, 16, dtype=torch.bfloat16).transpose(1, 2)
    return x if layout == "together" else x.contiguous()


def attend(layout: str = "together", **options) -> torch.Tensor:
    x = heads(layout).requires_grad_()
    return hw.attention(x, x, x, mask=hw.causal(), backend="triton", **options)


def test_a_call_that_is_trained_compiles_its_kernels_side_by_side(device, compiled, monkeypatch):
    monkeypatch.setattr(
        parallel_compile, "_HEAD_START", 0
    )  # which is enough to read a kernel from a cache
    together, compile_one = threading.Barrier(len(ALL), timeout=600), JITFunction._do_compile
    failed = []  # which the launch would try again

    @contextmanager
    def told(*kinds):
        try:
            yield
        except kinds:
            failed.append(traceback.format_exc())

    def meet(self, *args, **kwargs):
        if threading.get_ident() == here:
            failed.append(f"{self.__name__} was not in the dry run")
        else:
            together.wait()
        try:
            return compile_one(self, *args, **kwargs)
        except Exception:
            failed.append(traceback.format_exc())
            raise

    here = threading.get_ident()
    monkeypatch.setattr(parallel_compile, "suppress", told)
    monkeypatch.setattr(JITFunction, "_do_compile", meet)
    threads = threading.active_count()
    out = attend()
    assert failed == []
    assert sorted(name for name, _ in compiled) == sorted(ALL)
    assert len({thread for _, thread in compiled} - {here}) == len(ALL)
    assert threading.active_count() == threads
    assert [name for name, _ in device.launches] == ALL[:1]
    out.backward(heads())
    assert len(compiled) == 3
    assert [name for name, _ in device.launches] == ALL
    assert not parallel_compile.dry_runs


def test_what_was_begun_is_waited_for_and_compiled_once(device, compiled):
    """As the kernels of a call whose card is being checked."""
    x = heads().requires_grad_()
    spec, call = hw.resolve.prepare(x, x, x, mask=hw.causal(), backend="triton")
    backend = get("triton")
    steps = parallel_compile.steps_of(spec, call, backend.forward, backend.backward)
    with torch.no_grad():
        parallel_compile.precompile(x.device, steps)
    assert parallel_compile._precompiling
    assert device.launches == []
    attend().backward(heads())
    assert not parallel_compile._precompiling
    assert sorted(name for name, _ in compiled) == sorted(ALL)
    assert [name for name, _ in device.launches] == ALL


def test_triton_starts_before_anything_else(compiled, monkeypatch):
    """Its driver's module takes a compiler as long as the rest of the call's preparation."""
    seen = []
    start_triton, fix_cache_keys = call_plan.start_triton, call_plan.fix_cache_keys
    monkeypatch.setattr(call_plan, "start_triton", lambda: seen.append("start") or start_triton())
    monkeypatch.setattr(
        call_plan, "fix_cache_keys", lambda *given: seen.append("keys") or fix_cache_keys(*given)
    )
    attend()
    assert seen[0] == "start"
    assert "keys" in seen


def test_the_dearest_kernels_have_a_head_start(compiled, monkeypatch):
    waits = []
    monkeypatch.setattr(
        parallel_compile, "wait", lambda begun, seconds: wait(begun) and waits.append(seconds)
    )
    attend()
    assert [name for name, _ in compiled] == ALL[::-1]
    assert waits == [parallel_compile._HEAD_START] * len(ALL)


def test_a_gradient_that_lies_otherwise_compiles_the_backward_side_by_side(device, compiled):
    out = attend()
    compiled.clear()
    out.backward(heads("apart"))
    assert sorted(name for name, _ in compiled) == ["backward_kv", "backward_q"]
    assert threading.get_ident() not in [thread for _, thread in compiled]
    assert [name for name, _ in device.launches] == ALL


@pytest.fixture
def finalizers():
    """Garbage is collected all the time, and that lets other threads go on."""
    switch, threshold = sys.getswitchinterval(), gc.get_threshold()

    def finalize(*given):
        for _ in range(100):
            pass

    sys.setswitchinterval(1e-6)
    gc.set_threshold(1)
    gc.callbacks.append(finalize)
    yield
    gc.callbacks.remove(finalize)
    gc.set_threshold(*threshold)
    sys.setswitchinterval(switch)


def test_threads_parse_while_garbage_is_finalized(device, compiled, finalizers):
    attend()
    assert sorted(name for name, _ in compiled) == sorted(ALL)  # none failed and was compiled again
    assert gc.isenabled()


def test_what_is_not_trained_compiles_one_kernel_where_it_is_called(device, compiled):
    x = heads()
    hw.attention(x, x, x, mask=hw.causal(), backend="triton")
    assert compiled == [("infer", threading.get_ident())]


def test_calls_that_differ_in_length_alone_are_rehearsed_once(device, compiled, monkeypatch):
    dry_runs = []
    monkeypatch.setattr(
        parallel_compile, "compile_in_parallel", lambda *given: dry_runs.append(given)
    )
    for length in (48, 80, 112, 81):
        x = torch.randn(1, 2, length, 16, dtype=torch.bfloat16, requires_grad=True)
        hw.attention(x, x, x, backend="triton")
    assert len(dry_runs) == 2  # 48, 80 and 112 are multiples of 16 alike


def test_an_error_of_the_compiler_is_raised_where_the_kernel_is_launched(compiled, monkeypatch):
    run = JITFunction.run

    def fail(self, *args, **kwargs):
        if self is kernel_backward.backward_kv:
            raise ValueError("out of registers")
        return run(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", fail)
    out = attend()
    with pytest.raises(ValueError, match="out of registers"):
        out.backward(heads())
    assert not parallel_compile.dry_runs


def test_a_backward_that_finds_no_memory_does_not_fail_the_forward(device, compiled, monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("headway.backends.triton.launch._backward_q_launcher", full)
    out = attend()
    assert [name for name, _ in device.launches] == ["forward"]
    with pytest.raises(torch.OutOfMemoryError):
        out.backward(heads())
    assert not parallel_compile.dry_runs


def test_a_tile_that_does_not_fit_is_found_out_at_the_launch(device, compiled, monkeypatch):
    """Where a kernel is loaded Triton says that shared memory does not suffice."""
    load = triton.runtime.driver.active.utils.load_binary
    asked = []

    def little(name, *rest):
        asked.append(name)
        if name == "forward" and asked.count(name) < 3:  # the thread's and the launch's
            raise OutOfResources(2, 1, "shared memory")
        return load(name, *rest)

    monkeypatch.setattr(triton.runtime.driver.active.utils, "load_binary", little)
    attend()
    assert asked.count("forward") == 3
    assert [name for name, _ in device.launches] == ["forward"]


def test_keys_of_kernels_do_not_depend_on_what_a_process_calls_first():
    """Else what one process compiled another would not find in Triton's cache."""
    modules = maths, tile, main_loop, kernel_forward, kernel_backward
    functions = [fn for m in modules for fn in vars(m).values() if isinstance(fn, JITFunction)]

    def keys(kernels):
        for fn in functions:
            fn.hash, fn.used_global_vals = None, {}
        parallel_compile._fixed_modules.clear()
        parallel_compile.fix_cache_keys(*modules)
        return {fn.__name__: fn.cache_key for fn in kernels}

    both = [kernel_forward.forward, kernel_backward.backward_kv]
    assert keys(both) == keys(both[::-1])


ENDS = """
import torch
from headway.backends.gpu.runtime import parallel_compile

def compile(*given, **options):
    for _ in range(10_000):
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    with parallel_compile.ThreadPoolExecutor(1) as pool:
        pool.submit(int)

parallel_compile._compile_and_load = compile
parallel_compile._dry_run = lambda steps: []
parallel_compile.precompile(torch.device("cpu"), lambda: None)
"""


def test_a_process_may_end_while_kernels_are_being_compiled_for_it():
    """Python stops daemon threads inside C++: the process then aborts."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
