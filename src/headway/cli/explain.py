"""`headway explain`."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import tyro

import headway

from ..errors import ArgumentError
from ..mods.suggest import SIGNATURES
from .files import from_file
from .mask import parse
from .options import check_positive

_OF_COUNT = {len(takes.split(",")): kind for kind, takes in SIGNATURES.items()}  # of parameters


@dataclass(frozen=True)
class Arguments:
    """Print what `attention` would run for a score and a mask: the backend, every reason against
    the others, the mask's tiles, and the code.

    Name a function or a value in a file as FILE:NAME. It is a score if it takes (score, b, h,
    q_idx, kv_idx), and a mask if it takes (b, h, q_idx, kv_idx). Or write an expression, as for
    headway mask. The file is run, except for its __main__ part. For example:

      headway explain mods.py:my_score "causal()"
      headway explain "causal() & sliding_window(1024)" --length 8192 --dtype bfloat16
    """

    mods: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[FILE:NAME ...]", help_behavior_hint="(default: none)"),
    ] = ()
    """At most one score and one mask."""
    batch: int = 1
    """Batch size."""
    heads: int = 8
    """Query heads."""
    kv_heads: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: heads)")] = None
    """Key/value heads."""
    length: int = 1024
    """Number of queries."""
    kv_length: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: length)")] = None
    """Number of keys."""
    width: int = 64
    """Head dimension of q and k."""
    value_width: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: width)")] = None
    """Head dimension of v."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Dtype of the inputs."""
    device: Annotated[str | None, tyro.conf.arg(help_behavior_hint="(default: a GPU, or cpu)")] = (
        None
    )
    """Device of the inputs."""
    train: bool = False
    """The inputs require grad."""
    entropy: tyro.conf.FlagCreatePairsOff[bool] = False
    """Ask for the entropy of every query."""
    sink_mass: tyro.conf.FlagCreatePairsOff[bool] = False
    """Ask for the weight on the first key."""
    backend: str = "auto"
    """The only backend to consider; "auto" considers all."""


def main(arguments: list[str]) -> int:
    """Run `headway explain`; return 1 if no backend can run the call, else 0."""
    options = tyro.cli(Arguments, args=arguments, prog="headway explain")
    sizes = "batch", "heads", "kv_heads", "length", "kv_length", "width", "value_width"
    check_positive(options, *sizes)
    mods = mods_by_kind((text, find(text)) for text in options.mods)
    explanation = headway.explain(
        *_inputs(options), **mods, backend=options.backend, entropy=options.entropy,
        sink_mass=options.sink_mass,
    )  # fmt: skip
    print(explanation)
    return 0 if explanation.backend is not None else 1


def _inputs(options: Arguments) -> list[torch.Tensor]:
    """Return empty q, k and v of the sizes asked for."""
    kv_heads, kv_length = options.kv_heads or options.heads, options.kv_length or options.length
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shapes = (
        (options.batch, options.heads, options.length, options.width),
        (options.batch, kv_heads, kv_length, options.width),
        (options.batch, kv_heads, kv_length, options.value_width or options.width),
    )
    how: Any = {
        "dtype": getattr(torch, options.dtype), "device": device, "requires_grad": options.train,
    }  # fmt: skip
    try:
        return [torch.empty(shape, **how) for shape in shapes]
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"no inputs of this size on --device {device}: {error}") from error


def find(text: str) -> Any:
    """Return the object that FILE:NAME or an expression names."""
    if ":" not in text and not text.endswith(".py"):
        return parse(text)
    return from_file(text)


def mods_by_kind(mods: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return at most one score and one mask by "score" and "mask", from their texts and values."""
    by_kind: dict[str, Any] = {}
    for text, mod in mods:
        kind = _kind_of(text, mod)
        if kind in by_kind:
            raise ArgumentError(f"{text!r} is a second {kind}; there is one at most")
        by_kind[kind] = mod
    return by_kind


def _kind_of(text: str, mod: Callable[..., Any]) -> str:
    """Return "score" or "mask", by the type of a mod or its number of arguments."""
    if isinstance(mod, headway.Score):
        return "score"
    if isinstance(mod, headway.Mask | headway.BlockMask):
        return "mask"
    try:
        parameters = inspect.signature(mod).parameters.values()
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{text!r} cannot be a score or a mask: {error}") from None
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(required) not in _OF_COUNT:
        takes = " and ".join(f"a {kind} {takes}" for kind, takes in SIGNATURES.items())
        raise ArgumentError(f"{text!r} takes {len(required)} arguments; {takes}")
    return _OF_COUNT[len(required)]
