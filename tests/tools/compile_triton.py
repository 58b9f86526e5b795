"""Compile what a call would launch, for a GPU that is not there: registers, spills, shared memory.

`python tests/tools/compile_triton.py sm_90 bf16_128` prints the bytes that the kernels of a causal call spill, and how often loops
touch them; with two widths, as in `bf16_72_40`, of a forward without a mask whose heads begin anywhere;
with `entropy` before them, of a causal call with the entropy and its gradient; with `expect`, of the
mean of a distance; with `tangent`, of one
with a soft cap and tangents; with `alone`, where only k, only v, or only the sink moves; with `one`, of
forward and backward of one query, and of one key. It fails where machine code reads what nothing wrote, where a tile always stands at the same place (`fixed`), and where reads
are taken for dead (`lost`).

The real launching code runs on tensors on the CPU, with a driver that only names a target; every
launch is compiled, and none runs.
"""

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))

import headway as hw
from headway.backends import triton as backend
from headway.backends.gpu.runtime import call_plan
from headway.resolve import prepare
from headway.row_statistics.scores import Observing
from headway.types import Tangents
from tools.assembler import assembled, up_to_ptx
from tools.emulator import launch as emulated
from tools.sass import in_flight, spilled, unwritten

# Name: target, and bytes of shared memory that a program may have.
TARGETS = emulated.TARGETS | {
    "sm_89": (GPUTarget("cuda", 89, 32), 101376),
    "sm_120": (GPUTarget("cuda", 120, 32), 101376),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65536),
    "gfx950": (GPUTarget("hip", "gfx950", 64), 163840),
}


class Compiled(NamedTuple):
    name: str
    registers: int
    spills: int  # bytes stored
    shared: int
    inside: int = 0  # accesses to spilled registers in the innermost loops, of sm_80 and sm_90
    faults: tuple[str, ...] = ()


class _Driver:
    """As much of a driver as compiling needs; launches are only written down."""

    def __init__(self, target: GPUTarget, shared: int = 0, device: int = 0):
        self.target, self.device = target, device
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": shared},
            load_binary=lambda *kernel: ("module", 0, 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def launcher_cls(self, src, metadata):
        def launch(x, y, z, stream, function, packed, launch_metadata, enter, exit, *arguments):
            Launched.now.launches.append((metadata.name, arguments))
            if enter is not None:
                enter(launch_metadata)

        return launch

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


class Launched:
    """What was launched, and how many of the launches Triton prepared.

    `now` is the one that is looked at: Triton keeps what it compiled, with its launcher.
    """

    now: "Launched"

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple]] = []
        self.through_triton = 0

    def clear(self) -> None:
        self.launches.clear()
        self.through_triton = 0


@contextmanager
def launching(name: str):
    """Inside, calls on CPU tensors compile for the target and launch on a stand-in for it."""
    target, shared = TARGETS[name]
    launched, run = Launched(), JITFunction.run
    Launched.now = launched

    def count(self, *args, **kwargs):
        launched.through_triton += not kwargs["warmup"]
        return run(self, *args, **kwargs)

    before = driver._active
    driver.set_active(_Driver(target, shared))
    try:
        with (
            up_to_ptx(),
            mock.patch.object(JITFunction, "run", count),
            mock.patch.object(backend, "unavailable", return_value=""),
        ):
            yield launched
    finally:
        driver._active = before
        call_plan.clear()


@contextmanager
def compiling(name: str, kernels: list):
    """Inside, launches compile for the target and append (kernel's name, compiled) to `kernels`."""
    target, shared = TARGETS[name]
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        if warmup:  # beside others, before it is launched
            return run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        if compiled.metadata.shared > shared:
            raise OutOfResources(compiled.metadata.shared, shared, "shared memory")
        kernels.append((self.__name__, compiled))

    with ExitStack() as stack:
        stack.callback(setattr, driver, "_active", driver._active)
        # What Triton has compiled it keeps by device.
        driver.set_active(_Driver(target, device=2000 + [*TARGETS].index(name)))
        call_plan.clear()
        stack.callback(call_plan.clear)
        for where, what, by in (
            (JITFunction, "run", compile_only),
            (backend, "unavailable", lambda *device: ""),
        ):
            stack.enter_context(mock.patch.object(where, what, by))
        yield


def resources(name: str, make: Callable[[], None]) -> list[Compiled]:
    """What the launches that `make` would do need on a target."""
    kernels: list = []
    with up_to_ptx(), compiling(name, kernels):
        make()
    return [_resources(name, kernel, compiled) for kernel, compiled in kernels]


def _resources(target: str, name: str, compiled) -> Compiled:
    shared, faults = compiled.metadata.shared, lost(compiled.asm["ttir"], compiled.asm["ttgir"])
    named = lambda: tuple(f"{name}: {fault}" for fault in faults)
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        registers = max(map(int, re.findall(r"\.vgpr_count:\s+(\d+)", text)))
        spills = int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)[0])
        return Compiled(name, registers, spills, shared, 0, named())
    faults += fixed(compiled.asm["ttgir"]) + conflicting(compiled.asm["ttgir"])
    report, code = assembled(compiled)
    inside = spilled(code) if target in ("sm_80", "sm_90") else 0
    if target == "sm_90":
        faults += unwritten(code) + in_flight(code)
    return Compiled(
        name,
        int(re.search(r"Used (\d+) registers", report)[1]),
        int(re.search(r"(\d+) bytes spill stores", report)[1]),
        shared,
        inside,
        named(),
    )


