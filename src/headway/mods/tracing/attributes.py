"""Where an attribute of an object is found: in the object itself and in every class of it."""

import types
from collections import namedtuple
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from .guards import Step
from .purity import METACLASSES, is_constant_class, is_constant_module, is_library_code
from .reads import DeferredLookup

if TYPE_CHECKING:
    from .capture import ReadWalker

# The descriptor of a named tuple's field. Its value is an item of the tuple, followed as such.
_NAMED_TUPLE_FIELD = type(namedtuple("_", "field").__dict__["field"])


def lookup_attribute(walker: "ReadWalker", lookup: DeferredLookup, name: str) -> None:
    """Follow an attribute in the object itself and in every class of it."""
    value, walker.label = lookup.object, name
    kind = type(value)
    if issubclass(kind, types.ModuleType) and is_constant_module(value.__name__):
        item = vars(value).get(name, vars)
        if item is vars:  # it has none of this name
            return
        if is_library_code(item):
            walker.reads.key.append((lookup.number, name, item))
            if walker.guarding and getattr(item, "__name__", name) != name:
                walker.reads.fully_guarded = False  # it was put there; Dynamo takes it for constant
        else:
            walker.follow_attribute(lookup, name, "", item, ("attr", name))
        return
    instance_dict = getattr(value, "__dict__", {}) if not isinstance(value, type) else {}
    if name in instance_dict:
        walker.follow_attribute(lookup, name, "", instance_dict[name], ("attr", name))
    elif isinstance(value, types.ModuleType) and "__getattr__" in instance_dict:
        walker.mark_opaque(f"reads {name} of a module with a __getattr__")
    if isinstance(value, torch.nn.Module):
        for members in (value._parameters, value._buffers, value._modules):
            if name in members:
                walker.follow_attribute(lookup, name, "", members[name], ("attr", name))
    if isinstance(value, type):
        _lookup_in_classes(walker, lookup, name, value.__mro__, "class", ())
        if kind not in METACLASSES:
            _lookup_in_classes(walker, lookup, name, kind.__mro__, "type", ())
    elif kind is not types.ModuleType and kind is not types.FunctionType:
        _lookup_in_classes(walker, lookup, name, kind.__mro__, "type", ())
        if (metaclass := type(kind)) not in METACLASSES:  # `object.__class__.name` asks it
            of_class = "type", (("attr", "__class__"),)
            _lookup_in_classes(walker, lookup, name, metaclass.__mro__, *of_class)


def _lookup_in_classes(
    walker: "ReadWalker",
    lookup: DeferredLookup,
    name: str,
    mro: Any,
    step: str,
    steps: tuple[Step, ...],
) -> None:
    """Follow an attribute in classes, which `steps` lead to from the object."""
    for n, cls in enumerate(mro):
        if name not in cls.__dict__:
            continue
        descriptor, class_steps = cls.__dict__[name], (*steps, (step, (n, name)))
        kind = type(descriptor)
        if is_constant_class(cls) and is_library_code(descriptor):
            walker.reads.key.append(descriptor)
            continue
        if walker.guarding and step == "type" and not steps:
            if issubclass(type(lookup.object), types.ModuleType):
                walker.mark_unguarded("an attribute of a module's class")
            if kind is types.FunctionType or not hasattr(kind, "__get__"):
                # The object may get an attribute of this name, which hides the class's.
                walker.guard(lookup.path, "touch_attribute", name)
        if issubclass(kind, staticmethod | classmethod | property):
            function = "fget" if issubclass(kind, property) else "__func__"
            class_steps += (("attr", function),)
            walker.follow_attribute(lookup, name, n, getattr(descriptor, function), *class_steps)
        elif kind is types.MemberDescriptorType:
            # A slot: its value is the object's. The class itself has none to read.
            if step == "type" and not steps:
                with suppress(AttributeError):
                    slot = descriptor.__get__(lookup.object)
                    walker.follow_attribute(lookup, name, n, slot, ("attr", name))
        # The class statement makes two of the second: of `__dict__` and of `__weakref__`.
        elif kind in (_NAMED_TUPLE_FIELD, types.GetSetDescriptorType):
            walker.reads.key.append(descriptor)
        else:
            walker.follow_attribute(lookup, name, n, descriptor, *class_steps)
