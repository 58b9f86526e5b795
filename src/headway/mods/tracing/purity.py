"""What is taken not to change, and to read its arguments alone: Python's own, torch's, ours."""

import enum
import functools
import sys
import types
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

_ROOT = __name__.partition(".")[0]
_MODS = _ROOT + ".mods"

# Compared by value; floats by their text, which tells -0.0 from 0.0 and NaN from nothing.
BY_VALUE = {
    bool, int, str, bytes, range, type(None), type(Ellipsis), type(NotImplemented), torch.dtype,
    torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
BY_TEXT = {float, complex, slice, torch.finfo, torch.iinfo}
CONTAINERS = {list, tuple, dict, set, frozenset, OrderedDict, torch.Size}
# Modules that do not change, and whose functions read their arguments alone, ...
_FIXED = frozenset(
    "math cmath operator _operator builtins functools _functools itertools typing enum torch "
    "torch._C torch._C._nn torch._C._special torch.functional torch.special torch._tensor "
    "torch.nn.functional torch.nn.parameter torch.autograd.grad_mode numpy".split()
) | {_ROOT}
_FIXED_ROOTS = (_MODS + ".", "torch.nn.modules.", "torch._ops.", "torch.ops.")
# ... but for these: they stand for a state, or read by names that are not in the code.
STATES = frozenset(
    "random cuda distributed backends utils compiler accelerator mps xpu attrgetter methodcaller "
    "lru_cache cache singledispatch".split()
)
# What runs around functions and modules of torch's, and reads nothing for them.
_AROUND = frozenset(
    "torch._ops torch._jit_internal torch._library.custom_ops torch.utils._contextlib "
    "torch.autograd.function".split()
)


@functools.lru_cache(maxsize=1024)
def is_fixed_module(name: str) -> bool:
    """Whether what a module has under a name stays the same, but for `STATES`."""
    return name in _FIXED or name.startswith(_FIXED_ROOTS)


@functools.lru_cache(maxsize=1024)
def is_fixed_code(module: str | None) -> bool:
    """Whether functions of a module written in Python read their arguments alone. In `torch` itself
    they tell or set how torch is set up; its ops are written in C, or are in modules below it."""
    if module is None or module == "torch":
        return False
    return is_fixed_module(module) or module in _AROUND or module.startswith("torch._dynamo.")


def is_fixed_function(fn: types.FunctionType) -> bool:
    """Whether a function written in Python is of such a module."""
    name = fn.__module__
    if not is_fixed_code(name):
        return False
    return getattr(sys.modules.get(name), "__dict__", None) is fn.__globals__  # it may say anything


_HEAP_TYPE = 1 << 9


@functools.lru_cache(maxsize=1024)
def is_fixed_class(cls: type) -> bool:
    """One that is written in C, or of a module that does not change."""
    if not cls.__flags__ & _HEAP_TYPE:
        return True
    name = getattr(cls, "__module__", None)
    known = isinstance(name, str) and is_fixed_module(name)
    return known and getattr(sys.modules.get(name), cls.__name__, None) is cls


@functools.lru_cache(maxsize=1024)
def base_of(kind: type) -> type | None:
    """The type in C below an object's class, `object` or a container; None for any other."""
    if kind is types.SimpleNamespace:  # the one type in C whose objects are what is put into them
        return object
    for cls in kind.__mro__:
        if not cls.__flags__ & _HEAP_TYPE:
            if cls is kind:
                return None
            return cls if cls is object or cls in CONTAINERS else None
    return None


def is_dynamic(kind: type) -> bool:
    """Whether attributes of its objects may come from code. (Not remembered: a class may get such
    a method later.)"""
    for cls in kind.__mro__:
        if not is_fixed_class(cls):
            own = cls.__dict__
            if "__getattr__" in own or "__getattribute__" in own:
                return True
    return False


# Built-in functions whose result is not of their arguments, or which read by other names.
_IMPURE = frozenset(
    "__build_class__ __import__ ascii breakpoint compile delattr dir eval exec format getattr "
    "globals hasattr hash id input locals open print repr setattr vars".split()
)
_PLAIN_TYPES = (*BY_VALUE, *BY_TEXT, *CONTAINERS)


def asks_of_torch(fn: Any) -> bool:
    """Whether a function written in C is one of `torch._C` itself: its ops are elsewhere. (The
    default dtype is part of what a function means, and compared with all that it reads.)"""
    return getattr(fn, "__self__", None) is torch._C and fn is not torch.get_default_dtype


def is_fixed_builtin(fn: Any) -> bool:
    """Whether a function written in C depends on its arguments alone, and on what it is bound to:
    whoever meets it follows that, too."""
    name, owner = getattr(fn, "__name__", ""), getattr(fn, "__self__", None)
    if isinstance(fn, types.MethodDescriptorType | types.WrapperDescriptorType):
        return not fn.__objclass__.__flags__ & _HEAP_TYPE and name not in ("format", "format_map")
    if isinstance(owner, type):
        return is_fixed_class(owner)
    if owner is None or isinstance(owner, types.ModuleType):
        if asks_of_torch(fn):
            return False
        module = getattr(fn, "__module__", None) if owner is None else owner.__name__
        return isinstance(module, str) and is_fixed_module(module) and name not in _IMPURE
    if isinstance(owner, Tensor):
        return True
    return type(owner) in _PLAIN_TYPES and name not in ("format", "format_map")


def is_numpy_scalar(kind: type) -> bool:
    """One of NumPy's numbers, which are compared by value. (It need not be loaded.)"""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.number | numpy.bool_)


def word(value: Any) -> Any:
    """A key of a dict, or an item of a set, by value; None if it may be anything."""
    kind = type(value)
    if kind in BY_VALUE:
        return kind, value
    if kind in BY_TEXT:
        return kind, repr(value)
    if kind is tuple:
        words = tuple(map(word, value))
        return None if None in words else words
    return value if issubclass(kind, enum.Enum | type | types.FunctionType) else None


def shown(value: Any) -> str:
    """A function or object as messages show it."""
    return getattr(value, "__qualname__", None) or type(value).__name__
