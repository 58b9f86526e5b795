"""Guards of launches: the current device, captures of CUDA graphs, and streams that share data."""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

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
# live as long as the graph: the driver calls a function when the last executable copy of a graph is
# gone, which marks what was kept for it. The next capture frees that. (Where the driver has no such
# function, on AMD, these tensors stay until the process ends.)


class _ReadByGraph(NamedTuple):
    """The tensors that one graph reads from outside its memory, by id.

    - `freed`: address of a semaphore of the C library, which the driver raises when the graph is
      gone, in a thread of its own where no Python may run; None where the driver cannot.
    """

    tensors: dict[int, Tensor]
    freed: int | None


_read_by_graphs: dict[int, _ReadByGraph] = {}  # by the number of the capture
_lock = threading.RLock()  # freeing a tensor may run Python


def keep_alive(device: torch.device, tensors: Iterable[Tensor]) -> None:
    """Keep tensors as long as the graph, if a launch that is being captured reads them from outside
    the graph's memory."""
    if not capturing(device):
        return
    index = torch._C._cuda_getDevice() if device.index is None else device.index
    number, handle = _captured_graph(torch._C._cuda_getCurrentRawStream(index))
    with _lock:
        _forget_freed_graphs()
        graph = _read_by_graphs.get(number)
        if graph is None:
            graph = _read_by_graphs[number] = _ReadByGraph({}, _raised_when_freed(handle))
        graph.tensors.update((id(tensor), tensor) for tensor in tensors)


def _forget_freed_graphs() -> None:
    for number, (_, freed) in list(_read_by_graphs.items()):
        if freed is not None and _libc().sem_trywait(ctypes.c_void_p(freed)) == 0:
            del _read_by_graphs[number]
            _libc().free(ctypes.c_void_p(freed))


def _captured_graph(stream: int) -> tuple[int, ctypes.c_void_p | None]:
    """Return the number of the capture of a stream, and the graph. (-1, None) if the driver does
    not say."""
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    driver = _driver()
    if driver is None or driver.cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph),
        None, None,
    ):  # fmt: skip
        return -1, None
    return number.value, graph


def _raised_when_freed(graph: ctypes.c_void_p | None) -> int | None:
    """Return the address of a semaphore that the driver raises when the graph is freed. It is no
    memory of Python's: graphs may outlive the interpreter."""
    driver = _driver()
    if driver is None or graph is None:
        return None
    freed, user_object = _libc().malloc(64), ctypes.c_void_p()  # (a sem_t has 32 bytes)
    _libc().sem_init(ctypes.c_void_p(freed), 0, 0)
    error = driver.cuUserObjectCreate(
        ctypes.byref(user_object), ctypes.c_void_p(freed), _libc().sem_post, 1, _NO_SYNC
    )
    if error or driver.cuGraphRetainUserObject(graph, user_object, 1, _MOVE):
        return None
    return freed


_NO_SYNC, _MOVE = 1, 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, CU_GRAPH_USER_OBJECT_MOVE


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    return libc


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL | None:
    """Return NVIDIA's driver, or None where it or one of these functions is missing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name in ("StreamGetCaptureInfo_v2", "UserObjectCreate", "GraphRetainUserObject"):
            getattr(driver, f"cu{name}")
    except (OSError, AttributeError):
        return None
    return driver


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
