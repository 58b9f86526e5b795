"""Where launches go: Triton's are on the current device; and what a CUDA graph must not take in."""

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from ....errors import BackendRefused

T = TypeVar("T")


def elsewhere(device: torch.device) -> bool:
    """Whether the current device is another. (`torch.cuda.current_device` also looks whether CUDA
    has been started, as it has where tensors are, at five times the price.)"""
    return device.type == "cuda" and device.index != torch._C._cuda_getDevice()


def on(device: torch.device) -> AbstractContextManager:
    """Inside, launches go to `device`."""
    return torch.cuda.device(device) if elsewhere(device) else nullcontext()


# -- CUDA graphs ----------------------------------------------------------------------------------
#
# What is launched while a graph is captured runs when it is replayed: on other numbers, maybe long
# after. So what the host reads of a tensor now says nothing about then; what is made in a capture
# is not there yet, and not made by who comes later; and what a captured launch reads must live as
# long as the graph, of which nobody says when it ends.

_kept: dict[int, Tensor] = {}


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured in the device's current stream."""
    if device.type != "cuda":
        return False
    if elsewhere(device):
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()
    return torch.cuda.is_current_stream_capturing()


def keep_alive(device: torch.device, tensors: Iterable[Tensor]) -> None:
    """Keep what is not the graph's own, and what a call reads, for good, if one is captured."""
    if capturing(device):
        _kept.update((id(x), x) for x in tensors)


def outside_capture(device: torch.device, make: Callable[[], T]) -> T:
    """What `make` gives, which is kept beyond a call: no part of a graph that is being captured,
    or is about to be. It is done now, in memory that is not the graph's, whatever it waits for, and
    may read what was there before a capture began."""
    if capturing(device):
        with _at_ease(), torch.cuda.stream(stream := _uncaptured(device)):
            made = make()
            stream.synchronize()
        return made
    if device.type == "cuda" and _WARMS_UP in sys.modules:
        return _in_a_thread(device, make)
    return make()


# `torch.compile(mode="reduce-overhead")` runs a program once before it captures it, and all that
# its thread allocates meanwhile is the graph's.
_WARMS_UP = "torch._inductor.cudagraph_trees"


def _in_a_thread(device: torch.device, make: Callable[[], T]) -> T:
    stream = torch.cuda.current_stream(device)

    def run() -> T:
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
            return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def _uncaptured(device: torch.device) -> torch.cuda.Stream:
    """PyTorch hands its few streams out in turn: the next may be the one that is captured."""
    while True:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream


@contextmanager
def _at_ease() -> Iterator[None]:
    """Inside, this thread may wait for other streams than the one that is captured."""
    exchange = _exchange()
    if exchange is None:
        raise BackendRefused(
            "this call needs the tiles of its mask, which cannot be found while a CUDA graph is "
            "being captured without NVIDIA's driver; make the same call once before, or give it a "
            "block mask"
        )
    mode = ctypes.c_int(_RELAXED)
    if failed := exchange(ctypes.byref(mode)):
        raise BackendRefused(f"the driver refuses to find tiles beside a capture: error {failed}")
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@lru_cache(maxsize=1)
def _exchange() -> Callable[[Any], int] | None:
    """Sets how strict this thread's captures are, and tells how strict they were."""
    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    exchange.argtypes = [ctypes.POINTER(ctypes.c_int)]
    return exchange
