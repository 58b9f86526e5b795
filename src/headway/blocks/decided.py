"""What the tiles of a block mask were decided by. Inside partial tiles a mask is evaluated anew at
every call: were its tensors or its numbers others by then, old tiles would meet a new mask."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ArgumentError
from ..mods.lowering import lower_mod

_AGAIN = "build the block mask again, block_mask(mask, b, h, q_len, kv_len), after such a change"


class Decided:
    """A mask's formula, and the tensors that it captures with their version counters.

    Writes that the counter misses go unnoticed: through `tensor.data`, through a NumPy array that
    shares the memory, and to tensors made in inference mode, which have none.
    """

    def __init__(self, formula: str, tensors: Sequence[Tensor]) -> None:
        self.formula = formula
        self.tensors = {id(t): (t, _version(t)) for t in tensors}

    @staticmethod
    def by(mask: Callable) -> "Decided":
        """By a mask as it is now."""
        graph, captured = lower_mod("mask", mask, torch.float32)
        return Decided(graph.text, captured.tensors)

    def check(self) -> None:
        """**Raises:** `ArgumentError` where a tensor was written to since."""
        for t, version in self.tensors.values():
            if version is not None and t._version != version:
                raise ArgumentError(
                    f"the mask of this block mask captures a tensor {tuple(t.shape)} {t.dtype} "
                    f"that was written to since its tiles were found; {_AGAIN}"
                )

    def check_call(self, formula: str | None, tensors: Sequence[Tensor]) -> None:
        """`check`, and that the mask is still the same, which captures these tensors now."""
        if formula != self.formula:
            raise ArgumentError(
                "the mask function of this block mask has changed since its tiles were found: it "
                f"captures another number or function; {_AGAIN}\n"
                f"{self.formula}\n{formula}"
            )
        known = self.tensors
        for t in tensors:
            if id(t) not in known:
                raise ArgumentError(
                    f"the mask function of this block mask captures another tensor "
                    f"{tuple(t.shape)} {t.dtype} than when its tiles were found; {_AGAIN}"
                )
        if known:
            self.check()


def _version(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version


# -- compiled programs ----------------------------------------------------------------------------
#
# A program calls the operator with tensors alone: tiles tell there what decided them.

_of_tiles: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by one of the tensors


def tell(tiles: Any, decided: Decided) -> None:
    """Remember what decided some tiles, for as long as they live."""
    _of_tiles[tiles.row_order] = decided


def check_tiles(tiles: Any) -> None:
    """`Decided.check` for tiles that are given to a compiled program. (The tensors of a CUDA graph
    are copies, and nobody is asked when it is replayed.)"""
    decided = _of_tiles.get(tiles.row_order)
    if decided is not None:
        decided.check()
