"""What a user's function can read: the tensors that it captures, and all else that it hangs on.

FlexAttention's style is a closure: `lambda s, b, h, i, j: s + bias[h, j - i]`. To trace it once and
call it often, we need the tensors that it captures (they become arguments of the kernel), and to
know that everything else that its trace read is as it was (that is the key of the cached trace).

`reads` finds both, by names. A function reads its cells, its defaults and the globals that its code
names; of these the items of containers, and the attributes that some code names. The walk follows
every such name to every object that has it, and functions and methods to their code, until nothing
new turns up. So a key may hold more than was read (then a function is traced once more than it had
to be). What no name leads to (`getattr(o, n)`, `__getattr__`, an object of an unknown kind) is said
in `unseen`: such a function is traced at every call. That nothing else was read is not taken on
trust: `watch.py` looks on while a function is traced.

Each object has a path from the function, and `resolve` follows it in code that `torch.compile` can
trace. There, all paths are followed in every call (`guards`), so that Dynamo guards what they find.
"""

import abc
import enum
import functools
import types
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from ..base import Mod
from .bytecode import code_of
from .call_recorder import has_backward_hooks
from .locations import Place, quote
from .purity import (
    BY_TEXT,
    BY_VALUE,
    CONTAINERS,
    STATES,
    base_of,
    is_dynamic,
    is_fixed_builtin,
    is_fixed_class,
    is_fixed_function,
    is_fixed_module,
    is_numpy_scalar,
    shown,
    word,
)

Step = tuple[str, Any]
Path = tuple[Step, ...]
Guard = tuple[Path, str, Any]  # what a path finds, how it is compared, and with what

_MOST = 2000  # objects: a function that can read more is traced at every call

_METACLASSES = {type, abc.ABCMeta, enum.EnumMeta}
_TENSORS = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
_FIELD = type(namedtuple("_", "field").__dict__["field"])


class Reads:
    """What a function can read.

    - `tensors`: the captured ones, each once, with their paths.
    - `key`: everything else, and which of it is the same object; equal keys, equal reads.
    - `codes`: of the functions that it can call.
    - `guards`: what `torch.compile` is to look at in every call; if asked for.
    - `unseen`: the first read that cannot be followed, with its place; None if all can.
    """

    __slots__ = ("codes", "guards", "key", "tensors", "unseen")

    def __init__(self) -> None:
        self.tensors: list[tuple[Path, Tensor]] = []
        self.key: list[Any] = []
        self.codes: set[types.CodeType] = set()
        self.guards: list[Guard] = []
        self.unseen: str | None = None


def reads(fn: Callable, guarding: bool = False) -> Reads:
    """Everything that `fn` can read, and if `guarding` how a compiler is to guard it."""
    walk = _Walk(guarding)
    walk.visit(fn, (), ())
    walk.finish()
    return walk.found


def shared(found: Sequence[Reads]) -> tuple[int, ...]:
    """Which tensors several functions have in common: part of the key of their common trace."""
    if len(found) == 1:
        return ()
    ids = [id(t) for of in found for _, t in of.tensors]
    return tuple([ids.index(n) for n in ids])


class _Holder:
    """An object whose attributes are looked up by name; the first `looked` names have been."""

    __slots__ = ("above", "looked", "number", "object", "path")

    def __init__(self, value: Any, path: Path, above: tuple, number: int) -> None:
        self.object, self.path, self.above, self.number, self.looked = value, path, above, number, 0


