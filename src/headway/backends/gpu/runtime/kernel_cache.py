"""Compiled kernels on disk: Triton's cache, with checked entries and with locks.

A warm cache turns a first call of 5 to 6 s into one of 0.5 s on an H100 (docs/lab/host.md,
2026-11-26). Kernels lie where Triton keeps its own (`TRITON_CACHE_DIR`, else `~/.triton/cache`), in
Triton's format, under Triton's key. The key covers the sources, the argument types, the options,
the capability, and the versions of Triton and of the assembler. It differs from Triton's cache so:

- An entry names its key and the SHA-256 of every file. If one does not match, the kernel is
  compiled again and the entry replaced. A truncated, damaged or misplaced entry is never loaded.
- An entry holds no path of its own, so a folder of kernels can be copied to other machines.
- If several processes want a kernel at once, one compiles it and the others wait at a file lock
  (`flock`). The system releases the lock when its holder dies. Without such locks, or if the holder
  takes minutes, they all compile. Entries stay complete, because every file is renamed into place.
- If the folder is not writable, new kernels go to a temporary folder of this process.

Nothing here imports PyTorch: `compile_apart.py` loads this module in processes without it.
"""

import atexit
import base64
import hashlib
import json
import os
import shutil
import sys
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
from .triton_hash import triton_hash

_LOCK_TIMEOUT = 300.0  # seconds, after which the holder of a lock is taken to be stuck
_SILENT_SECONDS = 1.0  # of a compilation, before a line on the terminal
_LOCK = "headway.lock"
_COMPILE: Any = compiler.compile


class CompileRecord(NamedTuple):
    """A kernel that this process has compiled or read.

    - `key`: the key of its entry.
    - `seconds`: the time to compile or read it.
    - `stages`: seconds of the compiler by stage; empty for a kernel that was read.
    """

    name: str
    key: str
    seconds: float
    stages: dict[str, float]

    @property
    def compiled(self) -> bool:
        """Return True if the kernel was compiled, False if it was read."""
        return bool(self.stages)


log: list[CompileRecord] = []  # of this process, in the order in which kernels became ready
# Flags of a thread: `in_processes`; `lookup_only`, if it asks where a kernel is and wants none.
_thread = threading.local()
_folders: list[Path] = []  # the last one is used in place of Triton's


# -- folders --------------------------------------------------------------------------------------


def folder() -> Path:
    """Return the folder of the kernels."""
    return _folders[-1] if _folders else Path(knobs.cache.dir)


@contextmanager
def use_folder(path: Path) -> Iterator[None]:
    """Let all threads read and write kernels in another folder."""
    _folders.append(path)
    try:
        yield
    finally:
        _folders.remove(path)


