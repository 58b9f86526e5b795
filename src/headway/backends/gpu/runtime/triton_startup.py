"""Triton's start, which takes a process half a second, and which a first call does not wait for.

Two things are done when Triton is first used. It hashes itself, 400 megabytes: the hash is part of
every key of its cache, so that no kernel is compiled before. Of the largest file the installer
wrote it down. And a C compiler makes a module for its driver: kernels are loaded with that, and can
be compiled before it is there.
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
    """Triton, as it starts in two threads.

    - `meanwhile`: who stands in for NVIDIA's driver until its module is there, if anybody does.
    """

    def __init__(self) -> None:
        self.driver, self.hash = Thread(target=self._make_driver), Thread(target=self._find_hash)
        self.meanwhile: Any = None
        with suppress(Exception):  # another Triton than is known: its driver is awaited
            if driver._active is None and (found := _meanwhile(self.driver)) is not None:
                driver.set_active(found)
                self.meanwhile = found
        self.driver.start()
        self.hash.start()

    def _make_driver(self) -> None:
        made: Any = None
        with suppress(Exception):  # which is raised again where the driver is asked for
            made = driver.default
        if self.meanwhile is not None and driver._active is self.meanwhile:
            driver.set_active(made)

    def _find_hash(self) -> None:
        with suppress(Exception):  # another Triton than is known: it reads all of itself
            if (found := quick_key()) is not None:
                cache.triton_key = lru_cache(lambda: found)  # as it is: a function, called once
        with suppress(Exception):  # Triton tries again where it needs it
            cache.triton_key()
            if self.meanwhile is not None:  # the assembler's name is part of every key, too
                make_backend(self.meanwhile.get_current_target()).hash()


@lru_cache(maxsize=1)
def starting() -> Start | None:
    """Begin. The interpreter needs nothing of this."""
    return None if triton.knobs.runtime.interpret else Start()


def able_to_compile() -> None:
    """Wait until kernels can be compiled."""
    if start := starting():
        start.hash.join()
        if start.meanwhile is None:
            start.driver.join()


def started() -> None:
    """Wait until kernels can be loaded and launched."""
    if start := starting():
        start.hash.join()
        start.driver.join()


def _meanwhile(making: Thread) -> Any:
    """NVIDIA's driver before its module is there: it knows the GPU, and whoever asks for more waits
    until `making` has ended. None for other GPUs, whose driver has to be asked what they are."""
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
    """What `triton_key` returns, without reading the largest file; None where only that knows."""
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
    """The SHA-256 of Triton's library as its installer wrote it down (the wheel format's RECORD),
    in hexadecimal; None if nothing is written, or the file is another since."""
    folder = library.parents[2]
    name = re.escape(library.relative_to(folder).as_posix())
    for record in folder.glob("*triton*.dist-info/RECORD"):
        found = re.search(rf"^{name},sha256=([\w-]+),(\d+)\s*$", record.read_text(), re.MULTILINE)
        if found:
            now = library.stat()
            if now.st_size == int(found[2]) and now.st_mtime <= record.stat().st_mtime:
                return urlsafe_b64decode(found[1] + "==").hex()
    return None
