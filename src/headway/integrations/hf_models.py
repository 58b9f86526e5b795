"""Which models of transformers hand their attention to Headway, and which keep it to themselves."""

import re
import sys
import warnings
from collections.abc import Iterator
from functools import cache, wraps
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any

import torch

from ..errors import BackendRefused
from . import hf_calls

# Models ask this table of transformers for the function that is to run their attention.
_TABLE = "ALL_ATTENTION_FUNCTIONS"
_NOT_A_MODEL = re.compile(r"(torch|builtins|transformers(?!\.models\b))(\.|$)")
_SOFTMAX = {"softmax", "Softmax", "scaled_dot_product_attention", "multi_head_attention_forward"}
_names: set[str] = set()
_warned: set[type] = set()


def watch(name: str) -> None:
    """Check every new model, and every change of attention, for whether `attn_implementation=name`
    reaches its attention.

    transformers accepts the name for any model, without a warning. PyTorch calls a hook when a
    module becomes part of another: for a model, before its layers exist.
    """
    if not _names:
        torch.nn.modules.module.register_module_module_registration_hook(_grows)
        _watch_settings()
        _allow_continuous_batching()
    _names.add(name)


def _watch_settings() -> None:
    """A model that was made before is met when its attention is set: of that, no one is told."""
    from transformers import PreTrainedModel

    plain = PreTrainedModel.set_attn_implementation

    @wraps(plain)
    def set_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        for part in self.modules():
            if isinstance(part, PreTrainedModel):
                _watch_calls(part)

    PreTrainedModel.set_attn_implementation = set_attn_implementation  # type: ignore[method-assign]


def _allow_continuous_batching() -> None:
    """transformers 5.24 lets only its own attention run continuous batching: let Headway's, too."""
    from transformers.generation import continuous_batching

    manager: Any = getattr(continuous_batching, "ContinuousBatchingManager", None)
    plain = getattr(manager, "switch_to_cb_friendly_attn", None)
    if plain is None:
        return

    @wraps(plain)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if _implementation(model) not in _names:
            plain(self, model, *args, **kwargs)

    manager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn


def _grows(parent: Any, name: str, child: Any) -> None:
    """A module becomes part of another: the first one of a model shows the model."""
    from transformers import PreTrainedModel

    if isinstance(parent, PreTrainedModel) and _before not in parent._forward_pre_hooks.values():
        if (implementation := _implementation(parent)) in _names:
            _refuse_unknown(type(parent), implementation)
        _watch_calls(parent)


def _watch_calls(model: torch.nn.Module) -> None:
    if _before not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, always_call=True)
        model.register_forward_pre_hook(_first_use)


