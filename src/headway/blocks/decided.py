"""What the tiles of a block mask were decided by. Inside partial tiles a mask is evaluated anew at
every call: were its tensors or its numbers others by then, old tiles would meet a new mask."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from ..caches import version_of
from ..errors import ArgumentError
from ..mods.graph import Graph
from ..mods.lowering import lower_mod
from ..surroundings import capturing

_AGAIN = "build the block mask again, block_mask(mask, b, h, q_len, kv_len), after such a change"


class Decided:
    """A mask's formula, and the tensors that it captures: which they are, not themselves, and what
    tells of a write. That is the version counter, or where there is none, as of tensors made in
    inference mode, a copy.

    Writes that the counter misses go unnoticed: see `clear_block_cache`.

    - `depends`: whether the mask depends on b, and on h.
    """

    def __init__(self, graph: Graph, tensors: Sequence[Tensor]) -> None:
        self.formula = graph.text
        self.depends = graph.uses("b"), graph.uses("h")
        self.tensors = {id(t): (TensorWeakRef(t), _stamp(t)) for t in tensors}

    @staticmethod
    def by(mask: Callable) -> "Decided":
        """By a mask as it is now."""
        graph, captured = lower_mod("mask", mask, torch.float32)
        return Decided(graph, captured.tensors)

    def check(self) -> None:
        """**Raises:** `ArgumentError` where a tensor was written to since."""
        for ref, stamp in self.tensors.values():
            t = ref()  # nobody writes to what is gone
            if t is not None and _written(t, stamp):
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
            if id(t) not in known or known[id(t)][0]() is not t:
                raise ArgumentError(
                    f"the mask function of this block mask captures another tensor "
                    f"{tuple(t.shape)} {t.dtype} than when its tiles were found; {_AGAIN}"
                )
        if known:
            self.check()


def _stamp(t: Tensor) -> int | Tensor:
    version = version_of(t)
    return t.clone() if version is None else version


def _written(t: Tensor, stamp: int | Tensor) -> bool:
    """Whether a tensor was written to since it had this stamp."""
    if not isinstance(stamp, Tensor):
        return t._version != stamp
    if capturing(t.device):
        raise ArgumentError(
            f"the mask of this block mask captures a tensor {tuple(t.shape)} {t.dtype} made in "
            "inference mode, which is compared with what it held; that is impossible while a CUDA "
            "graph is being captured. Pass the mask itself, or make the tensor under "
            "torch.inference_mode(False)"
        )
    if t.shape != stamp.shape:
        return True
    return not torch.isclose(t, stamp, rtol=0, atol=0, equal_nan=True).all()


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
