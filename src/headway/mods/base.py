"""Scores and masks as values: they print, compare, hash and combine.

A value is a small frozen dataclass. Its fields say what it is made of, by type:

- a `Tensor` is captured, and may require grad;
- an `int` or `float` is a run-time number: changing it does not recompile a kernel;
- a `str` or `bool` or `None` is part of the formula;
- a tuple is its items;
- another value, or a user's function, is a part to combine.

`lowering.py` takes values apart into these and turns them into graphs.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, dataclass_transform

from torch import Tensor

from ..errors import ArgumentError
from .graph import DTYPE_NAMES

_ROOT = __name__.rpartition(".")[0].rpartition(".")[0] + "."

MaskFn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreFn = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass_transform(frozen_default=True)
class Mod:
    """Base of `Mask` and `Score`. Subclasses are frozen dataclasses with `__call__`."""

    kinds: ClassVar[dict[str, type["Mod"]]] = {}  # the library's own values, by name
    of_library: ClassVar[bool] = True  # else it is read as any object of the user's
    fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.fields = tuple(inspect.get_annotations(cls))
        cls.of_library = (cls.__module__ + ".").startswith(_ROOT)
        if cls.of_library:
            Mod.kinds[cls.__name__] = cls

    def check_sizes(self, b: int, h: int, q_len: int | None, kv_len: int | None) -> None:
        """Refuse a call of other sizes than those that the captured tensors were made for. A length
        of None fits: positions of a cache are looked at one by one."""
        for name in self.fields:
            part = getattr(self, name)
            if isinstance(part, Mod):
                part.check_sizes(b, h, q_len, kv_len)

    def checks_values(self) -> bool:
        """Whether `check_sizes` looks at what is in a tensor, which may differ in the next call."""
        parts = (getattr(self, name) for name in self.fields)
        return any(part.checks_values() for part in parts if isinstance(part, Mod))

    def __bool__(self) -> bool:
        raise ArgumentError(
            f"{self!r} is neither true nor false; write & | ~ in place of and, or, not"
        )

    def _key(self) -> tuple:
        """Numbers by value, tensors by identity. (A compiler may ask while the value is made.)"""
        values = (getattr(self, name, None) for name in self.fields)
        return type(self), *(id(v) if isinstance(v, Tensor) else v for v in values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mod) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold what the value is made of, and nothing that was worked out."""
        return {name: getattr(self, name) for name in self.fields}

    def __repr__(self) -> str:
        shown = [
            _show(getattr(self, name))
            for name in self.fields
            if name[0] != "_" and not _is_default(self, name)
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


class Mask(Mod):
    """Which pairs are kept: a function `(b, h, q_idx, kv_idx) -> bool`.

    Combine with `&`, `|`, `~`; a plain function with the same signature may stand on either side.
    """

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        raise NotImplementedError

    def __and__(self, other: MaskFn) -> "Mask":
        return Both(self, _operand(other, "&"))

    def __rand__(self, other: MaskFn) -> "Mask":
        return Both(_operand(other, "&"), self)

    def __or__(self, other: MaskFn) -> "Mask":
        return Either(self, _operand(other, "|"))

    def __ror__(self, other: MaskFn) -> "Mask":
        return Either(_operand(other, "|"), self)

    def __invert__(self) -> "Mask":
        return Not(self)


class Score(Mod):
    """How a logit changes: a function `(score, b, h, q_idx, kv_idx) -> score`.

    `first >> then` applies `first`, then `then`; a plain function may stand on either side.
    """

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        raise NotImplementedError

    def __rshift__(self, then: ScoreFn) -> "Score":
        return Then(self, _operand(then, ">>"))

    def __rrshift__(self, first: ScoreFn) -> "Score":
        return Then(_operand(first, ">>"), self)


def value(cls: type) -> Any:
    """Class decorator of the library's own values: a frozen dataclass with `Mod`'s identity."""
    return dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)


def _named(cls: type) -> Any:
    """Class decorator of combinations of masks: as functions do, they take a `__name__` and what
    `functools.wraps` writes. It is no part of what they are."""
    names = (*functools.WRAPPER_ASSIGNMENTS, "__wrapped__")
    frozen: Any = cls.__setattr__
    state: Any = cls.__getstate__

    def __setattr__(self: Any, name: str, item: Any) -> None:
        if name in names:
            object.__setattr__(self, name, item)
        else:
            frozen(self, name, item)

    def __getattr__(self: Any, name: str) -> Any:
        if name == "__name__":  # a class's own is not its instances'
            return cls.__name__
        raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")

    def __getstate__(self: Any) -> dict[str, Any]:
        return state(self) | {name: vars(self)[name] for name in names if name in vars(self)}

    for method in (__setattr__, __getattr__, __getstate__):
        setattr(cls, method.__name__, method)
    return cls


