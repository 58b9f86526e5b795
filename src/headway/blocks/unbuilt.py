"""Describe block masks that compiled code makes: no tiles exist before the program runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mods import lower_under_compile, take_apart
from ..mods.graph import parse
from ..types import NAMESPACE, Captured, constant_under_compile


class Unbuilt(NamedTuple):
    """Facts about tiles that compiled code has not built.

    Calls in the same program take the mask, and find tiles as for any mask. Outside, the tiles are
    built when they are first read.

    - `depends`: whether the mask depends on b, and on h.
    - `device`: of the tiles.
    """

    depends: tuple[bool, bool]
    device: torch.device

    def check(self) -> None:
        """Do nothing: tiles that do not exist agree with any mask."""

    def joined(self, other: "Unbuilt") -> "Unbuilt":
        """Return the facts about the tiles of two masks joined by `&` or `|`."""
        (b, h), (other_b, other_h) = self.depends, other.depends
        return Unbuilt((b or other_b, h or other_h), self.device)


def facts_under_compile(mask: Any) -> Unbuilt | None:
    """Return what `torch.compile` knows of a block mask without tiles; None in other cases."""
    unbuilt = torch.compiler.is_compiling() and isinstance(mask.decided, Unbuilt)
    return mask.decided if unbuilt else None


def lower_mask(mask: Callable) -> tuple[str, Captured]:
    """Return the text of a mask's graph and what it captures. Dynamo traces this code."""
    structure, functions, captured = take_apart(mask)
    lowered, captured = lower_under_compile("mask", structure, "f32", functions, captured, [])
    return lowered.text, captured


def depends_on_rows(text: str) -> tuple[bool, bool]:
    """Return whether a mask's graph depends on b, and on h."""
    graph = parse(text)
    return graph.uses("b"), graph.uses("h")


constant_under_compile(depends_on_rows)


def dense_tiles(mask: Any) -> Tensor:
    """Return `BlockMask.to_dense()` as an operator of the compiled program."""
    text, captured = lower_mask(mask.mask)
    return getattr(torch.ops, NAMESPACE).dense_tiles(
        text, *captured, mask.shape, mask.tile, mask.device
    )
