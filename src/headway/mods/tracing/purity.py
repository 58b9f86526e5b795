"""Tables of what tracing takes for constant or pure: parts of Python, of torch and of Headway.

Constant: a module or class whose attributes do not change between calls. Pure: a function that
reads nothing but its arguments. The walk over a function's reads stops at both.
"""

import abc
import enum
import functools
import sys
import types
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from .locations import file_owner

_ROOT = __name__.partition(".")[0]
_MODS = _ROOT + ".mods"

# Compared by value; floats by their text, which tells -0.0 from 0.0 and NaN from nothing.
BY_VALUE = {
    bool, int, str, bytes, type(None), type(Ellipsis), type(NotImplemented), torch.dtype,
    torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
BY_TEXT = {float, complex, range, torch.finfo, torch.iinfo}
CONTAINERS = {list, tuple, dict, set, frozenset, OrderedDict, torch.Size}
_VALUE_TYPES = BY_VALUE | BY_TEXT | CONTAINERS
_KNOWN_TYPES = _VALUE_TYPES | {types.FunctionType, types.MethodType, types.ModuleType}
METACLASSES = {type, abc.ABCMeta, enum.EnumMeta}
BUILTIN_TYPES = {
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.ClassMethodDescriptorType,
}  # fmt: skip
# What Dynamo guards as a whole. (It takes -0.0 for 0.0.)
GUARDED_TYPES = {
    bool, int, float, str, type(None), list, tuple, Tensor, torch.nn.Parameter, torch.dtype,
    torch.device, types.FunctionType, types.ModuleType, types.BuiltinFunctionType,
}  # fmt: skip
# Modules whose functions are pure. (What else they have is followed, if a name leads to it.)
_CONSTANT_MODULES = frozenset(
    "math cmath operator _operator builtins functools _functools itertools typing enum torch "
    "torch.ops "
    "torch._C torch._C._nn torch._C._special torch.functional torch.special torch._tensor "
    "torch.nn.functional torch.nn.parameter torch.autograd.grad_mode numpy".split()
) | {_ROOT}
_CONSTANT_PREFIXES = (_MODS + ".", "torch.nn.modules.", "torch._ops.", "torch.ops.")
# Classes in C of such modules whose objects read by names that are not in the code, or the time.
_READ_MORE = {"attrgetter", "methodcaller", "datetime64"}
# Modules whose functions wrap those of torch, and read nothing for them.
_WRAPPER_MODULES = frozenset(
    "torch._ops torch._jit_internal torch._library.custom_ops torch.utils._contextlib "
    "torch.autograd.function".split()
)


@functools.lru_cache(maxsize=1024)
def is_constant_module(name: str) -> bool:
    """Return whether the functions of a module are pure, and stay the same."""
    return name in _CONSTANT_MODULES or name.startswith(_CONSTANT_PREFIXES)


@functools.lru_cache(maxsize=1024)
def is_pure_module(module: str | None) -> bool:
    """Return whether the Python functions of a module are pure.

    Those of `torch` itself query or set its state. Its ops are written in C, or are in modules
    below it.
    """
    if module is None or module == "torch":
        return False
    return (
        is_constant_module(module)
        or module in _WRAPPER_MODULES
        or module.startswith("torch._dynamo.")
    )


def is_pure_function(fn: types.FunctionType) -> bool:
    """Return whether a function written in Python belongs to a module of pure functions."""
    name = fn.__module__
    if not is_pure_module(name):
        return False
    # `__module__` may be set to anything; the globals are the module's own.
    return getattr(sys.modules.get(name), "__dict__", None) is fn.__globals__


_HEAP_TYPE = 1 << 9
# How methods and fields in C stand in the namespace of their class.
_DESCRIPTORS = {
    types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType,
}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def is_constant_class(cls: type) -> bool:
    """Return whether a class is written in C, or belongs to a module that does not change."""
    return not is_heap_class(cls) or _is_of_constant_module(cls)


def is_heap_class(cls: type) -> bool:
    """Return whether a class can get attributes."""
    return bool(cls.__flags__ & _HEAP_TYPE)


@functools.lru_cache(maxsize=1024)
def is_class_statement(cls: type) -> bool:
    """Return whether a class came from a class statement, so that it has no parts in C: whatever
    is in its namespace and was made for it is a slot, `__dict__` or `__weakref__`."""
    if not cls.__flags__ & _HEAP_TYPE:
        return False
    for name, item in cls.__dict__.items():
        kind = type(item)
        if kind is types.BuiltinFunctionType:
            made_for_it = item.__self__ is cls  # its own `__new__`
        else:
            made_for_it = kind in _DESCRIPTORS and item.__objclass__ is cls
        is_slot = kind is types.MemberDescriptorType and "__slots__" in cls.__dict__
        if made_for_it and not is_slot and name not in ("__dict__", "__weakref__"):
            return False
    return True


@functools.lru_cache(maxsize=1024)
def builtin_base(kind: type) -> type | None:
    """Return the container, number or string that a class statement derives a class from; `object`
    if none, None if any class in its MRO has parts in C."""
    if kind is types.SimpleNamespace:  # a type in C whose objects have free attributes
        return object
    bases = [cls for cls in kind.__mro__ if cls in _VALUE_TYPES]
    others = [cls for cls in kind.__mro__ if cls not in bases and cls is not object]
    if not all(map(is_class_statement, others)):
        return None
    return bases[0] if bases else object


@functools.lru_cache(maxsize=1024)
def is_known_class(cls: type) -> bool:
    """Return whether calling a class, which a trace does not see, reads nothing but arguments and
    what a walk over its Python code reaches."""
    return all(
        base in _KNOWN_TYPES
        or is_class_statement(base)
        or (base.__name__ not in _READ_MORE and _is_of_constant_module(base))
        for base in cls.__mro__
    )


def _is_of_constant_module(cls: type) -> bool:
    """Return whether a class is where it says it is: types in C may name any module."""
    name = getattr(cls, "__module__", None)
    is_constant = isinstance(name, str) and is_constant_module(name)
    return is_constant and getattr(sys.modules.get(name), cls.__name__, None) is cls


def has_dynamic_attributes(kind: type) -> bool:
    """Return whether attributes of its objects, or its own, may be computed by `__getattr__`, or
    are not where `__dict__` says.

    The result is not cached: a class may get such a method later.
    """
    for cls in kind.__mro__ if type(kind) is type else (*kind.__mro__, *type(kind).__mro__):
        if is_constant_class(cls):
            continue
        names = cls.__dict__
        if "__getattr__" in names or "__getattribute__" in names:
            return True
        if type(names.get("__dict__", _OWN_DICT)) is not types.GetSetDescriptorType:
            return True
    return False


_OWN_DICT = types.FunctionType.__dict__["__dict__"]


def abc_token(cls: type) -> object:
    """Return what changes when any abstract base class gets a virtual subclass: `isinstance` of an
    abstract class, or of what derives from one, depends on it. None for other classes."""
    return abc.get_cache_token() if issubclass(type(cls), abc.ABCMeta) else None


def defines_checks(cls: type) -> bool:
    """Return whether a class's metaclass says itself what its instances or subclasses are."""
    own = [meta.__dict__ for meta in type(cls).__mro__ if meta not in (type, abc.ABCMeta)]
    return any("__instancecheck__" in names or "__subclasscheck__" in names for names in own)


# Built-in functions whose result depends on more than their arguments, or which read by name.
_IMPURE_BUILTINS = frozenset(
    "__build_class__ __import__ ascii breakpoint compile delattr dir eval exec format fromfile "
    "getattr globals hasattr hash id input locals open print repr setattr vars".split()
)


# Methods in C that read by names in their arguments. Of the classes at the root of all others every
# method may, but for these.
READING_METHODS = frozenset({"format", "format_map", "__getattribute__"})
_ROOT_CLASSES = {object, type, super, types.ModuleType}
_PURE_OF_ROOTS = frozenset(
    "__init__ __new__ __setattr__ __delattr__ __eq__ __ne__ __hash__ __init_subclass__".split()
)


def queries_torch_state(fn: Any) -> bool:
    """Return whether a function in C queries or sets the state of torch: one of `torch._C` itself.

    `torch.get_default_dtype` is excepted: the default dtype is part of every key.
    """
    return getattr(fn, "__self__", None) is torch._C and fn is not torch.get_default_dtype


def is_pure_builtin(fn: Any) -> bool:
    """Return whether a function written in C reads only its arguments and its bound object.

    The walk follows the bound object as well.
    """
    name, owner = getattr(fn, "__name__", ""), getattr(fn, "__self__", None)
    if isinstance(fn, types.MethodDescriptorType | types.WrapperDescriptorType):
        cls = fn.__objclass__
        if cls in _ROOT_CLASSES:
            return name in _PURE_OF_ROOTS
        return not cls.__flags__ & _HEAP_TYPE and name not in READING_METHODS
    if isinstance(owner, type):
        return is_constant_class(owner)
    if owner is None or isinstance(owner, types.ModuleType):
        if queries_torch_state(fn):
            return False
        module = getattr(fn, "__module__", None) if owner is None else owner.__name__
        return (
            isinstance(module, str) and is_constant_module(module) and name not in _IMPURE_BUILTINS
        )
    if isinstance(owner, Tensor):
        return True
    return type(owner) in _VALUE_TYPES and name not in READING_METHODS


def is_library_code(item: Any) -> bool:
    """Return whether what a module or a class of a library has under a name is the library's code,
    which is taken not to change. Anything else was put there, and is followed."""
    kind = type(item)
    if kind is types.FunctionType or kind is types.BuiltinFunctionType:
        return _is_library_function(item)
    if issubclass(kind, staticmethod | classmethod):
        return is_library_code(item.__func__)
    if issubclass(kind, property | types.DynamicClassAttribute):
        return is_library_code(item.fget)
    return kind in _DESCRIPTORS or (kind.__module__ in _LIBRARY_CALLABLES and callable(item))


_LIBRARY_CALLABLES = {"numpy", "typing", "torch._ops"}  # modules of types: ufuncs, List, ops


@functools.lru_cache(maxsize=4096)
def _is_library_function(fn: Any) -> bool:
    if type(fn) is types.FunctionType:
        return file_owner(fn.__code__.co_filename) != "user"
    return is_pure_builtin(fn)


def is_numpy_scalar(kind: type) -> bool:
    """Return whether a type is one of NumPy's numbers, without loading NumPy."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and issubclass(kind, numpy.number | numpy.bool_)
        and is_constant_class(kind)
    )


def key_by_value(value: Any) -> Any:
    """Return a dict's key or a set's item in a form that compares by value.

    None if the type is unknown: its objects may change. Attributes of the others are followed.
    """
    kind = type(value)
    if kind in BY_VALUE:
        return kind, value
    if kind in BY_TEXT:
        return kind, repr(value)
    if kind is tuple:
        items = tuple(map(key_by_value, value))
        return None if None in items else items
    return (kind, value) if issubclass(kind, enum.Enum | type | types.FunctionType) else None


def display_name(value: Any) -> str:
    """Return the name of a function, or of an object's type, for messages."""
    return getattr(value, "__qualname__", None) or type(value).__name__
