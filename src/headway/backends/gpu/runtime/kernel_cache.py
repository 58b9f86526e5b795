"""Compiled kernels on disk: Triton's cache, with entries that are checked, and locks.

Kernels lie where Triton keeps its own (`TRITON_CACHE_DIR`, else `~/.triton/cache`), in Triton's
form, under Triton's key: the source of a kernel and of all that it calls, the types of its
arguments, its options, the capability, and the versions of Triton (a hash of its library) and of
the assembler. What is different:

- An entry names its key and the SHA-256 of every file. Where one of them does not fit, the kernel
  is compiled anew, and the entry is replaced. So an entry that was cut short, damaged, or put under
  another key is never loaded.
- An entry holds no path of its own, so that a folder of kernels may be copied to other machines.
- Of processes that want a kernel at once, one compiles it, and the others wait for it. They meet at
  a file lock (`flock`), which the system lets go of when its holder dies. Where a file system has
  no such locks, or the holder takes minutes, they all compile; entries are whole all the same,
  since every file is renamed into its place.
- Where the folder cannot be written to, new kernels go to a temporary one of this process.

Nothing here imports PyTorch: `compile_apart.py` loads it in processes that have none.
"""

import atexit
import base64
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from triton.compiler import compiler
from triton.runtime import cache

from triton import knobs

from . import compile_apart
from .progress import Kernel

_PATIENCE = 300.0  # seconds, after which the holder of a lock is taken to be stuck
_LOCK = "headway.lock"
_COMPILE: Any = compiler.compile


class Made(NamedTuple):
    """A kernel that this process has compiled or read.

    - `key`: of its entry; `seconds`: that it took.
    - `stages`: seconds of the compiler by stage, empty for a kernel that was read.
    """

    name: str
    key: str
    seconds: float
    stages: dict[str, float]

    @property
    def compiled(self) -> bool:
        """Whether it was compiled, and not read."""
        return bool(self.stages)


log: list[Made] = []  # of this process, in the order in which they were ready
# Of a thread: `in_processes`, and `looks`, where it asks for a kernel and wants none.
_thread = threading.local()
_into: list[Path] = []  # the folder in place of Triton's


# -- folders --------------------------------------------------------------------------------------


def folder() -> Path:
    """The folder of the kernels."""
    return _into[-1] if _into else Path(knobs.cache.dir)


@contextmanager
def into(path: Path) -> Iterator[None]:
    """Inside, all threads read and write kernels in another folder."""
    _into.append(path)
    try:
        yield
    finally:
        _into.remove(path)


