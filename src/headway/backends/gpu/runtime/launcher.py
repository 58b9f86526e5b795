"""Launches of one kernel for calls of one kind: Triton compiles it, and then is not asked again."""

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from triton import knobs

from .cuda_launch import Launch, launch_of, stand_ins
from .device_guard import on
from .parallel_compile import rehearsals, write_down
from .triton_startup import started


class CallArguments(NamedTuple):
    """What a call brings besides its matrices: tensors, floats, and the addresses of the former."""

    tensors: list[Tensor]
    floats: Sequence[float]
    addresses: list[int]

    @staticmethod
    def of(tensors: list[Tensor], floats: Sequence[float] = ()) -> "CallArguments":
        return CallArguments(tensors, floats, [x.data_ptr() for x in tensors])


NO_ARGUMENTS = CallArguments([], (), [])


class KernelLauncher:
    """A kernel for calls of one kind: launched through Triton, where it is not compiled yet, else
    directly, since for calls of one kind Triton would choose the same: through the driver
    (`driver.Launch`) or, where that is not known to be right, through `CompiledKernel.run` (the
    same in Triton 3.6 to 3.9).

    - `options`: the kernel's last parameters by name, which are constants, and Triton's own.
    - `arrange`: the other arguments from what a call gives: `tensors` of its own, then the tensors
      and floats of `CallArguments`. It looks at shapes and strides alone.
    """

    def __init__(
        self, fn: Any, device: torch.device, options: dict[str, Any], grid: tuple[int, int, int],
        arrange: Callable[[Sequence[Any], Sequence[Any], Sequence[float]], tuple],
    ) -> None:  # fmt: skip
        self.fn, self.device, self.options = fn, device, options
        self.grid, self.arrange = grid, arrange
        self.index, self.cuda = device.index or 0, device.type == "cuda"
        self.tail = tuple(options[p] for p in fn.arg_names if p in options)
        self.compiled: Any = None
        self.launch: Launch | None = None

    def __call__(
        self, tensors: Sequence[Tensor | None], given: CallArguments = NO_ARGUMENTS
    ) -> None:
        """Launch; `tensors` are the same ones present, and None, in all calls."""
        if self.cuda and self.index != torch._C._cuda_getDevice():
            with on(self.device):
                return self(tensors, given)
        addresses = [x.data_ptr() for x in tensors if x is not None]
        addresses += given.addresses
        if (
            self.launch is None
            or rehearsals
            or watched()
            or not self.launch(self.stream(self.index), addresses, given.floats)
        ):
            self.through_triton(tensors, given, addresses)

    def through_triton(
        self, tensors: Sequence[Tensor | None], given: CallArguments, addresses: Sequence[int]
    ) -> None:
        """Launch as Triton does."""
        args = self.arrange(tensors, given.tensors, given.floats)
        # Triton's choice depends on whether pointers are multiples of 16: here all are.
        plain = not any(address % 16 for address in addresses)
        if rehearsals and get_ident() in rehearsals:
            known = partial(self.known, tensors=tensors, given=given) if plain else None
            write_down(self.fn, args, self.options, known)
        elif not plain or self.compiled is None:
            started()
            compiled = self.fn[self.grid](*args, **self.options)
            made = plain and hasattr(compiled, "packed_metadata")  # the interpreter makes nothing
            if made and not self.known(compiled, tensors, given):
                self.stream, self.compiled = _streams(), compiled
        elif watched():
            self.compiled[self.grid](*args, *self.tail)
        else:
            run, loaded = self.compiled.run, (self.compiled.function, self.compiled.packed_metadata)
            run(*self.grid, self.stream(self.index), *loaded, None, None, None, *args, *self.tail)

    def known(self, compiled: Any, tensors: Sequence[Tensor | None], given: CallArguments) -> bool:
        """Launch this through the driver from now on; False where that cannot be."""
        own, floats = stand_ins((*tensors, *given.tensors), given.floats)
        args = self.arrange(own[: len(tensors)], own[len(tensors) :], floats)
        own = [x for x in own if x is not None]
        launch = launch_of(compiled, self.grid, (*args, *self.tail), own, floats)
        if launch is None:
            return False
        # Other threads may be here: what they look at comes last.
        self.stream, self.compiled, self.launch = _streams(), compiled, launch
        return True


def _streams() -> Callable[[int], int]:
    return driver.active.get_current_stream  # type: ignore[attr-defined]


def watched() -> bool:
    """Whether a profiler has hooks in Triton's launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
