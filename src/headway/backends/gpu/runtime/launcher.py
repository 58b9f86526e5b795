"""Launches of a kernel for calls of one kind: Triton compiles it, then launches skip Triton.

A launch of the Hopper backend takes 28 thousand instructions of the host instead of 105 thousand
(docs/lab/host.md).
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

import triton
from triton import knobs

from ....errors import BackendRefused
from . import kernel_cache
from .cuda_launch import Launch, launch_of, placeholders
from .device_guard import on, wait_for_producers
from .parallel_compile import dry_runs, record_launch, wait_for_precompiled
from .triton_startup import wait_for_triton


class CallArguments(NamedTuple):
    """The arguments of a call besides its matrices: tensors, floats, and the tensors' addresses."""

    tensors: list[Tensor]
    floats: Sequence[float]
    addresses: list[int]

    @staticmethod
    def of(tensors: list[Tensor], floats: Sequence[float] = ()) -> "CallArguments":
        return CallArguments(tensors, floats, [tensor.data_ptr() for tensor in tensors])


NO_ARGUMENTS = CallArguments([], (), [])

# A CUDA grid has this many programs along its first axis, and 65,535 along each of the others.
MAX_PROGRAMS = 2**31 - 1


class KernelLauncher:
    """A kernel for calls of one kind.

    Triton launches it until it is compiled. Later launches skip Triton, which would choose the same
    compiled kernel for every call of the kind. They go through the driver (`cuda_launch.Launch`)
    or, if that is not known to be right, through `CompiledKernel.run` (the same in Triton 3.6 to
    3.9).

    - `options`: the kernel's last parameters by name, which are constants; and Triton's options.
    - `programs`: the size of the grid along its only axis.
    - `arrange`: return the other arguments of the kernel, from the `tensors` of a launch and the
      tensors and floats of its `CallArguments`. It depends on shapes and strides alone.
    """

    def __init__(
        self, fn: Any, device: torch.device, options: dict[str, Any], programs: int,
        arrange: Callable[[Sequence[Any], Sequence[Any], Sequence[float]], tuple],
    ) -> None:  # fmt: skip
        if programs > MAX_PROGRAMS:
            raise BackendRefused(
                f"the call takes {programs:,} programs of the kernel {fn.__name__}, a launch has "
                f"at most {MAX_PROGRAMS:,}; split the call along batch or heads"
            )
        self.fn, self.device, self.options = fn, device, options
        self.grid, self.arrange = (programs, 1, 1), arrange
        self.device_index, self.is_cuda = device.index or 0, device.type == "cuda"
        self.constants = tuple(options[name] for name in fn.arg_names if name in options)
        self.compiled: Any = None
        if isinstance(fn, triton.JITFunction):
            kernel_cache.adopt(fn)
        self.launch: Launch | None = None

    def __call__(
        self, tensors: Sequence[Tensor | None], arguments: CallArguments = NO_ARGUMENTS
    ) -> None:
        """Launch the kernel. The same `tensors` are None in all calls."""
        if self.is_cuda and self.device_index != torch._C._cuda_getDevice():
            with on(self.device):
                return self(tensors, arguments)
        if self.is_cuda:
            wait_for_producers(self.device)
        addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
        addresses += arguments.addresses
        if (
            self.launch is None
            or dry_runs
            or is_profiled()
            or not self.launch(self.stream(self.device_index), addresses, arguments.floats)
        ):
            self.through_triton(tensors, arguments, addresses)

    def through_triton(
        self, tensors: Sequence[Tensor | None], arguments: CallArguments, addresses: Sequence[int]
    ) -> None:
        """Launch through Triton."""
        args = self.arrange(tensors, arguments.tensors, arguments.floats)
        # Triton specialises a kernel on whether pointers are multiples of 16: here all are.
        aligned = not any(address % 16 for address in addresses)
        if dry_runs and get_ident() in dry_runs:
            use_driver = (
                partial(self.use_driver, tensors=tensors, arguments=arguments) if aligned else None
            )
            record_launch(self.fn, args, self.options, use_driver)
        elif not aligned or self.compiled is None:
            wait_for_precompiled()
            wait_for_triton()
            if aligned and self.launch_unloaded(args, tensors, arguments, addresses):
                return
            compiled = self.fn[self.grid](*args, **self.options)
            # The interpreter returns nothing to launch again.
            reusable = aligned and hasattr(compiled, "packed_metadata")
            if reusable and not self.use_driver(compiled, tensors, arguments):
                self.stream, self.compiled = _stream_getter(), compiled
        elif is_profiled():
            self.compiled[self.grid](*args, *self.constants)
        else:
            run, loaded = self.compiled.run, (self.compiled.function, self.compiled.packed_metadata)
            stream = self.stream(self.device_index)
            run(*self.grid, stream, *loaded, None, None, None, *args, *self.constants)

    def launch_unloaded(
        self, args: tuple, tensors: Sequence[Tensor | None], arguments: CallArguments,
        addresses: Sequence[int],
    ) -> bool:  # fmt: skip
        """Launch a kernel that Triton compiles, or finds, but does not load. If Triton loaded it,
        a C compiler would build its launcher, and kernels shared with other kinds of calls would be
        loaded twice. Return False if that is impossible."""
        if is_profiled() or not isinstance(self.fn, triton.JITFunction):
            return False
        compiled = self.fn.warmup(*args, grid=self.grid, **self.options)
        if not self.use_driver(compiled, tensors, arguments):
            return False
        assert self.launch is not None
        return self.launch(self.stream(self.device_index), addresses, arguments.floats)

    def use_driver(
        self, compiled: Any, tensors: Sequence[Tensor | None], arguments: CallArguments
    ) -> bool:
        """Launch the kernel through the driver from now on. Return False if that is impossible."""
        stand_ins, floats = placeholders((*tensors, *arguments.tensors), arguments.floats)
        args = self.arrange(stand_ins[: len(tensors)], stand_ins[len(tensors) :], floats)
        stand_ins = [tensor for tensor in stand_ins if tensor is not None]
        launch = launch_of(compiled, self.grid, (*args, *self.constants), stand_ins, floats)
        if launch is None:
            return False
        # Other threads may launch at this moment: they read `launch` first, so it is set last.
        self.stream, self.compiled, self.launch = _stream_getter(), compiled, launch
        return True


def _stream_getter() -> Callable[[int], int]:
    return driver.active.get_current_stream  # type: ignore[attr-defined]


def is_profiled() -> bool:
    """Return True if a profiler has hooks in Triton's launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
