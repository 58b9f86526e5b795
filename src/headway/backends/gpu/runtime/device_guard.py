"""Guards of launches: the current device, captures of CUDA graphs, and streams that share data."""

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
from ....surroundings import capturing, is_other_device

T = TypeVar("T")


def on(device: torch.device) -> AbstractContextManager:
    """Return a context in which launches go to `device`, since Triton takes the current one."""
    return torch.cuda.device(device) if is_other_device(device) else nullcontext()


# -- CUDA graphs ----------------------------------------------------------------------------------
#
# Launches in a captured graph run at its replay: on other numbers, maybe long after. So values that
# the host reads during a capture do not hold at the replay. Results of captured launches do not
# exist before the replay, and later calls cannot use them. Whatever a captured launch reads must
# live as long as the graph. PyTorch tells nobody which `CUDAGraph` a stream is captured into, nor
# calls anything when one is freed. So these tensors stay until the process ends: the tables of
# every block mask that was captured, once each, however many graphs read them.

_read_by_graphs: dict[int, Tensor] = {}  # by id


def keep_alive(device: torch.device, tensors: Iterable[Tensor]) -> None:
    """Keep tensors for good if a launch that is being captured reads them from outside the graph's
    memory."""
    if capturing(device):
        _read_by_graphs.update((id(tensor), tensor) for tensor in tensors)


def outside_capture(device: torch.device, make: Callable[[], T]) -> T:
    """Return `make()`, whose result outlives the call, computed outside of any CUDA graph.

    It runs at once, in memory that belongs to no graph that is being captured or warmed up. It may
    wait for the GPU, and it reads tensors as they were when the capture began."""
    if capturing(device):
        with _relaxed_capture(), torch.cuda.stream(stream := _uncaptured_stream(device)):
            result = make()
            stream.synchronize()
        return result
    if device.type != "cuda":
        return make()
    with on(device):  # `make` may read results of another stream
        wait_for_producers(device)
    result = _call_in_thread(device, make) if _GRAPH_TREES in sys.modules else make()
    _record_producer(device)
    return result


# `torch.compile(mode="reduce-overhead")` runs a program once before it captures it. Whatever its
# thread allocates meanwhile belongs to the graph.
_GRAPH_TREES = "torch._inductor.cudagraph_trees"


def _call_in_thread(device: torch.device, make: Callable[[], T]) -> T:
    stream = torch.cuda.current_stream(device)

    def run() -> T:
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
            return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def _uncaptured_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that is not being captured. PyTorch hands out its few streams in turn, so a
    new one may be the captured one."""
    while True:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream


@contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Let this thread wait for other streams than the captured one."""
    exchange_mode = _capture_mode_exchange()
    if exchange_mode is None:
        raise BackendRefused(
            "this call needs the tiles of its mask, which cannot be found while a CUDA graph is "
            "being captured without NVIDIA's driver; make the same call once before, or give it a "
            "block mask"
        )
    mode = ctypes.c_int(_RELAXED)
    if error := exchange_mode(ctypes.byref(mode)):
        raise BackendRefused(f"the driver refuses to find tiles beside a capture: error {error}")
    try:
        yield
    finally:
        exchange_mode(ctypes.byref(mode))


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@lru_cache(maxsize=1)
def _capture_mode_exchange() -> Callable[[Any], int] | None:
    """Return the driver's function that exchanges the capture mode of this thread."""
    try:
        exchange_mode = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    exchange_mode.argtypes = [ctypes.POINTER(ctypes.c_int)]
    return exchange_mode


# -- streams --------------------------------------------------------------------------------------
#
# Data that is cached between calls is computed in the stream of the call that needs it first. A
# call in another stream may come before it is ready.

_last_results: dict[tuple[int, int], torch.cuda.Event] = {}  # by device and stream
_seen_results: dict[tuple[int, int], int] = {}  # by device and stream: the count it waited for
_result_count = 0


def _record_producer(device: torch.device) -> None:
    """Record that the current stream of a device has computed a result that is kept."""
    global _result_count
    stream = torch.cuda.current_stream(device)
    assert stream.device_index is not None
    event = torch.cuda.Event()
    event.record(stream)
    current = stream.device_index, stream.cuda_stream
    _last_results[current] = event
    has_seen_all = _seen_results.get(current) == _result_count
    _result_count += 1
    if has_seen_all:
        _seen_results[current] = _result_count


def wait_for_producers(device: torch.device) -> None:
    """Let the current stream of a device wait for kept results of other streams."""
    index = torch._C._cuda_getDevice() if device.index is None else device.index
    current = index, torch._C._cuda_getCurrentRawStream(index)
    if _seen_results.get(current) == _result_count or torch.cuda.is_current_stream_capturing():
        return  # (a capture begins when the device has done everything)
    count = _result_count
    for producer, event in list(_last_results.items()):
        if producer[0] == index and producer != current:
            torch.cuda.current_stream(index).wait_event(event)
    _seen_results[current] = count
