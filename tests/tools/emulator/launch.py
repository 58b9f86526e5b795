"""A driver for Triton that launches here: `emulating("sm_80")`."""

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from headway import backends
from headway.backends.gpu.runtime import call_plan
from headway.backends.gpu.runtime.cuda_launch import _FORMATS
from headway.backends.gpu.runtime.cuda_launch import _flatten as flat

from ..assembler import up_to_ptx
from .copies import Map
from .machine import Machine
from .memory import Global
from .source import parse
from .tensor_memory import COLUMNS
from .values import Fault

PROCESSORS = 2
# Name: target, and bytes of shared memory that a CTA may have.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 166912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232448),
    "sm_100": (GPUTarget("cuda", 100, 32), 232448),
}


class _Driver:
    """As much of a driver as compiling needs."""

    def __init__(self, target: GPUTarget, shared: int) -> None:
        self.target = target
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": shared},
        )

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # what Triton has compiled it keeps by device

    def get_current_stream(self, device: int) -> int:
        return 0


def _as_it_is(ptx: str) -> str:
    return ptx


class Without:
    """An edit that takes away what a pattern finds, line by line, and counts it."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.count = pattern, 0

    def __call__(self, ptx: str) -> str:
        ptx, found = re.subn(self.pattern, "", ptx, flags=re.M)
        self.count += found
        return ptx


@contextmanager
def emulating(
    name: str, backend: Any, edit: Callable[[str], str] = _as_it_is
) -> Iterator[list[str]]:
    """Inside, calls of a backend on tensors on the CPU are compiled for a target, and run here: the
    names of the kernels that ran. `edit` changes their PTX, to see what comes of it. There are few
    processors, and no check of a small case on first use."""
    target, shared = TARGETS[name]
    ran: list[str] = []
    loaded: list[Any] = []

    def load(compiled: CompiledKernel) -> None:
        columns = getattr(compiled.metadata, "tmem_size", None) or 0
        if compiled.metadata.shared > shared:
            raise OutOfResources(compiled.metadata.shared, shared, "shared memory")
        if columns > COLUMNS:
            raise OutOfResources(columns, COLUMNS, "tensor memory")
        if compiled.module is None:
            compiled.module = compiled.function = "here"
            compiled._run = _Launcher(compiled, edit, ran)
            loaded.append(compiled)

    with ExitStack() as stack:
        stack.callback(setattr, driver, "_active", driver._active)
        driver.set_active(_Driver(target, shared))  # type: ignore[arg-type]
        call_plan.clear()
        stack.callback(call_plan.clear)
        stack.enter_context(up_to_ptx())
        stack.enter_context(mock.patch.object(CompiledKernel, "_init_handles", load))
        stack.enter_context(mock.patch.object(backend, "unavailable", return_value=""))
        stack.enter_context(mock.patch.object(backends, "_SELF_TESTED", ()))
        if backend.name == "hopper":
            where = "headway.backends.hopper.launch_plan.processors"
            stack.enter_context(mock.patch(where, return_value=PROCESSORS))
        stack.callback(_forget, loaded)
        yield ran


def _forget(kernels: list[Any]) -> None:
    """Who launches them next loads them as if they were new."""
    for compiled in kernels:
        compiled.module = compiled.function = compiled._run = None


@lru_cache(maxsize=16)
def _machine(ptx: str, shared: int) -> Machine:
    return Machine(parse(ptx), shared)


class _Launcher:
    """What Triton calls for a launch."""

    def __init__(
        self, compiled: CompiledKernel, edit: Callable[[str], str], ran: list[str]
    ) -> None:
        self.name, self.ran = compiled.name, ran
        self.ptx, self.shared = edit(compiled.asm["ptx"]), compiled.metadata.shared
        self.kinds = tuple(compiled.src.signature.values())
        self.boxes = getattr(compiled.metadata, "tensordesc_meta", None) or ()

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *args) -> None:
        machine = _machine(self.ptx, self.shared)
        given = list(_leaves(self.kinds, args, iter(self.boxes)))
        places, where = machine.registers.parameters, machine.registers.where
        if len(places) not in (len(given), len(given) + 2):  # two are Triton's own
            raise Fault(f"{len(given)} arguments for {len(places)} parameters")
        tensors, maps = [], {}
        for (kind, value), (name, place) in zip(given, places.items(), strict=False):
            if isinstance(value, Map):
                maps[where[name]] = value
            elif kind[0] == "*":
                place[:] = 0 if value is None else value.data_ptr()
                tensors += [] if value is None else [value]
            else:
                data = struct.pack("<" + _FORMATS[kind], value)
                place.view(np.uint8)[:] = np.frombuffer(data, np.uint8)
        tensors += [x.base for x in args if hasattr(x, "block_shape")]
        machine.memories.globally, machine.memories.maps = Global(tensors), maps
        self.ran.append(self.name)
        machine.run((x, y, z))


def _leaves(kinds: Any, args: Sequence[Any], boxes: Iterator[dict]) -> Iterator[tuple[str, Any]]:
    """Types and arguments that a kernel gets, taken out of tuples and descriptors."""
    for kind, x in flat(kinds, args):
        if kind.startswith("tensordesc"):
            yield kind, _map(x, next(boxes))
            yield from (("i32", n) for n in x.shape)
            yield from (("i64", n) for n in x.strides)
        elif kind != "constexpr":
            yield kind, x


def _map(descriptor: Any, meta: dict) -> Map:
    """As the copy engine would be told of it."""
    size = meta["elem_size"]
    dtype = np.dtype(f"f{size}" if size == 4 else f"u{size}")
    strides = [size * n for n in descriptor.strides]
    return Map(
        descriptor.base.data_ptr(), dtype, tuple(descriptor.shape[::-1]), tuple(strides[::-1]),
        tuple(meta["block_size"][::-1]), 16 << meta["swizzle"],
    )  # fmt: skip
