"""A stand-in for CUDA graphs: what is launched is written down and done again, on the CPU.

Inside `recording()`, operators of PyTorch that make or change tensors and launches of kernels are
written down, with the tensors that they were given, and `replay` does them again, into the same
memory. As in a capture, the host may not read what a tensor holds; and what is done `outside_capture`
is not written down.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway import caches
from headway.backends.gpu.runtime import call_plan, launcher
from headway.backends.hopper.bwd import dq_semaphore, segment_table
from headway.backends.hopper.fwd import tile_table

# What an operator makes would depend on what is in a tensor, or the host waits for it.
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "repeat_interleave", "unique"}
_EMPTY = ("empty", "new_empty")


class Graph(TorchDispatchMode):
    """What was written down."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self.capturing = False
        self.own: list[torch.Tensor] = []  # made in it
        self.kept: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []  # to launches, besides matrices

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        self.own += [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
        if not name.startswith(_EMPTY):
            self.steps.append(lambda: _again(func, args, kwargs or {}, made))
        return made

    def launched(self, kernel: Any, tensors: Any, given: Any) -> None:
        """A launch, done now and later."""
        self.given += given.tensors
        with self.paused():
            _launch(kernel, tensors, given)
        self.steps.append(lambda: _launch(kernel, tensors, given))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.capturing = False
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                yield
        finally:
            self.capturing = True

    def outside_capture(self, device: torch.device, make: Callable[[], Any]) -> Any:
        with self.paused() if self.capturing else nullcontext():
            return make()

    def keep_alive(self, device: torch.device, tensors: Any) -> None:
        self.kept += [x for x in tensors if self.capturing]

    def strangers(self, *of_the_user: torch.Tensor) -> list[torch.Tensor]:
        """What launches read that nobody holds until the graph is replayed."""
        held = {x.data_ptr() for x in (*self.own, *self.kept, *of_the_user)}
        return [x for x in self.given if x.numel() and x.data_ptr() not in held]

    def is_capturing(self, device: torch.device) -> bool:
        return self.capturing

    def replay(self) -> None:
        for step in self.steps:
            step()


_launch = launcher.KernelLauncher.__call__


def _again(func: Any, args: Any, kwargs: Any, made: Any) -> None:
    for x, y in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(x, torch.Tensor) and x.data_ptr() != y.data_ptr():
            x.copy_(y)


@contextmanager
def recording() -> Iterator[Graph]:
    """Inside, calls are captured as on a GPU."""
    graph = Graph()
    graph.capturing = True
    with ExitStack() as stack:
        for module in (call_plan, tile_table, dq_semaphore, segment_table):
            stack.enter_context(mock.patch.object(module, "outside_capture", graph.outside_capture))
            stack.enter_context(mock.patch.object(module, "keep_alive", graph.keep_alive))
        for module in (call_plan, caches, sys.modules["headway.blocks.build"]):
            stack.enter_context(mock.patch.object(module, "capturing", graph.is_capturing))
        stack.enter_context(
            mock.patch.object(
                launcher.KernelLauncher, "__call__",
                lambda self, tensors, given=launcher.NO_ARGUMENTS: graph.launched(self, tensors, given),
            )
        )  # fmt: skip
        stack.enter_context(graph)
        yield graph
