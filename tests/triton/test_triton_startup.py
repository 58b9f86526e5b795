"""Triton's start: what a first call need not wait for, and what it waits for."""

import hashlib
import os
import sys
import threading
from base64 import urlsafe_b64encode
from functools import lru_cache
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import cache, driver

import triton
from headway.backends.gpu.runtime import triton_startup
from headway.backends.triton.plan import on_cuda

# -- the driver -----------------------------------------------------------------------------------


class Making:
    """Triton's driver, whose module takes as long as a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.made: list[SimpleNamespace] = []
        self.error: Exception | None = None
        monkeypatch.setattr(sys.modules[type(driver).__module__], "_create_driver", self.create)
        monkeypatch.setattr(driver, "_active", None)
        monkeypatch.setattr(driver, "_default", None)
        monkeypatch.setattr(CudaDriver, "is_active", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(
            triton_startup,
            "start_triton",
            lru_cache(maxsize=1)(triton_startup.start_triton.__wrapped__),
        )
        monkeypatch.setattr(
            triton_startup.cache, "triton_key", cache.triton_key
        )  # put back at the end

    def create(self) -> SimpleNamespace:
        self.begun.set()
        assert self.go_on.wait(600)
        if self.error:
            raise self.error
        self.made.append(SimpleNamespace(utils="of the module"))
        return self.made[-1]


@pytest.fixture
def making(monkeypatch):
    seen = Making(monkeypatch)
    yield seen
    seen.go_on.set()
    triton_startup.wait_to_launch()


def test_kernels_are_compiled_before_the_driver_is_there(making):
    begun = triton_startup.start_triton()
    assert making.begun.wait(600)
    triton_startup.wait_to_compile()
    assert begun.driver.is_alive()
    active = driver.active
    assert active.get_current_target() == GPUTarget("cuda", 90, 32)
    assert on_cuda(torch.device("cuda")) == (torch.version.hip is None)
    assert begun.driver.is_alive()
    making.go_on.set()
    triton_startup.wait_to_launch()
    assert driver.active is making.made[0]
    assert active.utils == "of the module"  # who asked early keeps working


def test_what_loads_a_kernel_waits_for_the_driver(making):
    triton_startup.start_triton()
    active, found = driver.active, []
    asking = threading.Thread(target=lambda: found.append(active.utils))
    asking.start()
    asking.join(0.05)
    assert asking.is_alive()
    making.go_on.set()
    asking.join(600)
    assert found == ["of the module"]
    assert len(making.made) == 1  # by one thread: two that ask at once compile the module twice


def test_a_driver_that_cannot_be_made_says_why(making):
    making.error = RuntimeError("no C compiler")
    triton_startup.start_triton()
    active = driver.active
    making.go_on.set()
    triton_startup.wait_to_launch()
    for ask in (lambda: driver.active, lambda: active.utils):
        with pytest.raises(RuntimeError, match="no C compiler"):
            ask()


def test_somebody_elses_driver_stays(making, monkeypatch):
    theirs = SimpleNamespace(get_current_target=lambda: GPUTarget("hip", "gfx942", 64))
    making.go_on.set()
    monkeypatch.setattr(driver, "_active", theirs)
    assert triton_startup.start_triton().meanwhile is None
    triton_startup.wait_to_launch()
    assert driver.active is theirs


def test_other_gpus_are_asked_what_they_are(making, monkeypatch):
    """There, the driver's module knows: kernels wait for it."""
    monkeypatch.setattr(CudaDriver, "is_active", lambda: False)
    begun = triton_startup.start_triton()
    assert begun.meanwhile is None
    making.go_on.set()
    triton_startup.wait_to_compile()
    assert not begun.driver.is_alive()
    assert driver.active is making.made[0]


# -- the hash -------------------------------------------------------------------------------------


def test_the_quick_key_is_tritons_own(monkeypatch):
    library = Path(triton.__file__).parent / "_C" / "libtriton.so"
    if triton_startup.recorded(library) is None:
        pytest.skip("Triton was not installed from a wheel")
    # Of the module anew: in this one a call before may have put what it found.
    spec = find_spec("triton.runtime.cache")
    fresh = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    monkeypatch.setattr(triton_startup, "cache", fresh)
    assert triton_startup.quick_key() == fresh.triton_key()


def test_a_triton_whose_key_cannot_be_had_quickly_finds_it_itself(monkeypatch):
    """Once, before kernels are compiled side by side."""
    found = []
    monkeypatch.setattr(triton_startup, "recorded", lambda library: "0" * 64)
    monkeypatch.setattr(triton_startup.cache, "triton_key", lambda: found.append("its own"))
    triton_startup.Start._find_hash(SimpleNamespace(meanwhile=None))
    assert found == ["its own"]


def test_a_key_that_was_found_is_found_again(monkeypatch):
    found = "found before"
    monkeypatch.setattr(triton_startup.cache, "triton_key", lru_cache(lambda: found))
    triton_startup.Start._find_hash(SimpleNamespace(meanwhile=None))
    assert triton_startup.quick_key() is None
    assert cache.triton_key() == found


@pytest.fixture
def installed(tmp_path):
    """A library as an installer leaves it, and its line of RECORD."""
    library = tmp_path / "triton" / "_C" / "libtriton.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"machine code")
    record = tmp_path / "triton-3.6.0.dist-info" / "RECORD"
    record.parent.mkdir()
    digest = hashlib.sha256(b"machine code").digest()
    line = f"triton/_C/libtriton.so,sha256={urlsafe_b64encode(digest).decode().rstrip('=')},12"
    record.write_text(f"triton/__init__.py,sha256=abc,3\r\n{line}\r\n")
    return library, record


def test_the_installers_hash_is_believed(installed):
    library, _ = installed
    assert triton_startup.recorded(library) == hashlib.sha256(b"machine code").hexdigest()


@pytest.mark.parametrize("what", ["written to", "longer", "not recorded", "no wheel"])
def test_a_library_that_may_be_another_is_read(installed, monkeypatch, what):
    library, record = installed
    if what == "written to":
        later = record.stat().st_mtime + 10
        os.utime(library, (later, later))
    elif what == "longer":
        library.write_bytes(b"machine codes")
        os.utime(library, (1, 1))
    elif what == "not recorded":
        record.write_text(record.read_text().replace("libtriton", "libother"))
    else:
        record.unlink()
    assert triton_startup.recorded(library) is None
    monkeypatch.setattr(triton_startup.triton, "__file__", str(library.parents[1] / "__init__.py"))
    assert triton_startup.quick_key() is None


def test_a_key_that_is_made_otherwise_is_left_to_triton(monkeypatch):
    """As another Triton might, that does not read its library or reads it elsewhere."""
    monkeypatch.setattr(triton_startup, "recorded", lambda library: "0" * 64)
    monkeypatch.setattr(triton_startup.cache, "triton_key", lru_cache(lambda: "by version"))
    assert triton_startup.quick_key() is None
