"""Triton's start-up: what runs in a thread, and what waits for it."""

import sys
import threading
from functools import lru_cache
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import triton
from headway.backends.gpu.runtime import triton_startup


class Startup:
    """Triton's driver and hash, which a test may hold up or let fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.hashing, self.hash_allowed = threading.Event(), threading.Event()
        self.drivers: list[SimpleNamespace] = []
        self.error: Exception | None = None
        monkeypatch.setattr(sys.modules[type(driver).__module__], "_create_driver", self.create)
        monkeypatch.setattr(driver, "_active", None)
        monkeypatch.setattr(driver, "_default", None)
        monkeypatch.setattr(triton_startup, "triton_hash", self.hash)
        start = triton_startup.start_triton.__wrapped__
        monkeypatch.setattr(triton_startup, "start_triton", lru_cache(maxsize=1)(start))

    def create(self) -> SimpleNamespace:
        if self.error:
            raise self.error
        self.drivers.append(SimpleNamespace())
        return self.drivers[-1]

    def hash(self) -> str:
        self.hashing.set()
        assert self.hash_allowed.wait(600)
        if self.error:
            raise self.error
        return "key"


@pytest.fixture
def startup(monkeypatch):
    held = Startup(monkeypatch)
    yield held
    held.hash_allowed.set()
    triton_startup.wait_for_triton()


def test_triton_is_hashed_in_a_thread_and_its_driver_made_once(startup):
    thread = triton_startup.start_triton()
    assert startup.hashing.wait(600)
    assert driver.active is startup.drivers[0]
    assert triton_startup.start_triton() is thread
    assert thread.is_alive()
    startup.hash_allowed.set()
    triton_startup.wait_for_triton()
    assert not thread.is_alive()
    assert len(startup.drivers) == 1


def test_a_kernel_waits_for_the_hash(startup):
    waiting = threading.Thread(target=triton_startup.wait_for_triton)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    startup.hash_allowed.set()
    waiting.join(600)
    assert not waiting.is_alive()


def test_a_driver_that_cannot_be_made_says_why(startup):
    startup.error = RuntimeError("no C compiler")
    startup.hash_allowed.set()
    triton_startup.wait_for_triton()
    with pytest.raises(RuntimeError, match="no C compiler"):
        driver.active  # noqa: B018


def test_somebody_elses_driver_stays(startup, monkeypatch):
    theirs = SimpleNamespace(get_current_target=lambda: GPUTarget("hip", "gfx942", 64))
    monkeypatch.setattr(driver, "_active", theirs)
    triton_startup.start_triton()
    assert driver.active is theirs
    assert startup.drivers == []


def test_the_interpreter_starts_nothing(startup, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert triton_startup.start_triton() is None
    triton_startup.wait_for_triton()
    assert startup.drivers == []
    assert not startup.hashing.is_set()
