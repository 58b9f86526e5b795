"""Masks and scores as values that combine: `&`, `|`, `~` of masks, `>>` of scores."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from .mod import Mod as Mod
from .mod import show as show
from .mod import value as value
from .suggest import layouts_of, not_an_operand

MaskFn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreFn = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Mask(Mod):
    """A function `(b, h, q_idx, kv_idx) -> bool` that says which pairs are kept.

    Combine with `&`, `|`, `~`; a plain function with the same signature may stand on either side.
    """

    role = "mask"

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        raise NotImplementedError

    def __and__(self, operand: MaskFn) -> "Mask":
        return Both(self, _operand(operand, "&"))

    def __rand__(self, operand: MaskFn) -> "Mask":
        return Both(_operand(operand, "&"), self)

    def __or__(self, operand: MaskFn) -> "Mask":
        return Either(self, _operand(operand, "|"))

    def __ror__(self, operand: MaskFn) -> "Mask":
        return Either(_operand(operand, "|"), self)

    def __invert__(self) -> "Mask":
        return Not(self)


class Score(Mod):
    """A function `(score, b, h, q_idx, kv_idx) -> score` that changes a logit.

    `first >> then` applies `first`, then `then`; a plain function may stand on either side.
    """

    role = "score"

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        raise NotImplementedError

    def __rshift__(self, then: ScoreFn) -> "Score":
        return Then(self, _operand(then, ">>"))

    def __rrshift__(self, first: ScoreFn) -> "Score":
        return Then(_operand(first, ">>"), self)


def _wrappable(cls: type) -> Any:
    """Let instances take a `__name__` and the attributes that `functools.wraps` sets.

    These are ignored when instances are compared.
    """
    names = (*functools.WRAPPER_ASSIGNMENTS, "__wrapped__")
    set_field: Any = cls.__setattr__
    get_fields: Any = cls.__getstate__

    def __setattr__(self: Any, name: str, item: Any) -> None:
        if name in names:
            object.__setattr__(self, name, item)
        else:
            set_field(self, name, item)

    def __getattr__(self: Any, name: str) -> Any:
        if name == "__name__":  # instances do not inherit their class's
            return cls.__name__
        raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")

    def __getstate__(self: Any) -> dict[str, Any]:
        return get_fields(self) | {name: vars(self)[name] for name in names if name in vars(self)}

    for method in (__setattr__, __getattr__, __getstate__):
        setattr(cls, method.__name__, method)
    return cls


@_wrappable
@value
class Both(Mask):
    """`first & second`."""

    first: MaskFn
    second: MaskFn

    def __call__(self, b, h, q_idx, kv_idx):
        return self.first(b, h, q_idx, kv_idx) & self.second(b, h, q_idx, kv_idx)

    def __repr__(self) -> str:
        return f"{_show_factor(self.first)} & {_show_factor(self.second)}"


@_wrappable
@value
class Either(Mask):
    """`first | second`."""

    first: MaskFn
    second: MaskFn

    def __call__(self, b, h, q_idx, kv_idx):
        return self.first(b, h, q_idx, kv_idx) | self.second(b, h, q_idx, kv_idx)

    def __repr__(self) -> str:
        return f"{show(self.first)} | {show(self.second)}"


@_wrappable
@value
class Not(Mask):
    """`~mask`."""

    mask: MaskFn

    def __call__(self, b, h, q_idx, kv_idx):
        return ~self.mask(b, h, q_idx, kv_idx)

    def __repr__(self) -> str:
        inner = show(self.mask)
        return f"~({inner})" if isinstance(self.mask, Both | Either) else f"~{inner}"


@value
class Shifted(Mask):
    """`mask` moved: index 0 of the batch, the heads or a length is index b, h, ... of `mask`."""

    mask: MaskFn
    b: int = 0
    h: int = 0
    q_idx: int = 0
    kv_idx: int = 0

    def check_sizes(self, b, h, q_len, kv_len):
        """Accept any sizes: those that the inner mask was made for are not known here."""

    def __call__(self, b, h, q_idx, kv_idx):
        return self.mask(b + self.b, h + self.h, q_idx + self.q_idx, kv_idx + self.kv_idx)

    def __repr__(self) -> str:
        shifts = [f"{name}={n}" for name in self.fields[1:] if (n := getattr(self, name))]
        return f"Shifted({', '.join([show(self.mask), *shifts])})"


@value
class Then(Score):
    """`first >> second`: the second changes the result of the first."""

    first: ScoreFn
    second: ScoreFn

    def __call__(self, score, b, h, q_idx, kv_idx):
        return self.second(self.first(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)

    def __repr__(self) -> str:
        return f"{show(self.first)} >> {show(self.second)}"


def intersection(first: MaskFn | None, second: MaskFn | None) -> MaskFn | None:
    """Return the mask of the pairs that two masks keep; None keeps all."""
    if first is None or second is None:
        return second if first is None else first
    return Both(first, second)


def composition(first: ScoreFn | None, second: ScoreFn | None) -> ScoreFn | None:
    """Return the score of two, one after the other; None changes nothing."""
    if first is None or second is None:
        return second if first is None else first
    return Then(first, second)


def _show_factor(item: Any) -> str:
    return f"({item!r})" if isinstance(item, Either) else show(item)


def _operand(operand: Any, sign: str) -> Any:
    if not callable(operand) or isinstance(operand, (type, Mask if sign == ">>" else Score)):
        raise ArgumentError(not_an_operand(sign, operand))
    return operand


def check_shape(mod: str, name: str, tensor: Tensor, **sizes: int | None) -> None:
    """Refuse a captured tensor whose shape is not the call's sizes; None fits any."""
    if tensor.is_nested:
        raise ArgumentError(f"{mod}: {name} is a nested tensor; pad it, or pass its parts")
    expected = tuple(sizes.values())
    if None in expected and tensor.dim() == len(expected):
        expected = tuple([
            n if w is None else w for w, n in zip(expected, tensor.shape, strict=True)
        ])  # fmt: skip
    if tuple(tensor.shape) != expected:
        raise ArgumentError(
            f"{mod}: {name} has shape {tuple(tensor.shape)}, but this call has "
            f"({', '.join(sizes)}) = {tuple(sizes.values())}"
        )


def check_broadcasts(
    mod: str, tensor: Tensor, b: int, h: int, q_len: int | None, kv_len: int | None
) -> None:
    """Refuse a captured tensor that does not broadcast to (b, h, q_len, kv_len)."""
    sizes = (b, h, q_len, kv_len)
    for call_size, size in zip(sizes[4 - tensor.dim() :], tensor.shape, strict=True):
        if call_size is not None and size != 1 and size != call_size:
            known_sizes: Any = None if None in sizes else sizes
            ways = [
                f"; as {axes} write {mod}(m{index})"
                for axes, index in layouts_of(tuple(tensor.shape), known_sizes)
            ]
            raise ArgumentError(
                f"{mod}: the tensor has shape {tuple(tensor.shape)}, which does not broadcast to "
                f"(b, h, q_len, kv_len) = {sizes}{''.join(ways)}"
            )