@lru_cache(maxsize=1)
def _temporary() -> Path:
    path = Path(tempfile.mkdtemp(prefix="headway-kernels-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


# -- entries --------------------------------------------------------------------------------------


class Entry(cache.CacheManager):
    """The files of one kernel, as Triton's compiler asks for them.

    - `key`: a SHA-256 in hexadecimal of everything that decides the kernel.
    - `compile_in_process`: compiles the entry into a folder, in another process; False if that
      fails.
    - `on_miss`: called under the lock, before the kernel is compiled.
    - `takes_lock`: False if the kernel is only looked up, or the parent process holds the lock.
    """

    def __init__(
        self, root: Path, key: str, compile_in_process: Callable[[Path], bool] | None = None,
        on_miss: Callable[[], None] | None = None, takes_lock: bool = True,
    ) -> None:  # fmt: skip
        self.root, self.key, self.takes_lock = root, key, takes_lock
        self.compile_in_process, self.on_miss = compile_in_process, on_miss
        self.hashes: dict[str, str] = {}
        self.lock: Any = None

    @property
    def path(self) -> Path:
        """The entry's folder, named by the key as Triton writes it."""
        return self.root / base64.b32encode(bytes.fromhex(self.key)).decode().rstrip("=")

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of all files, or None if the caller has to compile the kernel. It then
        holds the lock until `close`."""
        paths = self.files(filename)
        if paths is None and self.takes_lock:
            self._acquire_lock()
            paths = self.files(filename)  # another process may have compiled it meanwhile
            if paths is None:
                if self.on_miss is not None:
                    self.on_miss()
                if self.compile_in_process is not None and self.compile_in_process(self.root):
                    paths = self.files(filename)
            if paths is not None:
                self.close()
        return paths

    def files(self, filename: str) -> dict[str, str] | None:
        """Return the paths of all files; None if one is missing or differs from what was
        written."""
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
        """Write the file that completes the entry, after all others. `child_paths` is read by
        Triton itself if this module does not know Triton's compiler."""
        hashes = {name: self.hashes[name] for name in group}
        text = {"key": self.key, "sha256": hashes, "child_paths": group}
        self.put(json.dumps(text), _group(filename))

    def close(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            with suppress(OSError):
                self.lock.release()
            self.lock = None

    def _write(self, filename: str, data: bytes) -> None:
        draft = f".{filename}.{os.getpid()}.{threading.get_ident()}"
        self._ensure_writable()
        (self.path / draft).write_bytes(data)
        os.replace(self.path / draft, self.path / filename)

    def _ensure_writable(self) -> None:
        """Create the folder, or switch to a temporary one if it is not writable."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if os.access(self.path, os.W_OK):
                return
        except OSError:
            pass
        self.root = _temporary()
        self.path.mkdir(parents=True, exist_ok=True)

    def _acquire_lock(self) -> None:
        """Wait for the lock of the entry, if the file system has locks."""
        self._ensure_writable()
        try:
            import filelock  # PyTorch brings it; a process that has none takes no locks

            lock = filelock.FileLock(self.path / _LOCK)
            lock.acquire(timeout=_LOCK_TIMEOUT)
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
    if getattr(caches.default_factory, "func", None) is _device_cache:
        return
    if hasattr(fn, "compile"):
        fn.compile = compile_kernel
    caches.default_factory = partial(_device_cache, fn, caches.default_factory)


def _device_cache(fn: Any, make: Callable[[], Any]) -> Any:
    device_cache = make()  # sets `compile`
    fn.compile = compile_kernel
    return device_cache


@contextmanager
def in_processes() -> Iterator[None]:
    """Compile this thread's Gluon kernels in processes of their own. Gluon's front end holds
    Python's lock for a second, in which all other threads would wait.
    """
    outer = getattr(_thread, "in_processes", False)
    _thread.in_processes = True
    try:
        yield
    finally:
        _thread.in_processes = outer


def compile_kernel(src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
    """Compile or read a kernel: Triton's `compile`, with this cache in place of Triton's own."""
    if not is_supported():
        return _COMPILE(src, target=target, options=options, **more)
    start, entries = time.perf_counter(), list[Entry]()
    stages: dict[str, float] = {}
    announcement = threading.Timer(_SILENT_SECONDS, _announce, [src.name])
    announcement.daemon = True

    def entry_of(key: str) -> Entry:
        if getattr(_thread, "lookup_only", False):
            raise _LookupOnly(Entry(folder(), key, takes_lock=False), f"{src.name[:150]}.json")
        compile_in_process = None
        if getattr(_thread, "in_processes", False) and src.fn.is_gluon():
            compile_in_process = partial(_compile_in_process, src, target, options, key, stages)
        entries.append(Entry(folder(), key, compile_in_process, announcement.start))
        return entries[-1]

    try:
        compiled = _patched(_key, entry_of)(src, target=target, options=options, **more)
    finally:
        announcement.cancel()
        for entry in entries:
            entry.close()
    seconds = time.perf_counter() - start
    if announcement.ident is not None and not stages:
        stages["all"] = seconds
    log.append(CompileRecord(src.name, compiled.hash, seconds, stages))
    return compiled


def _announce(name: str) -> None:
    """Tell a person at a terminal why the call takes long."""
    with suppress(OSError, ValueError):  # the terminal is gone
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(f"headway: compiling the kernel {name}, once for calls like this\n")


def is_supported() -> bool:
    """Return True if this Triton's compiler is one that this module knows, and no setting makes
    Triton keep kernels elsewhere, dump them or replace them."""
    settings = knobs.cache.manager_class, knobs.compilation.always_compile
    settings += knobs.compilation.override, knobs.compilation.dump_ir
    names = compiler.compile.__code__.co_names
    return compiler.compile is _COMPILE and not any(settings) and {
        "get_cache_manager", "get_cache_key"
    } <= set(names)  # fmt: skip


def _patched(key: Callable[..., str], entry: Callable[[str], Entry]) -> Callable[..., Any]:
    """Return Triton's `compile` with two functions of its module replaced."""
    return _with_globals(_COMPILE, get_cache_key=key, get_cache_manager=entry)


def _with_globals(function: Any, **replaced: Any) -> Callable[..., Any]:
    """Return a function that finds other objects under some names of its module."""
    names, defaults = function.__globals__ | replaced, function.__defaults__
    return FunctionType(function.__code__, names, function.__name__, defaults, function.__closure__)


def _key(*args: Any, **options: Any) -> str:
    key_of = _with_globals(compiler.get_cache_key, triton_key=triton_hash)
    return f"{key_of(*args, **options)}-{_helper_hash()}"


@lru_cache(maxsize=1)
def _helper_hash() -> str:
    """Return a hash of sources that Triton's key misses: device functions that generated code names
    only in a constant's text, and the class of those constants."""
    backends = Path(__file__).parents[2]
    files = [*sorted((backends / "gpu" / "device").glob("*.py")), backends / "hopper" / "config.py"]
    return _sha256(b"".join(file.read_bytes() for file in files if file.exists()))


class _LookupOnly(Exception):
    """A kernel's entry and the name of its metadata, raised instead of compiling the kernel."""


def state_of(fn: Any, args: tuple, options: dict[str, Any]) -> str:
    """Return "loaded" if this process has the kernel of a launch, "cached" if it is on disk, and ""
    if it has to be compiled."""
    if not is_supported():
        return ""
    adopt(fn)
    _thread.lookup_only = True
    try:
        fn.warmup(*args, grid=(1, 1, 1), **options)
    except _LookupOnly as lookup:
        entry, filename = lookup.args
        return "cached" if entry.files(filename) else ""
    finally:
        _thread.lookup_only = False
    return "loaded"


def _compile_in_process(
    src: Any, target: Any, options: Any, key: str, stages: dict[str, float], root: Path
) -> bool:  # fmt: skip
    stage_seconds = compile_apart.run(src, target, dict(options or {}), key, str(root))
    stages.update(stage_seconds or {})
    return stage_seconds is not None


def compile_into(src: Any, target: Any, options: Any, key: str, root: str) -> dict[str, float]:
    """Compile a kernel into a folder, for a process that holds the lock of its entry.

    **Returns:** seconds by stage; `front end` is Python's.
    """
    stages: dict[str, float] = {}

    def listen(*, times: Any, **_: Any) -> None:
        stages["front end"] = times.ir_initialization / 1e6
        stages.update((stage, micros / 1e6) for stage, micros in times.lowering_stages)

    knobs.compilation.listener = listen
    entry = Entry(Path(root), key, takes_lock=False)
    _patched(lambda *args, **more: "", lambda key: entry)(src, target=target, options=options)
    return stages
