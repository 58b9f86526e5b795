"""Which models of transformers hand their attention to Headway, and which keep it to themselves."""

import re
import sys
import warnings
from collections.abc import Iterator
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any

import torch

from ..errors import BackendRefused

# Models ask this table of transformers for the function that is to run their attention.
_TABLE = "ALL_ATTENTION_FUNCTIONS"
_NOT_A_MODEL = re.compile(r"(torch|builtins|transformers(?!\.models\b))(\.|$)")
_names: set[str] = set()
_warned: set[type] = set()


def watch(name: str) -> None:
    """From now on, look at every model that is made, for whether `attn_implementation=name` reaches
    its attention.

    transformers lets a model of any kind take the name and tells no one. PyTorch calls those who
    ask when a module becomes part of another: for a model, before its layers exist.
    """
    if not _names:
        torch.nn.modules.module.register_module_module_registration_hook(_grows)
    _names.add(name)


def _grows(parent: Any, name: str, child: Any) -> None:
    """A module becomes part of another: the first one of a model shows the model."""
    from transformers import PreTrainedModel

    if isinstance(parent, PreTrainedModel) and _first_use not in parent._forward_pre_hooks.values():
        if (implementation := _implementation(parent)) in _names:
            _refuse_unknown(type(parent), implementation)
        parent.register_forward_pre_hook(_first_use)


def _implementation(model: Any) -> str:
    return getattr(getattr(model, "config", None), "_attn_implementation", None) or ""


def _first_use(model: torch.nn.Module, args: Any) -> None:
    """Before the first forward with Headway: is there anything in the model that it will run?"""
    if torch.compiler.is_compiling() or (implementation := _implementation(model)) not in _names:
        return
    parts = list(model.modules())
    own = {type(part).__name__ for part in parts if "Attention" in type(part).__name__}
    alone = bool(own) and not any(asks(type(part)) for part in parts)
    for part in parts if alone else [model]:  # what is true of all is said once
        _forget(part)
    if alone and type(model) not in _warned:
        _warned.add(type(model))
        warnings.warn(
            f"{type(model).__name__} is set to attn_implementation={implementation!r}, but runs "
            f"attention of its own ({', '.join(sorted(own)[:3])}) and asks for no other: "
            "headway is not used in it",
            stacklevel=3,
        )


def _forget(module: torch.nn.Module) -> None:
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _first_use]:
        hooks.pop(key, None)


def asks(cls: type) -> bool:
    """Whether the code of a module asks transformers' table for its attention."""
    return any(_TABLE in names for names in _named([*_methods(cls)], classes=False))


def _refuse_unknown(cls: type, implementation: str) -> None:
    """Some models choose a class by the name of the attention, and know no further names."""
    there = vars(sys.modules[cls.__module__])
    named = {name for names in _named([*_methods(cls, "__init__")], classes=True) for name in names}
    for name in sorted(named):
        known = there.get(name) if name.endswith("ATTENTION_CLASSES") else None
        if isinstance(known, dict) and implementation not in known:
            raise BackendRefused(
                f"{cls.__name__} has attentions of its own, {', '.join(known)} ({name}), and takes "
                f"no other: attn_implementation={implementation!r} cannot run it; use one of those"
            )


def _named(waiting: list[FunctionType], classes: bool) -> Iterator[tuple[str, ...]]:
    """The names in functions and in those that they name, of the same file; with `classes`, in what
    makes the modules that they name as well, short of models, which are looked at by themselves."""
    from transformers import PreTrainedModel

    seen = set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        for code in _with_inner(function.__code__):
            yield code.co_names
            for name in code.co_names:
                found = function.__globals__.get(name)
                if getattr(found, "__module__", None) != function.__module__:
                    continue
                if isinstance(found, FunctionType):
                    waiting.append(found)
                elif classes and isinstance(found, type) and not issubclass(found, PreTrainedModel):
                    waiting.extend(_methods(found, "__init__"))


def _methods(cls: type, name: str | None = None) -> Iterator[FunctionType]:
    """What a model's file, or its parents', says of a class: all methods, or those of one name."""
    for base in cls.__mro__:
        if _NOT_A_MODEL.match(base.__module__):
            continue
        for own, attribute in vars(base).items():
            function = unwrap(attribute) if callable(attribute) else None
            if isinstance(function, FunctionType) and name in (None, own):
                yield function


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
