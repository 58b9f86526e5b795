"""A kernel compiled in a process of its own.

Triton's front end is written in Python and takes 0.8 to 1.9 s for a kernel of the Hopper backend.
Threads take turns there, processes do not. With it, and with the self-test compiled beside the
call, a first call on an H100 went from 15 to 19 s to 5 to 6 s (docs/lab/host.md, 2026-11-26).

A process starts in 0.3 s with Triton and the kernel's modules, without PyTorch, CUDA or the
program's imports: it runs this file alone. It is not forked, because a fork of a process with
threads and CUDA may hang. It does not run the program's main module again.

The parent sends the kernel's name and the arguments of `triton.compile`. The child writes an entry
of the cache on disk. If it fails, the thread that wants the kernel compiles it, and raises the
compiler's error.
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

_TIMEOUT = 600.0  # seconds; a compiler that takes longer is stuck
_PYTHON = re.compile(r"python[\d.]*t?(\.exe)?")


def run(src: Any, target: Any, options: dict[str, Any], key: str, root: str) -> dict | None:
    """Compile a kernel into the entry `key` of the cache in the folder `root`.

    **Returns:** seconds by stage of the compiler; None if it failed, for whatever reason.
    """
    python = sys.executable or ""
    if not _PYTHON.fullmatch(os.path.basename(python)):  # Python is embedded in another program
        return None
    try:
        job = _packed(src, target, options, key, root)
        child = subprocess.run(
            [python, "-I", "-S", os.path.abspath(__file__)], input=job, timeout=_TIMEOUT,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        return json.loads(child.stdout.splitlines()[-1]) if child.returncode == 0 else None
    except Exception:  # noqa: BLE001  (no process, an unpicklable kernel, another program's answer)
        return None


# -- the parent -----------------------------------------------------------------------------------


def _packed(src: Any, target: Any, options: dict[str, Any], key: str, root: str) -> bytes:
    """Return a line of JSON with everything that imports need, then the job, pickled."""
    package = __name__.partition(".backends.")[0]
    packages = {
        name: list(module.__path__)
        for name, module in list(sys.modules.items())
        if (name + ".").startswith(package + ".") and hasattr(module, "__path__")
    }
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    signature = _without_classes(src.signature)
    pickler.dump(
        (type(src), src.fn, signature, src.constants, src.attrs, target, options, key, root)
    )
    imports = {
        "path": sys.path, "packages": packages, "cache": f"{__package__}.kernel_cache",
        "generated": pickler.generated,
    }  # fmt: skip
    return json.dumps(imports).encode() + b"\n" + pickled.getvalue()


class _Pickler(pickle.Pickler):
    """A pickler that sends device functions by name, and generated modules as source text."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.generated: dict[str, str] = {}

    def persistent_id(self, value: Any) -> Any:
        if not (hasattr(value, "cache_key") and hasattr(value, "fn")):
            return None
        module, name = value.__module__, value.__name__
        if module not in sys.modules:
            self.generated[module] = "".join(linecache.getlines(f"<{module}>"))
        elif getattr(sys.modules[module], name, None) is not value:
            raise LookupError(f"{module}.{name} is another function")
        return module, name


def _without_classes(types: Any) -> Any:
    """Return a signature without the classes of its named tuples, whose modules may load PyTorch.
    A tuple becomes a list: the name of its class, its fields or None, and its values."""
    if isinstance(types, dict):
        return {name: _without_classes(of_name) for name, of_name in types.items()}
    if isinstance(types, tuple):
        fields = getattr(types, "_fields", None)
        return [type(types).__name__, fields, *map(_without_classes, types)]
    return types


# -- the child ------------------------------------------------------------------------------------


def main() -> None:
    """Compile the job on standard input, and print the seconds of each stage."""
    imports = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = imports["path"]
    for name, path in imports["packages"].items():
        # A package's own module may import anything: here it only says where its modules are.
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = path
    for name, text in imports["generated"].items():
        file = f"<{name}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        sys.modules[name] = module = ModuleType(name)
        exec(compile(text, file, "exec"), module.__dict__)
    cache = importlib.import_module(imports["cache"])
    job = _Unpickler(sys.stdin.buffer).load()
    source_class, fn, signature, constants, attrs, target, options, key, root = job
    src = source_class(fn, _with_classes(signature), constants, attrs)
    stage_seconds = cache.compile_into(src, target, options, key, root)
    sys.stdout.write(json.dumps(stage_seconds) + "\n")


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, function: Any) -> Any:
        module, name = function
        return getattr(importlib.import_module(module), name)


def _with_classes(types: Any) -> Any:
    """Undo `_without_classes`."""
    if isinstance(types, dict):
        return {name: _with_classes(of_name) for name, of_name in types.items()}
    if isinstance(types, list):
        name, fields, *values = map(_with_classes, types)
        return tuple(values) if fields is None else namedtuple(name, fields)(*values)
    return types


if __name__ == "__main__":
    main()
