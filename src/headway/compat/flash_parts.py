"""What the drop-ins for FlashAttention share: a call in words that all its versions have."""

import inspect
import operator
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import arguments
from ..mods import Score
from ..mods import softcap as capped
from ..mods.base import MaskFn, ScoreFn, Then, value
from ..types import as_bool
from .errors import CallError, NotSupported, as_call_error

Window = tuple[int | None, int | None]
Limits = tuple[int | None, int | None]  # keys left and right of the diagonal; None: no limit

# Where the versions differ in what stands in which place, for messages.
FLASH_2 = (
    "Positional arguments follow flash-attn 2: (..., dropout_p, softmax_scale, causal, "
    "window_size, softcap, alibi_slopes). flash-attn 3 and 4 have no dropout_p: pass arguments by "
    "name, as in flash_attn_func(q, k, v, softmax_scale=0.25, causal=True), or import from "
    "headway.compat.flash3 or flash4"
)
FLASH_3 = (
    "Positional arguments follow flash-attn 3: (..., softmax_scale, causal, qv, q_descale, "
    "k_descale, v_descale, window_size, attention_chunk, softcap). Pass arguments by name, or "
    "import from headway.compat.flash or flash4"
)
FLASH_4 = (
    "Positional arguments follow FlashAttention-4: (..., softmax_scale, causal, window_size, "
    "learnable_sink, softcap), with qv and gather_kv_indices after v. Pass arguments by name, or "
    "import from headway.compat.flash or flash3"
)


class FlashOptions(NamedTuple):
    """The options of a call, whatever the version."""

    scale: Any = None  # a number or None; a tensor is refused further on
    limits: Limits = (None, None)
    chunk: int = 0  # queries see the keys of their own chunk alone; 0: no chunks
    dropout: float = 0.0
    softcap: float = 0.0
    slopes: Any = None  # (heads,), or a row of them for every sequence
    sink: Tensor | None = None
    deterministic: bool = False
    score: ScoreFn | None = None
    mask: MaskFn | None = None
    blocks: Any = None  # a block mask, in place of all other masks
    want_lse: bool = False
    want_max_logit: bool = False


@value
class distance_bias(Score):
    """`score - slope · |i + offset - j|`, the slope by head, or by row and head."""

    slopes: Tensor
    offset: int

    def __call__(self, score, b, h, q_idx, kv_idx):
        slope = self.slopes[b, h] if self.slopes.dim() == 2 else self.slopes[h]
        return score - slope * (q_idx + self.offset - kv_idx).abs()


def limits_of(is_causal: bool, window: Any) -> Limits:
    """Return the limits of a window in which -1, any negative number and None are none."""
    left, right = numbers_of(window)
    left = None if left is None or left < 0 else left
    return left, 0 if is_causal else None if right is None or right < 0 else right


def limits_of_signed(is_causal: bool, window: Any) -> Limits:
    """Return the limits of a window in which a negative number is a limit beyond the diagonal, as
    in FlashAttention-4; a window without any key in it is none, as there."""
    left, right = numbers_of(window)
    right = 0 if is_causal else right
    if left is not None and right is not None and left + right < 0:
        left, right = None, 0 if is_causal else None
    return left, right


def numbers_of(window: Any) -> Limits:
    """Return the two numbers of a window as Python's."""
    try:
        left, right = (_integer(n) for n in window)
    except (TypeError, ValueError) as error:
        raise CallError(
            f"window_size={window!r} must be (left, right), two integers or None for no limit"
        ) from error
    return left, right


def _integer(n: Any) -> int | None:
    if isinstance(n, bool):
        raise ValueError
    return None if n is None else operator.index(n)


def check_dense(**tensors: Any) -> None:
    """Refuse nested tensors, given by their names."""
    as_call_error(arguments.check_dense, **tensors)


def check_axes(name: str, x: Any, *axes: str) -> None:
    """Check that a tensor has the rank of one of these tuples of axes."""
    check_dense(**{name: x})
    if not isinstance(x, Tensor) or x.dim() not in [text.count(",") + 1 for text in axes]:
        raise CallError(f"{name} must be {' or '.join(axes)}, got {shown(x)}")


