"""The device of launches, which for Triton is the current one; work outside of CUDA graphs; and
what is made in one stream and read in others."""

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
from ....surroundings import capturing, elsewhere

T = TypeVar("T")


def on(device: torch.device) -> AbstractContextManager:
    """Inside, launches go to `device`."""
    return torch.cuda.device(device) if elsewhere(device) else nullcontext()


# -- CUDA graphs ----------------------------------------------------------------------------------
#
# Launches in a captured graph run at its replay: on other numbers, maybe long after. So values that
# the host reads during a capture do not hold at the replay; results of captured launches do not
# exist before the replay, and later calls cannot use them; and whatever a captured launch reads
# must live as long as the graph, whose end is not announced.

_kept_alive: dict[int, Tensor] = {}


def keep_alive(device: torch.device, tensors: Iterable[Tensor]) -> None:
    """During a capture, keep tensors that a launch reads and the graph does not own, for good."""
    if capturing(device):
        _kept_alive.update((id(x), x) for x in tensors)


def outside_capture(device: torch.device, make: Callable[[], T]) -> T:
    """`make()`, whose result outlives the call, outside of a graph that is being captured or is
    about to be. It runs at once, in memory that is not the graph's. It may wait for the GPU, and
    read tensors as they were when the capture began."""
    if capturing(device):
        with _relaxed_capture(), torch.cuda.stream(stream := _uncaptured(device)):
            made = make()
            stream.synchronize()
        return made
    if device.type != "cuda":
        return make()
    with on(device):  # what it reads may be another stream's
        wait_for_makers(device)
    made = _in_a_thread(device, make) if _WARMS_UP in sys.modules else make()
    _made_here(device)
    return made


# `torch.compile(mode="reduce-overhead")` runs a program once before it captures it; whatever its
# thread allocates meanwhile belongs to the graph.
_WARMS_UP = "torch._inductor.cudagraph_trees"


def _in_a_thread(device: torch.device, make: Callable[[], T]) -> T:
    stream = torch.cuda.current_stream(device)

    def run() -> T:
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
            return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def _uncaptured(device: torch.device) -> torch.cuda.Stream:
    """A stream that is not being captured. PyTorch hands out its few streams in turn, so a new one
    may be the captured one."""
    while True:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream


@contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Inside, this thread may wait for other streams than the captured one."""
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
    """The driver's function that exchanges the capture mode of this thread."""
    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    exchange.argtypes = [ctypes.POINTER(ctypes.c_int)]
    return exchange


# -- streams --------------------------------------------------------------------------------------
#
# What is kept from call to call is made in the stream of the call that needs it first. A call in
# another stream may come before it is there.

_makers: dict[tuple[int, int], torch.cuda.Event] = {}  # by device and stream: when it last made one
_waited: dict[tuple[int, int], int] = {}  # by device and stream: for how many of all it has waited
_count = 0


def _made_here(device: torch.device) -> None:
    global _count
    stream = torch.cuda.current_stream(device)
    assert stream.device_index is not None
    event = torch.cuda.Event()
    event.record(stream)
    here = stream.device_index, stream.cuda_stream
    _makers[here] = event
    knows_all = _waited.get(here) == _count
    _count += 1
    if knows_all:
        _waited[here] = _count


def wait_for_makers(device: torch.device) -> None:
    """Before a launch in the current stream of a device: it waits for what others have made."""
    index = torch._C._cuda_getDevice() if device.index is None else device.index
    here = index, torch._C._cuda_getCurrentRawStream(index)
    if _waited.get(here) == _count or torch.cuda.is_current_stream_capturing():
        return  # (a capture begins when the device has done everything)
    count = _count
    for maker, event in list(_makers.items()):
        if maker[0] == index and maker != here:
            torch.cuda.current_stream(index).wait_event(event)
    _waited[here] = count