def _before(model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    if _implementation(model) in _names:
        _refuse_weights(model, args, kwargs)
    hf_calls.begin(model, args, kwargs)


def _after(model: torch.nn.Module, args: tuple, output: Any) -> None:
    if not torch.compiler.is_compiling():
        hf_calls.end(model)


def _implementation(model: Any) -> str:
    return getattr(getattr(model, "config", None), "_attn_implementation", None) or ""


def _refuse_weights(model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """A model may collect weights from its layers and say nothing of it to its attention."""
    name = "output_attentions"
    weights = hf_calls.argument_of(model, args, kwargs, name)
    if weights is None:
        weights = getattr(model.config, name, None)
    if weights and any(asks(type(part)) for part in model.modules()):
        raise BackendRefused(
            f"output_attentions={weights} of {type(model).__name__}: the weights are never made; "
            'set attn_implementation="eager" for a model whose weights you need'
        )


def _first_use(model: torch.nn.Module, args: Any) -> None:
    """Check, before the first forward with Headway, for attention that it will not run."""
    if torch.compiler.is_compiling() or (implementation := _implementation(model)) not in _names:
        return
    from transformers import PreTrainedModel

    models = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    models = [m for m in models if _implementation(m) in _names]
    own_classes = {name for part in models for name in _own_attention(part)}
    others_ask = own_classes and any(asks(type(part)) for part in model.modules())
    for part in models:  # what is true of all is said once
        _forget(part)
    if own_classes and type(model) not in _warned:
        _warned.add(type(model))
        warnings.warn(
            f"{type(model).__name__} is set to attn_implementation={implementation!r}, but runs "
            f"attention of its own ({', '.join(sorted(own_classes)[:3])}) that asks for no other: "
            f"headway is not used in it{', but in the rest of the model' if others_ask else ''}",
            stacklevel=3,
        )


def _own_attention(model: torch.nn.Module) -> set[str]:
    """Return the names of a model's classes that run attention and do not ask for another one.

    Where others ask, a class counts if it computes a softmax. Models inside are left out."""
    from transformers import PreTrainedModel

    classes: set[type] = set()

    def look(part: torch.nn.Module, outer_asks: bool) -> tuple[bool, bool]:
        """Return whether a part or one inside of it asks, and whether one was found."""
        cls = type(part)
        asking = asks(cls)
        children = [
            look(child, outer_asks or asking)
            for child in part.children()
            if not isinstance(child, PreTrainedModel)
        ]
        asking = asking or any(a for a, _ in children)
        if "Attention" not in cls.__name__ or outer_asks or asking:
            return asking, any(f for _, f in children)
        if not any(f for _, f in children):
            classes.add(cls)
        return asking, True

    others_ask, _ = look(model, False)
    return {cls.__name__ for cls in classes if not others_ask or _computes_softmax(cls)}


def _forget(module: torch.nn.Module) -> None:
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _first_use]:
        hooks.pop(key, None)


@cache
def asks(cls: type) -> bool:
    """Return whether a module's code looks its attention up in transformers' table."""
    return any(_TABLE in names for names in _named([*_methods(cls)], classes=False))


def _computes_softmax(cls: type) -> bool:
    names = {name for names in _named([*_methods(cls)], classes=False) for name in names}
    return issubclass(cls, torch.nn.MultiheadAttention) or not _SOFTMAX.isdisjoint(names)


def _refuse_unknown(cls: type, implementation: str) -> None:
    """Some models choose a class by the name of the attention, and know no further names."""
    module_values = vars(sys.modules[cls.__module__])
    named = {name for names in _named([*_methods(cls, "__init__")], classes=True) for name in names}
    for name in sorted(named):
        table = module_values.get(name) if name.endswith("ATTENTION_CLASSES") else None
        if isinstance(table, dict) and implementation not in table:
            raise BackendRefused(
                f"{cls.__name__} has attentions of its own, {', '.join(table)} ({name}), and takes "
                f"no other: attn_implementation={implementation!r} cannot run it; use one of those"
            )


def _named(waiting: list[FunctionType], classes: bool) -> Iterator[tuple[str, ...]]:
    """Yield the names in functions and in those that they name, of the same file; with `classes`,
    also in what makes the modules that they name, except for models."""
    from transformers import PreTrainedModel

    visited = set()
    while waiting:
        function = waiting.pop()
        if function in visited:
            continue
        visited.add(function)
        for code in _with_inner(function.__code__):
            yield code.co_names
            for name in code.co_names:
                item = function.__globals__.get(name)
                if getattr(item, "__module__", None) != function.__module__:
                    continue
                if isinstance(item, FunctionType):
                    waiting.append(item)
                elif classes and isinstance(item, type) and not issubclass(item, PreTrainedModel):
                    waiting.extend(_methods(item, "__init__"))


def _methods(cls: type, name: str | None = None) -> Iterator[FunctionType]:
    """Return the methods of a class and its parents, all or those of one name."""
    for base in cls.__mro__:
        if _NOT_A_MODEL.match(base.__module__):
            continue
        for attribute_name, attribute in vars(base).items():
            function = unwrap(attribute) if callable(attribute) else None
            if isinstance(function, FunctionType) and name in (None, attribute_name):
                yield function


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
