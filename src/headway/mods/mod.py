"""The base class of scores and masks: values that print, compare, hash and combine.

A value is a small frozen dataclass. Its fields say what it is made of, by type:

- a `Tensor` is captured, and may require grad;
- an `int` or `float` is a run-time number: changing it does not recompile a kernel;
- a `str` or `bool` or `None` is part of the formula;
- a tuple is its items;
- another value, or a user's function, is a part to combine.

`lowering.py` takes values apart into these and turns them into graphs.
"""

import dataclasses
import inspect
from typing import Any, ClassVar, dataclass_transform

from torch import Tensor

from ..errors import ArgumentError
from .graph import DTYPE_NAMES, Graph

_ROOT = __name__.rpartition(".")[0].rpartition(".")[0] + "."


@dataclass_transform(frozen_default=True)
class Mod:
    """Base of `Mask` and `Score`. Subclasses are frozen dataclasses with `__call__`."""

    kinds: ClassVar[dict[str, type["Mod"]]] = {}  # the library's own values, by name
    role: ClassVar[str] = ""  # "mask" or "score": the argument of a call that takes the value
    of_library: ClassVar[bool] = True  # False for a user's subclass, which is traced as any object
    fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.fields = tuple(inspect.get_annotations(cls))
        cls.of_library = (cls.__module__ + ".").startswith(_ROOT)
        if cls.of_library:
            Mod.kinds[cls.__name__] = cls

    def check_sizes(self, b: int, h: int, q_len: int | None, kv_len: int | None) -> None:
        """Refuse a call whose sizes do not fit the captured tensors.

        A length of None always fits: over a cache, positions are checked when they are read.
        """
        for name in self.fields:
            item = getattr(self, name, None)
            if isinstance(item, Mod):
                item.check_sizes(b, h, q_len, kv_len)

    def checks_sizes(self) -> bool:
        """Return whether `check_sizes` may refuse a call: any class's own may."""
        if type(self).check_sizes is not Mod.check_sizes:
            return True
        items = (getattr(self, name, None) for name in self.fields)
        return any(item.checks_sizes() for item in items if isinstance(item, Mod))

    def _set(self, **fields: Any) -> None:
        """Set fields, as the constructor of a frozen dataclass does."""
        for name, item in fields.items():
            object.__setattr__(self, name, item)

    def simplified(self, graph: Graph) -> Graph:
        """Return the value's graph, or one that backends know better, equal at kept pairs."""
        return graph

    def __bool__(self) -> bool:
        raise ArgumentError(
            f"{self!r} is neither true nor false; write & | ~ in place of and, or, not"
        )

    def _key(self) -> tuple:
        """Return the fields to compare: numbers by value, tensors by identity.

        A compiler may compare a value before all fields are set.
        """
        values = (getattr(self, name, None) for name in self.fields)
        return type(self), *(id(v) if isinstance(v, Tensor) else v for v in values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mod) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: copies and pickles hold nothing that was cached."""
        return {name: getattr(self, name) for name in self.fields}

    def __repr__(self) -> str:
        fields = [
            show(getattr(self, name))
            for name in self.fields
            if name[0] != "_" and not _is_default(self, name)
        ]
        return f"{type(self).__name__}({', '.join(fields)})"


def value(cls: type) -> Any:
    """Make a class of the library's a frozen dataclass that compares and prints as `Mod` does."""
    return dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)


def _is_default(mod: Mod, name: str) -> bool:
    item = getattr(mod, name)
    return not isinstance(item, Tensor) and item == getattr(type(mod), name, mod)


def show(item: Any) -> str:
    """Return how a field of a value is printed: a tensor by dtype and shape, a function by name."""
    if isinstance(item, Tensor):
        return f"{DTYPE_NAMES.get(item.dtype, item.dtype)}{list(item.shape)}"
    if isinstance(item, Mod):
        return repr(item)
    return getattr(item, "__qualname__", None) or repr(item)
