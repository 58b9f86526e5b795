"""Launch through the driver itself and through Triton's launcher, and compare what both pass, byte
for byte: `compare_launches.py FOLDER` with a `libcuda.so.1` made of fake_cuda.c in it.

A process of its own: its CUDA driver is the fake one.
"""
# ruff: noqa: E402  (the fake driver is there before PyTorch asks for one)

import ctypes
import os
import struct
import sys
import threading
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

CUDA = ctypes.CDLL(f"{sys.argv[1]}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
os.environ["TRITON_LIBCUDA_PATH"] = sys.argv[1]
launches, fails = (ctypes.c_int.in_dll(CUDA, name) for name in ("launches", "fails"))

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher

torch._C._cuda_getCurrentRawStream = lambda device: 0x5000 + device

from triton.runtime import driver

import headway as hw
from headway import backends, inference
from headway.backends import hopper
from headway.backends import triton as portable
from headway.backends.gpu.runtime import call_plan, launcher
from headway.backends.gpu.runtime.cuda_launch import Launch
from headway.backends.hopper import launch_plan as hopper_plan
from headway.backends.slots import write_slots
from headway.resolve import prepare

loads: list[bytes] = []


class Driver(CudaDriver):
    """NVIDIA's, on a card that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.utils = SimpleNamespace(**vars(self.utils))
        self.load, self.utils.load_binary = self.utils.load_binary, self.load_binary
        self.get_current_device = lambda: 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def load_binary(self, name: str, kernel: bytes, *rest: int) -> tuple:
        loads.append(kernel)
        sizes = parameters(kernel, name)
        CUDA.fake_next(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        return self.load(name, kernel, *rest)


def parameters(cubin: bytes, name: str) -> list[int]:
    """The sizes of a kernel's parameters: what the section `.nv.info` says of them."""
    (at,), (size, count, names) = (
        struct.unpack_from(*where) for where in (("<Q", cubin, 40), ("<HHH", cubin, 58))
    )
    sections = [struct.unpack_from("<IIQQQQ", cubin, at + n * size) for n in range(count)]
    found = {}
    for label, _, _, _, p, length in sections:
        title, end = sections[names][4] + label, p + length
        if not cubin.startswith(b".nv.info." + name.encode() + b"\0", title):
            continue
        while p < end:
            form, kind, more = struct.unpack_from("<BBH", cubin, p)
            if form == 4 and kind == 0x17:
                _, ordinal, _, flags = struct.unpack_from("<IHHI", cubin, p + 4)
                found[ordinal] = flags >> 18
            p += 4 + (more if form == 4 else 0)
    return [found[n] for n in range(len(found))]


def seen() -> bytes:
    """The configuration and the parameters of the last launch."""
    to = ctypes.create_string_buffer(1 << 16)
    return to.raw[: CUDA.fake_seen(to)]


compared: dict[str, int] = {}
launch = launcher.KernelLauncher.__call__


def both(self, tensors, given=launcher.NO_ARGUMENTS):
    """Launch both ways."""
    own = self.launch
    if own is None or launcher.dry_runs:
        return launch(self, tensors, given)
    found, before = [], launches.value
    for self.launch in (own, None):
        launch(self, tensors, given)
        found.append(seen())
    self.launch = own
    assert launches.value == before + 2
    assert found[0] == found[1], self.fn
    compared[self.fn.__name__] = compared.get(self.fn.__name__, 0) + 1


def forward(backend, name: str, score=None, width: int = 64):
    """A forward that is like others but for its tensors and the floats of its score."""
    q = torch.randn(1, 2, 200 if width == 64 else 72, width).bfloat16()
    spec, call = prepare(q, q, q, score, hw.causal(), backend=name)
    out, lse, *_ = backend.forward(spec, call)
    return spec, call, out, lse.fill_(0)


def backward(spec, call, out, lse) -> None:
    """A backward of the Hopper backend."""
    hopper.backward(spec, call, out, lse, torch.randn(out.shape).bfloat16(), None, ())


def single() -> None:
    """A forward and a backward of the Triton backend in float32, which takes transposed copies."""
    q = torch.randn(1, 2, 72, 16)
    spec, call = prepare(q, q, q, None, hw.causal(), backend="triton")
    out, lse, *_ = portable.forward(spec, call)
    portable.backward(spec, call, out, lse.fill_(0), q, None, ())


def over_a_cache(n: int) -> None:
    """The same kind of call whatever its lengths, strides and captured integers, which are numbers
    of the launch, as floats are."""
    q = torch.randn(1 + n, 4, 1 + n, 64).bfloat16()
    k = torch.randn(1 + n, 2, 40 + 8 * n, 64).bfloat16()
    mask, lengths = hw.causal() & hw.sliding_window(9 + n), torch.full((1 + n,), 17 + n)
    inference.attention(
        q, k, k.clone(), hw.softcap(20.0 + n), mask, lengths=lengths.int(), backend="triton"
    )


def to_slots(n: int) -> None:
    """The same kind of call whatever the numbers of its tokens and pages, also where float8 is
    copied as bytes."""
    k, v = torch.randn(1 + n, 2, 64).bfloat16(), torch.randn(1 + n, 2, 64).to(torch.float8_e5m2)
    k_cache, v_cache = (torch.zeros(2 + n, 2, 4, 64).to(v.dtype) for _ in range(2))
    write_slots(k, v, k_cache, v_cache, torch.arange(1 + n), torch.rand(2), None)


def kernels() -> list[launcher.KernelLauncher]:
    """Those that are launched directly: the one whose score captures a float is the last."""
    plans = [p for p in call_plan._plans.values() if isinstance(p, call_plan.BasePlan)]
    found = [d for p in plans for d in vars(p).values() if isinstance(d, launcher.KernelLauncher)]
    found += [d for p in plans if hasattr(p, "workspace") for d in p.workspace.kernels.values()]
    launchers = [l for p in plans for l in getattr(p, "launchers", {}).values()]
    return found + [d for l in launchers for d in l.tiled.kernels.values()]


def without_a_launcher() -> None:
    """A first call that is trained makes none of Triton's launchers: each takes a C compiler."""
    q = torch.randn(1, 2, 48, 16).bfloat16().requires_grad_()
    before = launches.value
    with mock.patch.object(CudaLauncher, "__init__", side_effect=RuntimeError("a launcher")):
        out = hw.attention(q, q, q, mask=hw.causal(), backend="triton")
        torch.autograd.grad(out, q, torch.ones_like(out))
    assert launches.value == before + 3
    # Another length is another kind of call, and the same kernels.
    x = torch.randn(1, 2, 80, 16).bfloat16().requires_grad_()
    hw.attention(x, x, x, mask=hw.causal(), backend="triton")
    assert len(loads) == len(set(loads))


def refusals(own: Launch) -> None:
    """What is left to Triton's launcher, which knows what to do or says what is wrong."""
    n, before = own.tensors, launches.value
    assert own(0, [64] * n, [1.0])
    assert not own(0, [64] * (n - 1) + [72], [1.0])  # no multiple of 16
    assert not own(0, [64] * n, [1e39])  # inf in C
    assert launches.value == before + 1
    fails.value = 700
    assert not own(0, [64] * n, [1.0])
    with pytest.raises(RuntimeError, match="as told"):
        forward(portable, "triton", hw.softcap(20.0), 16)
    fails.value = 0


def threads(own: Launch) -> None:
    """Every launch has memory of its own."""
    addresses = [64] * own.tensors
    before = launches.value
    work = lambda: [own(n, addresses, [1.0]) for n in range(500)]
    several = [threading.Thread(target=work) for _ in range(4)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in several:
            step(thread)
    assert launches.value == before + 2000
    assert 1 <= len(own.free_buffers) <= 5
    assert len({id(laid[0]) for laid in own.free_buffers}) == len(own.free_buffers)


with ExitStack() as stack:
    for where, what, by in (
        (portable, "unavailable", lambda *_: ""), (hopper, "unavailable", lambda *_: ""),
        (backends, "_SELF_TESTED", ()), (hopper_plan, "processors", lambda *_: 132),
    ):  # fmt: skip
        stack.enter_context(mock.patch.object(where, what, by))
    driver.set_active(Driver())
    without_a_launcher()
    with mock.patch.object(launcher.KernelLauncher, "__call__", both):
        for n in range(3):
            single()
            over_a_cache(n)
            to_slots(n)
            forward(portable, "triton", hw.softcap(20.0 + n), 16)
            if not hopper.wrong_triton():
                backward(*forward(hopper, "hopper"))
    found = kernels()
    assert all(isinstance(d.launch, Launch) for d in found)
    refusals(found[-1].launch)
    threads(found[-1].launch)
assert compared["infer"] == compared["write_kernel"] == 2
print(compared)
