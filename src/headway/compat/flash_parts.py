"""What FlashAttention's functions share: scores, limits, and the kinds of their arguments."""

import operator
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import arguments
from ..errors import ArgumentError
from ..mods import Score
from ..mods import softcap as capped
from ..mods.base import Then, value
from ..types import as_bool
from .errors import CallError, NotSupported

Window = tuple[int | None, int | None]


@value
class distance_bias(Score):
    """`score - slope · |i + offset - j|`, the slope by head, or by batch and head.

    `offset` is a number, or an int tensor `(q_len,)`: where each query stands among the keys.
    """

    slopes: Tensor
    offset: int | Tensor
    _per_batch: bool
    _packed: bool

    def __init__(self, slopes: Tensor, offset: int | Tensor) -> None:
        fields = (slopes, offset, slopes.dim() == 2, isinstance(offset, Tensor))
        for name, item in zip(self.fields, fields, strict=True):
            object.__setattr__(self, name, item)

    def __call__(self, score, b, h, q_idx, kv_idx):
        slope = self.slopes[b, h] if self._per_batch else self.slopes[h]
        at = self.offset[q_idx] if self._packed else q_idx + self.offset  # type: ignore[index]
        return score - slope * (at - kv_idx).abs()


def limits_of(is_causal: bool, window: Window) -> tuple[int | None, int | None]:
    """Return how many keys to the left and right of the diagonal are seen; None for no limit."""
    try:
        left, right = (_limit(n) for n in window)
    except (TypeError, ValueError) as error:
        raise CallError(
            f"window_size={window!r} must be (left, right), two integers; -1 or None means no limit"
        ) from error
    return left, 0 if is_causal else right


def _limit(n: Any) -> int | None:
    """Return a number of Python's, from one of anybody's."""
    if n is None:
        return None
    if isinstance(n, bool) or (n := operator.index(n)) < -1:
        raise ValueError
    return None if n == -1 else n


def check_dense(**tensors: Any) -> None:
    """Refuse nested tensors, given by their names."""
    try:
        arguments.check_dense(**tensors)
    except ArgumentError as error:
        raise CallError(str(error)) from None


def heads_swapped(q: Tensor, k: Tensor, sink: Tensor | None) -> str:
    """Return a hint where the heads do not fit but the lengths would, as if swapped, else ""."""
    of_sink = (q.shape[1], q.shape[2]) if sink is None else (sink.numel(),) * 2
    fits = [
        k.shape[n] > 0 and q.shape[n] % k.shape[n] == 0 and q.shape[n] == of_sink[n - 1]
        for n in (1, 2)
    ]
    if fits != [False, True]:
        return ""
    return (
        ". These functions take (batch, length, heads, width), and the shapes fit (batch, heads, "
        "length, width): pass q.transpose(1, 2), and k and v likewise"
    )


def score_of(
    cap: float, slopes: Tensor | None, offset: int | Tensor, batch: int, heads: int
) -> Score | None:
    """Return softcap and ALiBi, its slopes `(heads,)` or `(batch, heads)`."""
    score: Score | None = capped(float(cap)) if cap else None
    if slopes is None:
        return score
    fits = isinstance(slopes, Tensor) and slopes.dim() in (1, 2)
    if not fits or tuple(slopes.shape) not in ((heads,), (batch, heads)):
        got = tuple(slopes.shape) if isinstance(slopes, Tensor) else repr(slopes)
        raise CallError(
            f"alibi_slopes must be a tensor (heads,) or (batch, heads), here ({heads},) or "
            f"({batch}, {heads}), got {got}; q is (batch, length, heads, width)"
        )
    alibi = distance_bias(slopes, offset)
    return alibi if score is None else Then(score, alibi)


class Words(NamedTuple):
    """The arguments that are not tensors, as Python's numbers and booleans."""

    dropout: float
    scale: Any  # a number or None; a tensor is refused further on
    causal: bool
    softcap: float
    deterministic: bool
    want_lse: bool


def words_of(
    dropout: Any, scale: Any, is_causal: Any, cap: Any, deterministic: Any, probabilities: Any
) -> Words:
    """Check by kind: what stands in one place in flash-attn 2 stands in another in 3 and 4."""
    words = Words(
        number("dropout_p", dropout),
        scale if scale is None or isinstance(scale, Tensor) else number("softmax_scale", scale),
        flag("causal", is_causal),
        number("softcap", cap),
        flag("deterministic", deterministic),
        flag("return_attn_probs", probabilities),
    )
    if words.softcap < 0:
        raise CallError(f"softcap={cap} must be 0 (none) or above")
    if not 0 <= words.dropout < 1:
        raise CallError(f"dropout_p={dropout} must be at least 0 and less than 1")
    if words.want_lse and words.dropout:
        raise NotSupported(
            "return_attn_probs with dropout asks for the dropped probabilities, which are never "
            "made; the log-sum-exp is the same with dropout_p=0.0"
        )
    return words


def number(name: str, x: Any) -> Any:
    """Check a real number; no tensor, no boolean."""
    if not isinstance(x, bool):
        if isinstance(x, int | float | torch.SymInt | torch.SymFloat):
            return x
        if isinstance(x, Real):  # NumPy's
            return float(x)
    raise _misplaced(name, x, "a number")


def flag(name: str, x: Any) -> bool:
    """Check True or False, or 1 or 0."""
    truth = as_bool(x)
    if truth is None:
        raise _misplaced(name, x, "True or False")
    return truth


def _misplaced(name: str, x: Any, wanted: str) -> CallError:
    shown = f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
    return CallError(
        f"{name} must be {wanted}, got {shown}. These are flash-attn 2's places: (..., dropout_p, "
        "softmax_scale, causal, window_size, softcap, alibi_slopes); flash-attn 3 and 4 have no "
        "dropout_p, and (..., softmax_scale, causal): name what you pass, as in "
        "flash_attn_func(q, k, v, softmax_scale=0.25, causal=True)"
    )