def lost(ttir: str, ttgir: str) -> list[str]:
    """Reads of single numbers, such as where a run of tiles begins, that passes have taken for dead.

    Triton 3.6 does so with what a loop carries and what nothing but the bounds of loops within depend
    on (triton-lang/triton#9036): they keep the bounds that they had in the first round.
    """
    before, after = (len(re.findall(r"tt\.load .*: !tt\.ptr<", text)) for text in (ttir, ttgir))
    return [f"{before - after} of {before} reads are gone"] if after < before else []


def fixed(ttgir: str) -> list[str]:
    """Products on Hopper whose right factor is not in a ring of tiles that loads fill ahead.

    It stands at the same place in every round then, ptxas works out what it needs of that before the
    loop, and that of CUDA 12.8 gets it wrong (`sass.py`). So it does where a length of 1 is a
    constant, and the loop is gone.
    """
    made: dict[str, tuple[str, str]] = {}
    found = []
    for line in ttgir.splitlines():
        if new := re.match(r"\s*(%\w+)\S* = (?:\S+ = )?([\w.]+) (%\w+)?", line):
            made[new[1]] = new[2], new[3]
        if product := re.search(r"warp_group_dot %\S+, (%\w+)", line):
            by, of = made[product[1]]
            while by in ("ttg.memdesc_trans", "ttg.memdesc_reinterpret"):
                by, of = made[of]
            if by != "ttg.memdesc_index":
                found.append(f"{product[0]} from {by}")
    return found


def conflicting(ttgir: str) -> list[str]:
    """Right factors that tensor cores do not multiply, and whose columns lie one behind the other in
    shared memory: threads that are neighbours read neighbouring columns, all from the same banks."""
    column = re.findall(r"^(#\w+) = #ttg\.swizzled_shared<.*order = \[0, 1\]", ttgir, re.M)
    read = re.findall(
        r"(%\w+) = ttg\.local_load .*memdesc<\w+, (#\w+),.*opIdx = 1, parent = #blocked", ttgir
    )
    return [f"{factor} column by column" for factor, layout in read if layout in column]


def causal(width: int, dtype: torch.dtype, entropy: bool = False) -> None:
    """The launches of a causal call, forward and backward."""
    q = torch.randn(2, 4, 256, width).to(dtype)
    spec, call = prepare(q, q, q, None, hw.causal(), backend="triton", entropy=entropy)
    rows = torch.zeros(q.shape[:3])
    backend.forward(spec, call)
    backend.backward(spec, call, q, rows, q, rows, (), rows if entropy else None)


def expect(width: int, dtype: torch.dtype) -> None:
    """The launches of a causal mean, forward and backward."""
    q, rows = torch.randn(2, 4, 256, width).to(dtype), torch.zeros(2, 4, 256)
    score = Observing(None, lambda s, b, h, i, j: (i - j) * s)
    spec, call = prepare(q, q, q[..., :0], score, hw.causal(), backend="triton", entropy=True)
    backend.forward(spec, call)
    backend.backward(spec, call, call.v, rows, call.v, rows, (), rows)


def odd(d: int, dv: int, dtype: torch.dtype) -> None:
    """A forward without a mask, of a length that leaves heads at multiples of 8."""
    q, k, v = (torch.randn(1, 4, 333, w).to(dtype) for w in (d, d, dv))
    backend.forward(*prepare(q, k, v, backend="triton"))


def one(d: int, dv: int, dtype: torch.dtype) -> None:
    """The launches of one query over 113 keys, then of 113 queries over one key."""
    for q_len, kv_len in ((1, 113), (113, 1)):
        sizes = (q_len, d), (kv_len, d), (kv_len, dv), (q_len, dv)
        q, k, v, out = (torch.randn(1, 3, *size).to(dtype) for size in sizes)
        spec, call = prepare(q, k, v, backend="triton")
        rows = torch.zeros(q.shape[:3])
        backend.forward(spec, call)
        backend.backward(spec, call, out, rows, out, rows, ())


def tangent(width: int, dtype: torch.dtype) -> None:
    """The launch of a causal call with a soft cap, of which q, k and v move."""
    q = torch.randn(2, 4, 256, width).to(dtype)
    spec, call = prepare(q, q, q, hw.softcap(30.0), hw.causal(), backend="triton")
    backend.tangent(spec, call, Tangents(q, q, q, None, (None,) * spec.score_tensors))


def alone(width: int, dtype: torch.dtype) -> None:
    """The launches of calls without a score of which only k, only v, or only the sink moves."""
    q, sink = torch.randn(2, 4, 256, width).to(dtype), torch.zeros(4)
    spec, call = prepare(q, q, q, sink=sink, backend="triton")
    for along in ((None, q, None, None), (None, None, q, None), (None, None, None, sink)):
        backend.tangent(spec, call, Tangents(*along, ()))


DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def report(target: str, call: str) -> list[Compiled]:
    """The kernels of a call, as it is named on the command line."""
    *name, widths = re.split(r"(?<=one|ent|opy|ect)_", call)
    dtype, *widths = widths.split("_")
    make = causal if len(widths) == 1 else odd
    if name:
        with_entropy = partial(causal, entropy=True)
        makers = {"alone": alone, "entropy": with_entropy, "expect": expect, "one": one}
        make = (makers | {"tangent": tangent})[name[0]]
    return resources(target, lambda: make(*map(int, widths), DTYPES[dtype]))


if __name__ == "__main__":
    found = report(*sys.argv[1:])
    print(*found, sep="\n")
    sys.exit("\n".join(fault for kernel in found for fault in kernel.faults) or None)