@_named
@value
class Both(Mask):
    """`first & second`."""

    first: MaskFn
    second: MaskFn

    def __call__(self, b, h, q_idx, kv_idx):
        return self.first(b, h, q_idx, kv_idx) & self.second(b, h, q_idx, kv_idx)

    def __repr__(self) -> str:
        return f"{_show(self.first, tight=True)} & {_show(self.second, tight=True)}"


@_named
@value
class Either(Mask):
    """`first | second`."""

    first: MaskFn
    second: MaskFn

    def __call__(self, b, h, q_idx, kv_idx):
        return self.first(b, h, q_idx, kv_idx) | self.second(b, h, q_idx, kv_idx)

    def __repr__(self) -> str:
        return f"{_show(self.first)} | {_show(self.second)}"


@_named
@value
class Not(Mask):
    """`~mask`."""

    mask: MaskFn

    def __call__(self, b, h, q_idx, kv_idx):
        return ~self.mask(b, h, q_idx, kv_idx)

    def __repr__(self) -> str:
        inner = _show(self.mask)
        return f"~({inner})" if isinstance(self.mask, Both | Either) else f"~{inner}"


@value
class Shifted(Mask):
    """`mask` of a part: local indices 0, 1, ... are b, h, q_idx, kv_idx and on of the whole."""

    mask: MaskFn
    b: int = 0
    h: int = 0
    q_idx: int = 0
    kv_idx: int = 0

    def check_sizes(self, b, h, q_len, kv_len):
        """The mask was made for the whole, whose sizes are not known here."""

    def __call__(self, b, h, q_idx, kv_idx):
        return self.mask(b + self.b, h + self.h, q_idx + self.q_idx, kv_idx + self.kv_idx)

    def __repr__(self) -> str:
        by = [f"{name}={n}" for name in self.fields[1:] if (n := getattr(self, name))]
        return f"Shifted({', '.join([_show(self.mask), *by])})"


@value
class Then(Score):
    """`first >> second`: the second sees what the first made of the score."""

    first: ScoreFn
    second: ScoreFn

    def __call__(self, score, b, h, q_idx, kv_idx):
        return self.second(self.first(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)

    def __repr__(self) -> str:
        return f"{_show(self.first)} >> {_show(self.second)}"


def _operand(other: Any, sign: str) -> Any:
    if not callable(other) or isinstance(other, (type, Mask if sign == ">>" else Score)):
        from .meant import no_operand  # it stands above this module

        raise ArgumentError(no_operand(sign, other))
    return other


def _is_default(mod: Mod, name: str) -> bool:
    item = getattr(mod, name)
    return not isinstance(item, Tensor) and item == getattr(type(mod), name, mod)


def check_shape(mod: str, name: str, tensor: Tensor, **sizes: int | None) -> None:
    """Refuse a captured tensor that is not of the call's sizes; None fits any."""
    wanted = tuple(sizes.values())
    if None in wanted and tensor.dim() == len(wanted):
        wanted = tuple([
            n if w is None else w for w, n in zip(wanted, tensor.shape, strict=True)
        ])  # fmt: skip
    if tuple(tensor.shape) != wanted:
        raise ArgumentError(
            f"{mod}: {name} has shape {tuple(tensor.shape)}, but this call has "
            f"({', '.join(sizes)}) = {tuple(sizes.values())}"
        )


def check_broadcasts(
    mod: str, tensor: Tensor, b: int, h: int, q_len: int | None, kv_len: int | None
) -> None:
    """Refuse a captured tensor that does not broadcast to (b, h, q_len, kv_len)."""
    whole = (b, h, q_len, kv_len)
    for size, own in zip(whole[4 - tensor.dim() :], tensor.shape, strict=True):
        if size is not None and own != 1 and own != size:
            from .meant import laid_over  # it stands above this module

            known: Any = None if None in whole else whole
            ways = [
                f"; as {axes} write {mod}(m{index})"
                for axes, index in laid_over(tuple(tensor.shape), known)
            ]
            raise ArgumentError(
                f"{mod}: the tensor has shape {tuple(tensor.shape)}, which does not broadcast to "
                f"(b, h, q_len, kv_len) = {whole}{''.join(ways)}"
            )


def _show(item: Any, tight: bool = False) -> str:
    if isinstance(item, Tensor):
        return f"{DTYPE_NAMES.get(item.dtype, item.dtype)}{list(item.shape)}"
    if isinstance(item, Mod):
        return f"({item!r})" if tight and isinstance(item, Either) else repr(item)
    return getattr(item, "__qualname__", None) or repr(item)
