"""Launches of a kernel for calls of one kind: Triton compiles it, and is not asked again."""

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
from .device_guard import on, wait_for_makers
from .parallel_compile import record_launch, rehearsals, wait_for_begun
from .triton_startup import wait_to_launch


class CallArguments(NamedTuple):
    """The arguments of a call besides its matrices: tensors, floats, and the tensors' addresses."""

    tensors: list[Tensor]
    floats: Sequence[float]
    addresses: list[int]

    @staticmethod
    def of(tensors: list[Tensor], floats: Sequence[float] = ()) -> "CallArguments":
        return CallArguments(tensors, floats, [x.data_ptr() for x in tensors])


NO_ARGUMENTS = CallArguments([], (), [])

# A CUDA grid has this many programs along its first axis, and 65,535 along each of the others.
MAX_PROGRAMS = 2**31 - 1


class KernelLauncher:
    """A kernel for calls of one kind.

    Triton launches it until it is compiled. Later launches skip Triton, which would choose the same
    compiled kernel for every call of the kind: they go through the driver (`cuda_launch.Launch`)
    or, where that is not known to be right, through `CompiledKernel.run` (the same in Triton 3.6 to
    3.9).

    - `options`: the kernel's last parameters by name, which are constants; and Triton's options.
    - `programs`: how many there are, along the only axis of the grid.
    - `arrange`: makes the other arguments of the kernel's own `tensors`, and of the tensors and
      floats of `CallArguments`. It depends on shapes and strides alone.
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
        self.index, self.cuda = device.index or 0, device.type == "cuda"
        self.constants = tuple(options[p] for p in fn.arg_names if p in options)
        self.compiled: Any = None
        if isinstance(fn, triton.JITFunction):
            kernel_cache.adopt(fn)
        self.launch: Launch | None = None

    def __call__(
        self, tensors: Sequence[Tensor | None], arguments: CallArguments = NO_ARGUMENTS
    ) -> None:
        """Launch. The same `tensors` are None in all calls."""
        if self.cuda and self.index != torch._C._cuda_getDevice():
            with on(self.device):
                return self(tensors, arguments)
        if self.cuda:
            wait_for_makers(self.device)
        addresses = [x.data_ptr() for x in tensors if x is not None]
        addresses += arguments.addresses
        if (
            self.launch is None
            or rehearsals
            or profiled()
            or not self.launch(self.stream(self.index), addresses, arguments.floats)
        ):
            self.through_triton(tensors, arguments, addresses)

    def through_triton(
        self, tensors: Sequence[Tensor | None], arguments: CallArguments, addresses: Sequence[int]
    ) -> None:
        """Launch through Triton."""
        args = self.arrange(tensors, arguments.tensors, arguments.floats)
        # Triton specialises a kernel on whether pointers are multiples of 16: here all are.
        plain = not any(address % 16 for address in addresses)
        if rehearsals and get_ident() in rehearsals:
            use_driver = (
                partial(self.use_driver, tensors=tensors, arguments=arguments) if plain else None
            )
            record_launch(self.fn, args, self.options, use_driver)
        elif not plain or self.compiled is None:
            wait_for_begun()
            wait_to_launch()
            if plain and self.launched_directly(args, tensors, arguments, addresses):
                return
            compiled = self.fn[self.grid](*args, **self.options)
            # The interpreter returns nothing to launch again.
            reusable = plain and hasattr(compiled, "packed_metadata")
            if reusable and not self.use_driver(compiled, tensors, arguments):
                self.stream, self.compiled = _streams(), compiled
        elif profiled():
            self.compiled[self.grid](*args, *self.constants)
        else:
            run, loaded = self.compiled.run, (self.compiled.function, self.compiled.packed_metadata)
            stream = self.stream(self.index)
            run(*self.grid, stream, *loaded, None, None, None, *args, *self.constants)

    def launched_directly(
        self, args: tuple, tensors: Sequence[Tensor | None], arguments: CallArguments,
        addresses: Sequence[int],
    ) -> bool:  # fmt: skip
        """Launch a kernel that Triton finds or compiles, and neither loads nor launches: that takes
        a C compiler, and loads anew what another kind of call has loaded. False where that is
        impossible."""
        if profiled() or not isinstance(self.fn, triton.JITFunction):
            return False
        compiled = self.fn.warmup(*args, grid=self.grid, **self.options)
        if not self.use_driver(compiled, tensors, arguments):
            return False
        assert self.launch is not None
        return self.launch(self.stream(self.index), addresses, arguments.floats)

    def use_driver(
        self, compiled: Any, tensors: Sequence[Tensor | None], arguments: CallArguments
    ) -> bool:
        """Launch this through the driver from now on; False where that is impossible."""
        own, floats = placeholders((*tensors, *arguments.tensors), arguments.floats)
        args = self.arrange(own[: len(tensors)], own[len(tensors) :], floats)
        own = [x for x in own if x is not None]
        launch = launch_of(compiled, self.grid, (*args, *self.constants), own, floats)
        if launch is None:
            return False
        # Other threads may launch at this moment: they look at `launch` first, so it is set last.
        self.stream, self.compiled, self.launch = _streams(), compiled, launch
        return True


def _streams() -> Callable[[int], int]:
    return driver.active.get_current_stream  # type: ignore[attr-defined]


def profiled() -> bool:
    """Whether a profiler has hooks in Triton's launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