@lru_cache(maxsize=1)
def _temporary() -> Path:
    path = Path(tempfile.mkdtemp(prefix="headway-kernels-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


# -- entries --------------------------------------------------------------------------------------


class Entry(cache.CacheManager):
    """The files of one kernel, as Triton's compiler asks for them.

    - `key`: SHA-256 in hexadecimal, of what decides the kernel.
    - `make`: makes the entry of a folder in another process; False where that fails.
    - `missed`: called once it is known that the kernel has to be compiled, under the lock.
    """

    def __init__(
        self, root: Path, key: str, make: Callable[[Path], bool] | None = None,
        missed: Callable[[], None] | None = None, alone: bool = False,
    ) -> None:  # fmt: skip
        self.root, self.key, self.make, self.missed, self.alone = root, key, make, missed, alone
        self.hashes: dict[str, str] = {}
        self.lock: Any = None

    @property
    def path(self) -> Path:
        """Of its folder: the key as Triton writes it."""
        return self.root / base64.b32encode(bytes.fromhex(self.key)).decode().rstrip("=")

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of all files, if all are what was written; None where the kernel has to be
        compiled, which the caller then does alone, until `close`."""
        found = self.files(filename)
        if found is None and not self.alone:
            self._take_turns()
            found = self.files(filename)  # another process may have made it meanwhile
            if found is None:
                if self.missed is not None:
                    self.missed()
                if self.make is not None and self.make(self.root):
                    found = self.files(filename)
            if found is not None:
                self.close()
        return found

    def files(self, filename: str) -> dict[str, str] | None:
        """The paths of all files; None if one is not there, or is not what was written."""
        try:
            group = json.loads((self.path / _group(filename)).read_text())
            if group["key"] != self.key or filename not in group["sha256"]:
                return None
            for name, digest in group["sha256"].items():
                if _sha256((self.path / name).read_bytes()) != digest:
                    return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return {name: str(self.path / name) for name in group["sha256"]}

    def get_file(self, filename: str) -> str | None:
        path = self.path / filename
        return str(path) if path.exists() else None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        data = data if isinstance(data, bytes) else str(data).encode()
        self.hashes[filename] = _sha256(data)
        self._write(filename, data)
        return str(self.path / filename)

    def put_group(self, filename: str, group: dict[str, str]) -> None:
        """The file that makes the others an entry, written last. `child_paths` is for Triton, which
        looks for it where this module does not know Triton's compiler."""
        hashes = {name: self.hashes[name] for name in group}
        text = {"key": self.key, "sha256": hashes, "child_paths": group}
        self.put(json.dumps(text), _group(filename))

    def close(self) -> None:
        """Let others have the lock."""
        if self.lock is not None:
            with suppress(OSError):
                self.lock.release()
            self.lock = None

    def _write(self, filename: str, data: bytes) -> None:
        part = f".{filename}.{os.getpid()}.{threading.get_ident()}"
        self._writable()
        (self.path / part).write_bytes(data)
        os.replace(self.path / part, self.path / filename)

    def _writable(self) -> None:
        """See to it that the folder can be written to, or take a temporary one."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if os.access(self.path, os.W_OK):
                return
        except OSError:
            pass
        self.root = _temporary()
        self.path.mkdir(parents=True, exist_ok=True)

    def _take_turns(self) -> None:
        """Wait for the lock of the entry, where there are locks."""
        self._writable()
        try:
            import filelock  # PyTorch brings it; a process that has none takes no locks

            lock = filelock.FileLock(self.path / _LOCK)
            lock.acquire(timeout=_PATIENCE)
        except (ImportError, OSError, NotImplementedError):  # a timeout is an OSError
            return
        self.lock = lock


def _group(filename: str) -> str:
    return f"__grp__{filename}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# -- compiling ------------------------------------------------------------------------------------


def adopt(fn: Any) -> None:
    """Let Triton compile a kernel through this cache."""
    caches = fn.device_caches
    if getattr(caches.default_factory, "func", None) is _bound:
        return
    if hasattr(fn, "compile"):
        fn.compile = compile_kernel
    caches.default_factory = partial(_bound, fn, caches.default_factory)


def _bound(fn: Any, make: Callable[[], Any]) -> Any:
    found = make()  # sets `compile`
    fn.compile = compile_kernel
    return found


@contextmanager
def in_processes() -> Iterator[None]:
    """Inside, Gluon's kernels of this thread are compiled in processes of their own. Their front
    end is written in Python and takes a second, in which it would keep all other threads waiting.
    """
    before = getattr(_thread, "in_processes", False)
    _thread.in_processes = True
    try:
        yield
    finally:
        _thread.in_processes = before


def compile_kernel(src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
    """Triton's `compile`, with entries of this cache in the place of Triton's own."""
    if not known():
        return _COMPILE(src, target=target, options=options, **more)
    began, entries = time.perf_counter(), list[Entry]()
    stages: dict[str, float] = {}

    def entry(key: str) -> Entry:
        if getattr(_thread, "looks", False):
            raise _Found(Entry(folder(), key, alone=True), f"{src.name[:150]}.json")
        make = None
        if getattr(_thread, "in_processes", False) and src.fn.is_gluon():
            make = partial(_make_apart, src, target, options, key, stages)
        entries.append(Entry(folder(), key, make, kernel.begin))
        return entries[-1]

    with Kernel(src.name) as kernel:
        try:
            compiled = _with(_key, entry)(src, target=target, options=options, **more)
        finally:
            for one in entries:
                one.close()
    seconds = time.perf_counter() - began
    if kernel.begun and not stages:
        stages["all"] = seconds
    log.append(Made(src.name, compiled.hash, seconds, stages))
    return compiled


def known() -> bool:
    """Whether this Triton's compiler is one that this module knows, and nobody has told it to do
    otherwise: to keep kernels elsewhere, to dump or to replace what it makes."""
    told = knobs.cache.manager_class, knobs.compilation.always_compile
    told += knobs.compilation.override, knobs.compilation.dump_ir
    names = compiler.compile.__code__.co_names
    return compiler.compile is _COMPILE and not any(told) and {
        "get_cache_manager", "get_cache_key"
    } <= set(names)  # fmt: skip


def _with(key: Callable[..., str], entry: Callable[[str], Entry]) -> Callable[..., Any]:
    """Triton's `compile` with two functions of its module replaced."""
    names = {**_COMPILE.__globals__, "get_cache_key": key, "get_cache_manager": entry}
    code, defaults = _COMPILE.__code__, _COMPILE.__defaults__
    return FunctionType(code, names, "compile", defaults, _COMPILE.__closure__)


def _key(*given: Any, **named: Any) -> str:
    return f"{compiler.get_cache_key(*given, **named)}-{_helpers()}"


@lru_cache(maxsize=1)
def _helpers() -> str:
    """A hash of what decides kernels beside what Triton's key knows: functions that generated ones
    call, where a constant's text alone names these, and the class of those constants."""
    backends = Path(__file__).parents[2]
    files = [*sorted((backends / "gpu" / "device").glob("*.py")), backends / "hopper" / "config.py"]
    return _sha256(b"".join(file.read_bytes() for file in files if file.exists()))


class _Found(Exception):
    """The entry of a kernel, and the name of its metadata, instead of the kernel."""


def is_ready(fn: Any, args: tuple, options: dict[str, Any]) -> str:
    """Whether a kernel has to be compiled for a launch: "loaded" where this process has it,
    "cached" where it is on disk, else ""."""
    if not known():
        return ""
    adopt(fn)
    _thread.looks = True
    try:
        fn.warmup(*args, grid=(1, 1, 1), **options)
    except _Found as found:
        entry, filename = found.args
        return "cached" if entry.files(filename) else ""
    finally:
        _thread.looks = False
    return "loaded"


def _make_apart(
    src: Any, target: Any, options: Any, key: str, stages: dict[str, float], root: Path
) -> bool:  # fmt: skip
    found = compile_apart.run(src, target, dict(options or {}), key, str(root))
    stages.update(found or {})
    return found is not None


def make(src: Any, target: Any, options: Any, key: str, root: str) -> dict[str, float]:
    """Compile a kernel into a folder; another process has the lock, and has looked.

    **Returns:** seconds by stage; `front end` is Python's.
    """
    stages: dict[str, float] = {}

    def listen(*, times: Any, **_: Any) -> None:
        stages["front end"] = times.ir_initialization / 1e6
        stages.update((stage, taken / 1e6) for stage, taken in times.lowering_stages)

    knobs.compilation.listener = listen
    entry = Entry(Path(root), key, alone=True)
    _with(lambda *given, **named: "", lambda hash: entry)(src, target=target, options=options)
    return stages
