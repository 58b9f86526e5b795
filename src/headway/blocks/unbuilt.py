"""Describe block masks that compiled code makes: no tiles exist before the program runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..mods import lower_under_compile, take_apart, version_of
from ..mods.graph import parse
from ..types import NAMESPACE, Captured, constant_under_compile, refuse_under_compile


class Unbuilt(NamedTuple):
    """Facts about tiles that compiled code has not built.

    Calls in the same program take the mask, and find tiles as for any mask. Outside, the tiles are
    built when they are first read.

    - `depends`: whether the mask depends on b, and on h.
    - `device`: of the tiles.
    - `versions`: of the tensors that the mask captures (`version_of`).
    """

    depends: tuple[bool, bool]
    device: torch.device
    versions: tuple[tuple[str, str, int], ...] = ()

    def check(self) -> None:
        """Do nothing: tiles that do not exist agree with any mask."""

    def joined(self, other: "Unbuilt") -> "Unbuilt":
        """Return the facts about the tiles of two masks joined by `&` or `|`."""
        (b, h), (other_b, other_h) = self.depends, other.depends
        return Unbuilt((b or other_b, h or other_h), self.device, self.versions + other.versions)

    def check_unwritten(self, tensors: list[Tensor]) -> None:
        """Refuse a call whose program has written to a captured tensor since it made the mask."""
        refuse_written(self.versions, versions_of(tensors))


def versions_of(tensors: list[Tensor]) -> tuple[tuple[str, str, int], ...]:
    """Return the versions of captured tensors. Dynamo traces this code."""
    versions = []
    for t in tensors:  # noqa: B007 - the next line reads its name
        versions.append(version_of("t"))
    return tuple(versions)


def refuse_written(before: tuple, now: tuple) -> None:
    """Refuse tensors of one program that have other versions now."""
    versions = {(program, node): version for program, node, version in now}
    if any(versions.get((program, node), version) != version for program, node, version in before):
        refuse_under_compile(
            ArgumentError,
            "a tensor that the block mask's mask captures was written to between block_mask(...) "
            "and the call; build the block mask after the write",
        )


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
constant_under_compile(refuse_written)


def dense_tiles(mask: Any) -> Tensor:
    """Return `BlockMask.to_dense()` as an operator of the compiled program."""
    text, captured = lower_mask(mask.mask)
    return getattr(torch.ops, NAMESPACE).dense_tiles(
        text, *captured, mask.shape, mask.tile, mask.device
    )