def shown(x: Any) -> str:
    """Return a tensor's shape, or the type of anything else."""
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def unpack(name: str, x: Any, parts: int, *axes: str) -> tuple[Tensor, ...]:
    """Return the tensors that lie side by side before the heads of x."""
    check_axes(name, x, *axes)
    if x.shape[-3] != parts:
        raise CallError(f"{name} must be {' or '.join(axes)}, got {shown(x)}")
    return x.unbind(-3)


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


def score_of(cap: float, slopes: Any, offset: int, rows: int, heads: int) -> Score | None:
    """Return softcap and ALiBi, its slopes `(heads,)` or `(rows, heads)`."""
    score: Score | None = capped(float(cap)) if cap else None
    if slopes is None:
        return score
    fits = isinstance(slopes, Tensor) and slopes.dim() in (1, 2)
    if not fits or tuple(slopes.shape) not in ((heads,), (rows, heads)):
        got = tuple(slopes.shape) if isinstance(slopes, Tensor) else repr(slopes)
        raise CallError(
            f"alibi_slopes must be a tensor (heads,) or (batch, heads), here ({heads},) or "
            f"({rows}, {heads}), got {got}; q is (batch, length, heads, width)"
        )
    alibi = distance_bias(slopes, offset)
    return alibi if score is None else Then(score, alibi)


def options_of(
    places: str, scale: Any, is_causal: Any, window: Any, cap: Any, deterministic: Any,
    dropout: Any = 0.0, limits: Callable[[bool, Any], Limits] = limits_of, **rest: Any,
) -> FlashOptions:  # fmt: skip
    """Return the options of a call, checked by kind: what stands in one place in one version of
    flash-attn stands in another in the next."""
    dropout = number("dropout_p", dropout, places)
    if not (scale is None or isinstance(scale, Tensor)):
        scale = number("softmax_scale", scale, places)
    causal = flag("causal", is_causal, places)
    options = FlashOptions(
        scale, limits(causal, window), dropout=dropout, softcap=number("softcap", cap, places),
        deterministic=flag("deterministic", deterministic, places), **rest,
    )  # fmt: skip
    if options.softcap < 0:
        raise CallError(f"softcap={cap} must be 0 (none) or above")
    if not 0 <= options.dropout < 1:
        raise CallError(f"dropout_p={dropout} must be at least 0 and less than 1")
    return options


def number(name: str, x: Any, places: str = FLASH_2) -> Any:
    """Check a real number; no tensor, no boolean."""
    if not isinstance(x, bool):
        if isinstance(x, int | float | torch.SymInt | torch.SymFloat):
            return x
        if isinstance(x, Real):  # NumPy's
            return float(x)
    raise _misplaced(name, x, "a number", places)


def count(name: str, x: Any) -> int:
    """Check an integer, 0 or more."""
    return as_call_error(arguments.count_of, name, x)


def flag(name: str, x: Any, places: str = FLASH_2) -> bool:
    """Check True or False, or 1 or 0."""
    truth = as_bool(x)
    if truth is None:
        raise _misplaced(name, x, "True or False", places)
    return truth


def tensor_or_none(name: str, x: Any, places: str) -> Tensor | None:
    """Check a tensor or None."""
    if x is None or isinstance(x, Tensor):
        return x
    raise _misplaced(name, x, "a tensor or None", places)


def check_tuning(
    places: str, num_splits: Any = 1, pack_gqa: Any = None, sm_margin: Any = 0
) -> None:
    """Check by kind what only says how a kernel cuts its work: no result depends on it."""
    number("num_splits", num_splits, places)
    number("sm_margin", sm_margin, places)
    if pack_gqa is not None:
        flag("pack_gqa", pack_gqa, places)


def function_of(name: str, fn: Any, arguments_of: str) -> Any:
    """Refuse a function of CuTe, which has more arguments than Headway's. Tracing says what is
    wrong with any other."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return fn
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = [x for x in parameters if x.default is x.empty and x.kind in positional]
    if len(required) <= _MOST_ARGUMENTS:
        return fn
    raise NotSupported(
        f"{name} takes {len(required)} arguments: FlashAttention-4's functions of CuTe run in its "
        f"kernels alone. Write it with PyTorch's ops as f({arguments_of}), and let it capture what "
        "aux_tensors and aux_scalars hold"
    )


_MOST_ARGUMENTS = 5  # of a score or mask


def _misplaced(name: str, x: Any, wanted: str, places: str) -> CallError:
    seen = f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
    return CallError(f"{name} must be {wanted}, got {seen}. {places}")
