"""Work beside a capture: how the driver is asked, and which stream it goes to. CUDA is played."""

import ctypes
import weakref
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from headway.backends.gpu.runtime import device_guard
from headway.errors import BackendRefused

CARD = torch.device("cuda", 0)


class Cuda:
    """Streams by number, of which 7 is being captured; PyTorch hands out 7 next, then 8."""

    def __init__(self) -> None:
        self.current, self.next, self.mode, self.log = 7, 7, 0, []
        self.waits = []  # (stream, stream it waited for)

    def Stream(self, card):
        self.next += 1
        made = mock.Mock(number=self.next - 1)
        made.synchronize = lambda: self.log.append((made.number, self.current, self.mode))
        return made

    def stream(self, stream):
        return mock.patch.object(self, "current", stream.number)

    def Event(self):
        made = mock.Mock()
        made.record = lambda stream: setattr(made, "of", stream.cuda_stream)
        return made

    def current_stream(self, card=None):
        here = self.current
        waits = lambda event: self.waits.append((here, event.of))
        return mock.Mock(cuda_stream=here, device_index=0, wait_event=waits)

    def is_current_stream_capturing(self):
        return self.current == 7

    def exchange(self, pointer):
        mode = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int)).contents
        mode.value, self.mode = self.mode, mode.value
        return 0


@pytest.fixture
def cuda():
    made = Cuda()
    with (
        mock.patch.multiple(
            torch.cuda, Stream=made.Stream, stream=made.stream,
            Event=made.Event, current_stream=made.current_stream,
            is_current_stream_capturing=made.is_current_stream_capturing,
        ),
        mock.patch.object(torch._C, "_cuda_getDevice", create=True, return_value=0),
        mock.patch.object(
            torch._C, "_cuda_getCurrentRawStream", create=True, side_effect=lambda _: made.current
        ),
        mock.patch.multiple(device_guard, _last_results={}, _seen_results={}),
        mock.patch.object(device_guard, "_capture_mode_exchange", return_value=made.exchange),
        mock.patch.object(device_guard, "_read_by_graphs", {}),
    ):  # fmt: skip
        yield made


def test_outside_capture_is_another_stream_in_relaxed_mode_and_all_is_as_before_afterwards(cuda):
    def made():
        assert (cuda.current, cuda.mode) == (8, 2)
        assert not device_guard.capturing(CARD)
        return device_guard.outside_capture(CARD, lambda: cuda.current)

    assert device_guard.outside_capture(CARD, made) == 8
    assert cuda.log == [(8, 8, 2)]  # waited for, there
    assert (cuda.current, cuda.mode) == (7, 0)
    with pytest.raises(ZeroDivisionError):
        device_guard.outside_capture(CARD, lambda: 1 / 0)
    assert (cuda.current, cuda.mode) == (7, 0)


def test_nothing_is_done_where_nothing_is_captured(cuda):
    cuda.current, x = 1, torch.zeros(3)
    assert device_guard.outside_capture(CARD, lambda: cuda.current) == 1
    device_guard.keep_alive(CARD, [x])
    assert (cuda.next, cuda.mode, device_guard._read_by_graphs) == (7, 0, {})
    cuda.current = 7
    assert not device_guard.capturing(torch.device("cpu"))
    device_guard.keep_alive(CARD, [x, x])
    assert [[*graph.tensors] for graph in device_guard._read_by_graphs.values()] == [[id(x)]]


class Driver:
    """What the driver does with graphs: it calls the function of a user object when the graph that
    retains it is freed, with the object's pointer."""

    def __init__(self) -> None:
        self.number, self.objects, self.retained = 1, {}, {}
        self.refuses = False

    def cuStreamGetCaptureInfo_v2(self, stream, status, number, graph, *edges):
        assert stream.value == 7
        number._obj.value, graph._obj.value = self.number, 100 + self.number
        return 0

    def cuUserObjectCreate(self, made, pointer, destroy, count, flags):
        assert (count, flags) == (1, 1)
        made._obj.value = 200 + self.number
        self.objects[made._obj.value] = destroy, pointer
        return 0

    def cuGraphRetainUserObject(self, graph, made, count, flags):
        assert (count, flags) == (1, 1)
        self.retained[graph.value] = self.objects[made.value]
        return int(self.refuses)

    def free(self, number):
        destroy, pointer = self.retained.pop(100 + number)
        destroy(pointer)


def test_tensors_are_kept_as_long_as_the_graph_that_reads_them(cuda):
    driver, refs = Driver(), []

    def capture(number):
        driver.number, x = number, torch.zeros(number)
        refs.append(weakref.ref(x))
        for _ in range(3):
            device_guard.keep_alive(CARD, [x])

    alive = lambda: [n for n, ref in enumerate(refs, 1) if ref() is not None]
    with mock.patch.object(device_guard, "_driver", return_value=driver):
        capture(1)
        capture(2)
        assert (alive(), len(driver.retained)) == ([1, 2], 2)
        driver.free(1)
        capture(3)
        assert alive() == [2, 3]
        driver.free(3)
        driver.free(2)
        driver.refuses = True
        capture(4)
        assert alive() == [4]
        capture(5)
        assert alive() == [4, 5]  # nothing says when: they stay


def test_without_the_driver_it_is_refused_with_the_way_out(cuda):
    with (
        mock.patch.object(device_guard, "_capture_mode_exchange", return_value=None),
        pytest.raises(BackendRefused, match="make the same call once before"),
    ):
        device_guard.outside_capture(CARD, list)
    with (
        mock.patch.object(device_guard, "_capture_mode_exchange", return_value=lambda pointer: 1),
        pytest.raises(BackendRefused, match="error 1"),
    ):
        device_guard.outside_capture(CARD, list)


def test_a_launch_waits_once_for_what_another_stream_has_made(cuda):
    launch = lambda stream: (
        setattr(cuda, "current", stream), device_guard.wait_for_producers(CARD), cuda.waits[:],
        cuda.waits.clear(),
    )[2]  # fmt: skip
    make = lambda: device_guard.outside_capture(CARD, lambda: None)
    cuda.current = 1
    make()
    assert launch(1) == []
    assert launch(2) == [(2, 1)]
    assert launch(2) == []
    make()  # in 2: what it reads may have been made in 1, for which it has waited
    assert launch(2) == []
    assert launch(3) == [(3, 1), (3, 2)]
    assert launch(1) == [(1, 2)]
    assert launch(1) == []
    cuda.current = 4
    make()
    assert cuda.waits == [(4, 1), (4, 2)]  # before it is made
    cuda.waits.clear()
    assert launch(7) == []  # captured: when the capture began, the device had done everything
