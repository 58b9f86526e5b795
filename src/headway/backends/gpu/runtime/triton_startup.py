"""Triton's start-up, half a second of a process, off the path of the first call.

Triton does two things at its first use. It hashes itself, 400 megabytes: the hash is part of every
key of its cache, so no kernel is compiled before. The installer recorded the hash of the largest
file. And a C compiler builds the module of its driver: kernels are loaded with that, but can be
compiled before.
"""

import hashlib
import io
import os
import re
from base64 import urlsafe_b64decode
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Thread
from types import FunctionType
from typing import Any

from triton.compiler.compiler import make_backend
from triton.runtime import cache, driver

import triton

_LIBRARY = "libtriton.so"
_UNREAD = b"headway: not read, since the installer knew its hash"


class Start:
    """Triton's start-up in two threads.

    - `meanwhile`: a stand-in for NVIDIA's driver until its module is built, or None.
    """

    def __init__(self) -> None:
        self.driver, self.hash = Thread(target=self._make_driver), Thread(target=self._find_hash)
        self.meanwhile: Any = None
        with suppress(Exception):  # an unknown Triton: its driver is awaited
            if driver._active is None and (found := _meanwhile(self.driver)) is not None:
                driver.set_active(found)
                self.meanwhile = found
        self.driver.start()
        self.hash.start()

    def _make_driver(self) -> None:
        made: Any = None
        with suppress(Exception):  # raised again where the driver is needed
            made = driver.default
        if self.meanwhile is not None and driver._active is self.meanwhile:
            driver.set_active(made)

    def _find_hash(self) -> None:
        with suppress(Exception):  # an unknown Triton: it reads all of itself
            if (found := quick_key()) is not None:
                cache.triton_key = lru_cache(lambda: found)  # cached, as Triton's own function is
        with suppress(Exception):  # Triton tries again where it needs it
            cache.triton_key()
            if self.meanwhile is not None:  # the assembler's version is part of every key, too
                make_backend(self.meanwhile.get_current_target()).hash()


@lru_cache(maxsize=1)
def start_triton() -> Start | None:
    """Start Triton, once. None for the interpreter, which needs no start-up."""
    return None if triton.knobs.runtime.interpret else Start()


def wait_to_compile() -> None:
    """Wait until kernels can be compiled."""
    if start := start_triton():
        start.hash.join()
        if start.meanwhile is None:
            start.driver.join()


def wait_to_launch() -> None:
    """Wait until kernels can be loaded and launched."""
    if start := start_triton():
        start.hash.join()
        start.driver.join()


def _meanwhile(making: Thread) -> Any:
    """NVIDIA's driver before its module is built. It knows the GPU; its `utils` wait for the thread
    `making`. None for other GPUs, of which only the driver knows the properties."""
    from triton.backends.driver import GPUDriver
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher

    class Meanwhile(CudaDriver):
        def __init__(self) -> None:
            GPUDriver.__init__(self)  # and not CudaDriver's, which makes the module
            self.launcher_cls = CudaLauncher

        @property
        def utils(self) -> Any:  # type: ignore[override]
            making.join()
            made: Any = driver.default
            return made.utils

    return Meanwhile() if CudaDriver.is_active() else None


# -- the hash -------------------------------------------------------------------------------------


def quick_key() -> str | None:
    """The result of Triton's `triton_key`, without reading the largest file; None if the hash of
    that is not recorded."""
    library = Path(os.path.abspath(triton.__file__)).parent / "_C" / _LIBRARY
    known = recorded(library)
    if known is None:
        return None

    def open_(path: Any, *mode: Any) -> Any:
        return io.BytesIO(_UNREAD) if os.fspath(path) == str(library) else open(path, *mode)

    find: Any = cache.triton_key.__wrapped__
    names = {**find.__globals__, "open": open_}
    key = FunctionType(find.__code__, names, closure=find.__closure__)()
    unread = hashlib.sha256(_UNREAD).hexdigest()
    return key.replace(unread, known) if unread in key else None


def recorded(library: Path) -> str | None:
    """The SHA-256 of Triton's library, in hexadecimal, as its installer recorded it (RECORD of the
    wheel format); None if there is no record, or the file has changed since."""
    folder = library.parents[2]
    name = re.escape(library.relative_to(folder).as_posix())
    for record in folder.glob("*triton*.dist-info/RECORD"):
        found = re.search(rf"^{name},sha256=([\w-]+),(\d+)\s*$", record.read_text(), re.MULTILINE)
        if found:
            now = library.stat()
            if now.st_size == int(found[2]) and now.st_mtime <= record.stat().st_mtime:
                return urlsafe_b64decode(found[1] + "==").hex()
    return None
