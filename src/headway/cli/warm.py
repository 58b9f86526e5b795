"""`headway warm`."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

import headway

from ..errors import ArgumentError
from .explain import find, mods_by_kind
from .options import check_positive


@dataclass(frozen=True)
class Arguments:
    """Compile kernels ahead of the calls that need them, into a folder that you may copy.

    Pass a score and a mask, as to headway explain, with the sizes below. Or pass FILE:NAME of what
    headway.warm takes: a dict, a function that returns one, or a list of them. With --device you
    need no GPU. For example:

      headway warm "causal()" --heads 16 --length 8192 --width 128 --device sm_90 --output kernels
      headway warm calls.py:calls --device sm_90 --output kernels

    Then set TRITON_CACHE_DIR to the folder, or copy its contents into ~/.triton/cache: such calls
    compile nothing.
    """

    calls: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(
            metavar="[FILE:NAME ...]", help_behavior_hint="(default: no score and no mask)"
        ),
    ] = ()
    """FILE:NAME of calls, or at most one score and one mask."""
    device: Annotated[
        str | None, tyro.conf.arg(help_behavior_hint="(default: PyTorch's current GPU)")
    ] = None
    """The GPU: sm_80, sm_86, sm_89, sm_90, sm_100 or sm_120."""
    output: Annotated[
        Path | None, tyro.conf.arg(help_behavior_hint="(default: Triton's own folder)")
    ] = None
    """The folder to write to."""
    jobs: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: all processors)")] = (
        None
    )
    """Number of kernels to compile in parallel."""
    batch: int = 1
    """Batch size."""
    heads: int = 8
    """Query heads."""
    kv_heads: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: heads)")] = None
    """Key/value heads."""
    length: int = 4096
    """Number of queries and keys. Kernels depend on its divisors up to 128, and on whether there
    are thousands."""
    width: int = 128
    """Head dimension of q and k."""
    value_width: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: width)")] = None
    """Head dimension of v."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the inputs."""
    train: bool = True
    """The inputs require grad: the backward is compiled, too."""
    backend: str = "auto"
    """The only backend to consider; "auto" considers all."""


def main(arguments: list[str]) -> int:
    """Run `headway warm`; return exit status 0."""
    options = tyro.cli(Arguments, args=arguments, prog="headway warm")
    check_positive(options, "batch", "heads", "kv_heads", "length", "width", "value_width")
    kernels = headway.warm(
        _calls(options), device=options.device, out=options.output, jobs=options.jobs
    )
    for kernel in kernels:
        print(kernel)
    compiled = sum(kernel.compiled for kernel in kernels)
    print(f"{compiled} compiled, {len(kernels) - compiled} there already")
    return 0


def _calls(options: Arguments) -> list[Any]:
    values = [(text, find(text)) for text in options.calls]
    calls = [value for _, value in values if _makes_calls(value)]
    mods = mods_by_kind((text, value) for text, value in values if not _makes_calls(value))
    if calls and mods:
        raise ArgumentError("calls bring their own score and mask: give one or the other")
    return calls or [_of_sizes(options) | mods]


def _makes_calls(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return True
    return inspect.isfunction(value) and not inspect.signature(value).parameters


def _of_sizes(options: Arguments) -> dict[str, Any]:
    b, kv_heads = options.batch, options.kv_heads or options.heads
    return {
        "q": (b, options.heads, options.length, options.width),
        "k": (b, kv_heads, options.length, options.width),
        "v": (b, kv_heads, options.length, options.value_width or options.width),
        "dtype": getattr(torch, options.dtype),
        "train": options.train,
        "backend": options.backend,
    }
