"""What a user's function carries with it: the tensors and numbers in its closure.

FlexAttention's style is a closure: `lambda s, b, h, i, j: s + bias[h, j - i]`. To trace it once and
call it often, we need the tensors it captures (they become arguments of the kernel) and everything
else it depends on (that becomes the key of the cached trace): a function whose captured objects
changed is traced again, never stale.

`leaves` walks closure cells, defaults, `functools.partial`, bound methods, modules, containers and
the globals that the code reads. Each tensor has a path from the function, and `resolve` follows
it in code that `torch.compile` can trace.
"""

import enum
import functools
import sys
import types
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Step = tuple[str, Any]
Path = tuple[Step, ...]

_BY_VALUE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    enum.Enum,
    type(Ellipsis),
)
_CONSTANT = (types.ModuleType, type, types.BuiltinFunctionType)
# Modules whose attributes are taken to be constant.
_FIXED_MODULES = ("torch", "math", "operator", "functools", "numpy", "headway", "builtins")


class Leaves:
    """The captured tensors with their paths, the captured numbers, and a key for the rest."""

    __slots__ = ("_seen", "cacheable", "key", "numbers", "tensors")

    def __init__(self) -> None:
        self.tensors: list[tuple[Path, Tensor]] = []
        self.numbers: list[tuple[Path, Any]] = []
        self.key: list[Any] = []
        self.cacheable = True
        self._seen: set[int] = set()


def leaves(fn: Callable) -> Leaves:
    """Walk everything that `fn` can see."""
    found = Leaves()
    _walk(fn, (), found)
    return found


def shared(found: Sequence[Leaves]) -> tuple[int, ...]:
    """Which tensors several functions have in common: part of the key of their common trace."""
    if len(found) == 1:
        return ()
    ids = [id(t) for of in found for _, t in of.tensors]
    return tuple([ids.index(n) for n in ids])


def _walk(value: Any, path: Path, found: Leaves) -> None:
    kind = type(value)
    if kind is not types.FunctionType:
        if isinstance(value, Tensor):
            same = None
            for n, (_, t) in enumerate(found.tensors):
                if t is value:
                    same = n
            if same is None:
                found.tensors.append((path, value))
            found.key.append((Tensor, same, value.dtype, tuple(value.shape)))
            return
        if isinstance(value, _BY_VALUE):
            found.numbers.append((path, value))
            found.key.append((kind, repr(value)))
            return
        if isinstance(value, _CONSTANT) or (
            kind.__module__.partition(".")[0] == "torch" and not isinstance(value, torch.nn.Module)
        ):
            found.key.append(value)
            return
    if id(value) in found._seen:
        found.key.append("seen")
        return
    found._seen.add(id(value))
    if kind is types.FunctionType:
        _walk_function(value, path, found)
    elif isinstance(value, types.MethodType):
        found.key.append(value.__func__.__code__)
        _walk(value.__self__, (*path, ("attr", "__self__")), found)
        _walk_function(value.__func__, (*path, ("attr", "__func__")), found)
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            _walk(getattr(value, name), (*path, ("attr", name)), found)
    elif isinstance(value, list | tuple):
        found.key.append((type(value), len(value)))
        for n, item in enumerate(value):
            _walk(item, (*path, ("item", n)), found)
    elif isinstance(value, dict):
        found.key.append((dict, tuple(map(repr, value))))
        for name, item in value.items():
            _walk(item, (*path, ("item", name)), found)
    elif isinstance(value, torch.nn.Module):
        found.key.append((type(value), value.training))
        for name, item in [*value.named_parameters(), *value.named_buffers()]:
            steps = tuple(("attr", part) for part in name.split("."))
            _walk(item, (*path, *steps), found)
        _walk_attributes(value, path, found, skip=torch.nn.Module().__dict__)
        _walk_function(type(value).forward, (*path, ("attr", "forward")), found)
    elif hasattr(value, "__dict__"):
        found.key.append(type(value))
        _walk_attributes(value, path, found, skip={})
        call = type(value).__call__ if callable(value) else None
        if isinstance(call, types.FunctionType):
            _walk_function(call, (*path, ("attr", "__call__")), found)
    else:
        found.cacheable = False  # not known to be immutable: trace at every call


def _walk_attributes(value: Any, path: Path, found: Leaves, skip: Any) -> None:
    for name, item in vars(value).items():
        if name not in skip:
            found.key.append(name)
            _walk(item, (*path, ("attr", name)), found)


def _walk_function(fn: types.FunctionType, path: Path, found: Leaves) -> None:
    found.key.append(fn.__code__)
    for n, cell in enumerate(fn.__closure__ or ()):
        try:
            content = cell.cell_contents
        except ValueError:  # a name not yet assigned
            found.key.append("empty")
            continue
        _walk(content, (*path, ("cell", n)), found)
    for n, item in enumerate(fn.__defaults__ or ()):
        _walk(item, (*path, ("default", n)), found)
    for name, item in (fn.__kwdefaults__ or {}).items():
        _walk(item, (*path, ("kwdefault", name)), found)
    names = _names(fn.__code__)
    for name in names:
        if name not in fn.__globals__:
            continue
        value = fn.__globals__[name]
        if not isinstance(value, types.ModuleType):
            _walk(value, (*path, ("global", name)), found)
        elif value.__name__.partition(".")[0] not in _FIXED_MODULES:
            for attr in names:
                if hasattr(value, attr):
                    _walk(getattr(value, attr), (*path, ("global", name), ("attr", attr)), found)


@lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The global and attribute names of a code object and of the functions inside it."""
    names = dict.fromkeys(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names.update(dict.fromkeys(_names(const)))
    return tuple(names)


def resolve(fn: Any, path: Path) -> Any:
    """Follow a path from a function to what it captures; plain code that Dynamo can trace."""
    value = fn
    for step, at in path:
        if step == "cell":
            value = value.__closure__[at].cell_contents
        elif step == "default":
            value = value.__defaults__[at]
        elif step == "kwdefault":
            value = value.__kwdefaults__[at]
        elif step == "global":
            value = getattr(sys.modules[value.__module__], at)
        elif step == "item":
            value = value[at]
        else:
            value = getattr(value, at)
    return value
