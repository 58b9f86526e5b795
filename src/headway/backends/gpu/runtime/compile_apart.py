"""A kernel compiled in a process of its own.

Triton's front end is written in Python, and takes a second for a kernel of the Hopper backend.
Threads would take turns there; processes do not. A process begins with Triton and the modules of
the kernel, 0.3 s, and without PyTorch, CUDA or what the program has imported: it runs this file by
itself. It is not forked (a fork of a process with threads and CUDA may hang), and it does not run
the program's main module again.

What is sent: the kernel's name, and what `triton.compile` takes. What comes back is an entry of the
cache on disk, so nothing is lost where this fails: the kernel is then compiled by the thread that
wants it, which also raises the compiler's error.
"""

import importlib
import io
import json
import linecache
import os
import pickle
import re
import subprocess
import sys
from collections import namedtuple
from types import ModuleType
from typing import Any

_SECONDS = 600.0  # a compiler that takes longer is stuck
_PYTHON = re.compile(r"python[\d.]*t?(\.exe)?")


def run(src: Any, target: Any, options: dict[str, Any], key: str, root: str) -> dict | None:
    """Compile a kernel into the entry `key` of the cache in the folder `root`.

    **Returns:** seconds by stage of the compiler; None where it failed, for whatever reason.
    """
    python = sys.executable or ""
    if not _PYTHON.fullmatch(os.path.basename(python)):  # Python is a part of another program
        return None
    try:
        job = _packed(src, target, options, key, root)
        done = subprocess.run(
            [python, "-I", "-S", os.path.abspath(__file__)], input=job, timeout=_SECONDS,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except Exception:  # noqa: BLE001  (no process, what cannot be sent, an answer of another program)
        return None


# -- what is sent ---------------------------------------------------------------------------------


def _packed(src: Any, target: Any, options: dict[str, Any], key: str, root: str) -> bytes:
    """A line of JSON, what importing needs; then the rest, pickled."""
    package = __name__.partition(".backends.")[0]
    packages = {
        name: list(module.__path__)
        for name, module in list(sys.modules.items())
        if (name + ".").startswith(package + ".") and hasattr(module, "__path__")
    }
    rest = io.BytesIO()
    pickler = _Pickler(rest)
    given = type(src), src.fn, _plain(src.signature), src.constants, src.attrs, target, options
    pickler.dump((*given, key, root))
    head = {
        "path": sys.path, "packages": packages, "cache": f"{__package__}.kernel_cache",
        "generated": pickler.generated,
    }  # fmt: skip
    return json.dumps(head).encode() + b"\n" + rest.getvalue()


class _Pickler(pickle.Pickler):
    """Device functions go by name; those of generated modules bring the text of the module."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.generated: dict[str, str] = {}

    def persistent_id(self, x: Any) -> Any:
        if not (hasattr(x, "cache_key") and hasattr(x, "fn")):
            return None
        module, name = x.__module__, x.__name__
        if module not in sys.modules:
            self.generated[module] = "".join(linecache.getlines(f"<{module}>"))
        elif getattr(sys.modules[module], name, None) is not x:
            raise LookupError(f"{module}.{name} is another function")
        return module, name


def _plain(kinds: Any) -> Any:
    """A signature without the classes of its named tuples, whose modules may load PyTorch: a tuple
    is a list of its class's name, its fields or None, and its values."""
    if isinstance(kinds, dict):
        return {name: _plain(kind) for name, kind in kinds.items()}
    if isinstance(kinds, tuple):
        fields = getattr(kinds, "_fields", None)
        return [type(kinds).__name__, fields, *map(_plain, kinds)]
    return kinds


# -- the process ----------------------------------------------------------------------------------


def main() -> None:
    """Compile what standard input says, and print the seconds of each stage."""
    head = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = head["path"]
    for name, path in head["packages"].items():
        # A package's own module may import anything: here it only says where its modules are.
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = path
    for name, text in head["generated"].items():
        file = f"<{name}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        sys.modules[name] = module = ModuleType(name)
        exec(compile(text, file, "exec"), module.__dict__)
    cache = importlib.import_module(head["cache"])
    kind, fn, signature, constants, attrs, *rest = _Unpickler(sys.stdin.buffer).load()
    src = kind(fn, _restored(signature), constants, attrs)
    sys.stdout.write(json.dumps(cache.make(src, *rest)) + "\n")


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, where: Any) -> Any:
        module, name = where
        return getattr(importlib.import_module(module), name)


def _restored(kinds: Any) -> Any:
    """What `_plain` made plain."""
    if isinstance(kinds, dict):
        return {name: _restored(kind) for name, kind in kinds.items()}
    if isinstance(kinds, list):
        name, fields, *found = map(_restored, kinds)
        return tuple(found) if fields is None else namedtuple(name, fields)(*found)
    return kinds


if __name__ == "__main__":
    main()