class _Walk:
    """From a function to all that it can read, depth first, in an order that the key tells."""

    label = "the function"  # what is being visited, in messages
    place: Place | None = None

    def __init__(self, guarding: bool) -> None:
        self.found = Reads()
        self.guarding = guarding
        self.seen: dict[int, tuple[int, Any]] = {}  # with the object: ids hold while objects live
        self.names: dict[str, None] = {}  # of attributes, in the order of their discovery
        self.holders: list[_Holder] = []
        self.fixed: list[types.ModuleType] = []

    def finish(self) -> None:
        """Look up every name in every holder, until there is nothing new of either."""
        more = bool(self.holders)
        while more:
            more, names = False, list(self.names)
            for holder in self.holders:  # grows
                while holder.looked < len(names):
                    name = names[holder.looked]
                    holder.looked += 1
                    self.look(holder, name)
                    more = True
        if _has_any_global_hook():
            self.miss("may call a module, and global hooks of modules are registered")
        for module in self.fixed:
            for name in STATES & self.names.keys() & vars(module).keys():
                self.miss(f"reads {module.__name__}.{name}")

    def miss(self, what: str, place: Place | None = None) -> None:
        """Something is read that cannot be followed."""
        if self.found.unseen is None:
            self.found.unseen = what + quote(place or self.place)

    def guard(self, path: Path, test: str, expected: Any = None) -> None:
        """A check for `torch.compile`; who is asked at every call looks at `guarding` first."""
        if self.guarding:
            self.found.guards.append((path, test, expected))

    # -- objects ------------------------------------------------------------------------------

    def visit(self, value: Any, path: Path, above: tuple[int, ...]) -> None:
        """Note a value, and whatever can be read through it."""
        kind, key = type(value), self.found.key
        if kind in BY_VALUE or kind in BY_TEXT:
            key.append((kind, value if kind in BY_VALUE else repr(value)))
            if self.guarding:
                self.guard(path, "value", value)
            return
        again = self.seen.get(id(value))
        if again is None:
            self.seen[id(value)] = len(self.seen), value
        else:
            key.append(again[0])
            # Dynamo guards values and not which of them are one: it has to follow every path.
            if not self.guarding or id(value) in above:
                return
        if len(self.seen) > _MOST or len(self.found.guards) > 4 * _MOST:
            self.miss(f"can read more than {_MOST} objects")
            return
        above = (*above, id(value)) if self.guarding else ()
        if kind is types.FunctionType:
            self.function(value, path, above)
        elif issubclass(kind, Tensor):
            self.tensor(value, path, again is None)
        else:
            self.object(value, kind, path, above)

    def tensor(self, t: Tensor, path: Path, new: bool) -> None:
        if new:
            self.found.tensors.append((path, t))
        kind = type(t)
        self.found.key.append((kind, t.dtype, tuple(t.shape), t.device, t.requires_grad))
        if self.guarding:
            self.guard(path, "is")
        if kind not in _TENSORS:
            self.miss(f"reads {self.label}, a {kind.__name__}, which may be anything")
        elif t.__dict__:
            self.hold(t, path, ())

    def object(self, value: Any, kind: type, path: Path, above: tuple) -> None:
        key = self.found.key
        # Of the type: isinstance would ask the object, which may say anything.
        if issubclass(kind, types.ModuleType):
            key.append(value)
            self.guard(path, "is")
            if is_fixed_module(value.__name__):
                self.fixed.append(value)
            else:
                self.hold(value, path, above)
        elif issubclass(kind, type):
            key.append(value)
            self.guard(path, "is")
            if not is_fixed_class(value):
                if type(value) not in _METACLASSES:
                    self.miss(f"reads {self.label}, a class with a metaclass of its own")
                self.hold(value, path, above)
        elif kind is types.MethodType:
            key.append(kind)
            self.visit(value.__func__, (*path, ("attr", "__func__")), above)
            self.method_self(value.__self__, (*path, ("attr", "__self__")), above)
        elif issubclass(kind, functools.partial):
            key.append(kind)
            for name in ("func", "args", "keywords"):
                self.visit(getattr(value, name), (*path, ("attr", name)), above)
        elif kind in CONTAINERS:
            self.container(value, kind, path, above)
        elif kind in _KINDS_OF_C:
            self.builtin(value, kind, path, above)
        elif issubclass(kind, Mod) and kind.of_library:
            key.append(kind)
            self.guard(path, "is")
            for name in kind.fields:
                self.visit(getattr(value, name), (*path, ("attr", name)), above)
        elif is_numpy_scalar(kind):
            key.append((kind, repr(value)))
            self.guard(path, "value", value)
        elif kind.__module__.startswith("torch._ops"):
            key.append(value)
            self.guard(path, "is")
        else:
            self.instance(value, kind, path, above)

    def builtin(self, value: Any, kind: type, path: Path, above: tuple) -> None:
        """A function written in C, and the object that it is bound to, which it reads."""
        self.guard(path, "is")
        if not is_fixed_builtin(value):
            self.miss(f"reads {self.label}, the built-in {shown(value)}")
        owner = getattr(value, "__self__", None)
        if owner is None or issubclass(type(owner), types.ModuleType | type):
            self.found.key.append(value)
            return
        self.found.key.append((kind, value.__name__))
        if self.guarding:  # Dynamo does not guard what such an object holds
            self.miss(f"reads {self.label}, the built-in {shown(value)} of an object")
        self.visit(owner, (*path, ("attr", "__self__")), above)

    def container(self, value: Any, kind: type, path: Path, above: tuple) -> None:
        key = self.found.key
        self.guard(path, "size", len(value))
        if isinstance(value, set | frozenset | dict):
            words = tuple(map(word, value))
            key.append((kind, words))
            if None in words:
                self.miss(f"reads {self.label}, a {kind.__name__} of objects")
        else:
            key.append((kind, len(value)))
        if isinstance(value, dict):
            for name, item in value.items():
                self.visit(item, (*path, ("item", name)), above)
        elif not isinstance(value, set | frozenset):
            for n, item in enumerate(value):
                self.visit(item, (*path, ("item", n)), above)

    def instance(self, value: Any, kind: type, path: Path, above: tuple) -> None:
        """An object of a class that is written in Python."""
        self.found.key.append(kind)
        self.guard(path, "is")
        if is_dynamic(kind):
            self.miss(f"reads {self.label}, whose class has a __getattr__ of its own")
            return
        base, of_torch = base_of(kind), issubclass(kind, torch.nn.Module)
        if of_torch and (
            value._forward_hooks or value._forward_pre_hooks or has_backward_hooks(value)
        ):
            self.miss(f"reads {self.label}, a module with hooks")
        if of_torch and is_fixed_class(kind):
            self.module(value, path, above)
            return
        if isinstance(value, enum.Enum):
            self.visit(value._value_, (*path, ("attr", "value")), above)
        elif base is None or (is_fixed_class(kind) and kind is not types.SimpleNamespace):
            self.miss(f"reads {self.label}, an object of the type {kind.__name__}")
            return
        elif base is not object:
            self.container(value, base, path, above)
        holder = self.hold(value, path, above)
        self.look(holder, "forward" if of_torch else "__call__")

    def module(self, value: torch.nn.Module, path: Path, above: tuple) -> None:
        """A module of torch's, whose code may read all that it has."""
        for name, item in vars(value).items():
            if name not in _OF_ANY_MODULE:
                self.visit(item, (*path, ("attr", name)), above)
        self.visit(value.training, (*path, ("attr", "training")), above)
        for part in (value._parameters, value._buffers):
            for name, item in part.items():
                self.visit(item, (*path, ("attr", name)), above)
        at = "item" if isinstance(value, _MODULES_BY_ITEM) else "attr"
        by_number = isinstance(value, torch.nn.ModuleList | torch.nn.Sequential)
        for name, item in value._modules.items():
            self.found.key.append(name)
            self.visit(item, (*path, (at, int(name) if by_number else name)), above)

    def method_self(self, value: Any, path: Path, above: tuple) -> None:
        """What a method is bound to is read by names, and not called: of a whole model, with a
        mask among its methods, nothing else is looked at."""
        kind = type(value)
        known = issubclass(kind, type | Tensor | types.ModuleType | Mod) or id(value) in self.seen
        if known or kind in BY_VALUE or base_of(kind) is not object or is_dynamic(kind):
            self.visit(value, path, above)
        else:
            self.seen[id(value)] = len(self.seen), value
            self.found.key.append(kind)
            self.guard(path, "is")
            self.hold(value, path, (*above, id(value)) if self.guarding else ())

    # -- names --------------------------------------------------------------------------------

    def function(self, fn: types.FunctionType, path: Path, above: tuple) -> None:
        """Its cells, defaults and globals; the names of attributes are looked up in `finish`."""
        code, key = code_of(fn.__code__), self.found.key
        if is_fixed_function(fn):
            key.append(fn)
            self.guard(path, "is")
            return
        key.append(code)
        if self.guarding:
            self.guard(path, "code")
        self.found.codes.update(code.all)
        self.place = code.place
        if code.unseen is not None:
            self.miss(*code.unseen)
        if code.attributes:
            self.names.update(dict.fromkeys(code.attributes))
        free = fn.__code__.co_freevars
        for n, cell in enumerate(fn.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:  # a name not yet assigned
                key.append("empty")
                continue
            self.label = free[n]
            self.visit(content, (*path, ("cell", n)), above)
        if fn.__defaults__:
            key.append(("defaults", len(fn.__defaults__)))
            for n, item in enumerate(fn.__defaults__):
                self.label = "a default"
                self.visit(item, (*path, ("default", n)), above)
        if fn.__kwdefaults__:
            key.append(("defaults", tuple(fn.__kwdefaults__)))
            for name, item in fn.__kwdefaults__.items():
                self.label = name
                self.visit(item, (*path, ("kwdefault", name)), above)
        for name, place in code.globals:
            self.label, self.place = name, place
            if name in fn.__globals__:
                self.visit(fn.__globals__[name], (*path, ("global", name)), above)
                continue
            found = fn.__builtins__.get(name)  # None: whoever reads it fails
            key.append(("builtin", found))
            if not (type(found) in BY_VALUE or isinstance(found, type) or is_fixed_builtin(found)):
                self.miss(f"reads {name}")
        if fn.__dict__:
            self.hold(fn, path, above)

    def hold(self, value: Any, path: Path, above: tuple) -> _Holder:
        holder = _Holder(value, path, above, len(self.holders))
        self.holders.append(holder)
        return holder

    def look(self, holder: _Holder, name: str) -> None:
        """Visit what an attribute is, in the object itself and in every class of it."""
        value = holder.object
        self.label = name
        own = getattr(value, "__dict__", {}) if not isinstance(value, type) else {}
        if name in own:
            self.attribute(holder, name, "", own[name], ("attr", name))
        elif isinstance(value, types.ModuleType) and "__getattr__" in own:
            self.miss(f"reads {name} of a module with a __getattr__")
        if isinstance(value, torch.nn.Module):
            for part in (value._parameters, value._buffers, value._modules):
                if name in part:
                    self.attribute(holder, name, "", part[name], ("attr", name))
        if isinstance(value, enum.EnumMeta) and name in value._member_map_:
            self.attribute(holder, name, "", value._member_map_[name], ("attr", name))
            return
        if isinstance(value, types.ModuleType | types.FunctionType):
            return
        step, classes = ("class", value) if isinstance(value, type) else ("type", type(value))
        for n, cls in enumerate(classes.__mro__):
            if name not in cls.__dict__ or is_fixed_class(cls):
                continue
            raw, at = cls.__dict__[name], (step, (n, name))
            of = type(raw)
            if issubclass(of, staticmethod | classmethod):
                self.attribute(holder, name, n, raw.__func__, at, ("attr", "__func__"))
            elif issubclass(of, property):
                self.attribute(holder, name, n, raw.fget, at, ("attr", "fget"))
            elif of is types.MemberDescriptorType:
                if step == "type" and hasattr(value, name):  # a slot
                    self.attribute(holder, name, n, getattr(value, name), ("attr", name))
            elif of not in (_FIELD, types.GetSetDescriptorType):
                self.attribute(holder, name, n, raw, at)

    def attribute(self, holder: _Holder, name: str, at: Any, value: Any, *steps: Step) -> None:
        self.found.key.append((holder.number, name, at))
        self.visit(value, (*holder.path, *steps), holder.above)


_KINDS_OF_C = {
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.ClassMethodDescriptorType,
}  # fmt: skip
_MODULES_BY_ITEM = torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential
_OF_ANY_MODULE = torch.nn.Module().__dict__


# -- the same again, in code that Dynamo can trace -------------------------------------------------


def resolve(fn: Any, path: Path) -> Any:
    """Follow a path from a function to what it reads."""
    value = fn
    for step, at in path:
        if step == "cell":
            value = value.__closure__[at].cell_contents
        elif step == "default":
            value = value.__defaults__[at]
        elif step == "kwdefault":
            value = value.__kwdefaults__[at]
        elif step == "global":
            value = value.__globals__[at]
        elif step == "item":
            value = value[at]
        elif step == "type":
            value = type(value).__mro__[at[0]].__dict__[at[1]]
        elif step == "class":
            value = value.__mro__[at[0]].__dict__[at[1]]
        else:
            value = getattr(value, at)
    return value


def holds(fn: Any, guard: Guard) -> bool:
    """Whether a function still reads what it did; what Dynamo sees on the way, it guards."""
    path, test, expected = guard
    now = resolve(fn, path)
    if test == "value":
        return now is expected or now == expected or now != now
    if test == "size":
        return len(now) == expected
    if test == "code":
        return now.__code__ is not None
    if test == "shape":
        return tuple(now.shape) == expected
    return now is not None
