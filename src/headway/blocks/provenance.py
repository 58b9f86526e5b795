"""Check the provenance of tiles: the mask function and the tensors from which they were derived.

Inside partial tiles every call evaluates the mask again. If its tensors or numbers changed since,
the tiles would be those of another mask.
"""

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

_REBUILD = "build the block mask again, block_mask(mask, b, h, q_len, kv_len), after such a change"


class Provenance:
    """The formula of a mask, the identities of the tensors that it captures, and a stamp of each
    that reveals writes: its version counter, or a copy where it has none (inference mode).

    Writes that the counter misses go unnoticed: see `clear_block_cache`.

    - `depends`: whether the mask depends on b, and on h.
    """

    def __init__(self, graph: Graph, tensors: Sequence[Tensor]) -> None:
        self.formula = graph.text
        self.depends = graph.uses("b"), graph.uses("h")
        self.tensors = {id(t): (TensorWeakRef(t), _stamp(t)) for t in tensors}

    @staticmethod
    def of(mask: Callable) -> "Provenance":
        """Return the provenance of tiles that are derived from a mask now."""
        graph, captured = lower_mod("mask", mask, torch.float32)
        return Provenance(graph, captured.tensors)

    def __eq__(self, other: object) -> bool:
        """Compare the formulas, and the tensors by identity and stamp: an exported program takes
        any block mask of the mask that it was exported with."""
        if not isinstance(other, Provenance):
            return NotImplemented
        mine, theirs = self._identities(), other._identities()
        return mine is not None and mine == theirs

    def __hash__(self) -> int:
        return hash(self.formula)

    def _identities(self) -> tuple | None:
        """Return what `==` compares; None where a tensor is freed, whose id another may have."""
        if any(ref() is None for ref, _ in self.tensors.values()):
            return None
        stamps = (
            (key, id(s) if isinstance(s, Tensor) else s) for key, (_, s) in self.tensors.items()
        )
        return self.formula, self.depends, tuple(sorted(stamps))

    def check(self) -> None:
        """Check that no tensor was written to since; raise `ArgumentError` if one was."""
        for ref, stamp in self.tensors.values():
            t = ref()  # a freed tensor is written to no more
            if t is not None and _written(t, stamp):
                raise ArgumentError(
                    f"the mask of this block mask captures a tensor {tuple(t.shape)} {t.dtype} "
                    f"that was written to since its tiles were found; {_REBUILD}"
                )

    def check_call(self, formula: str | None, tensors: Sequence[Tensor]) -> None:
        """Check also that the mask has the same formula, and captures the same tensors, as then."""
        if formula != self.formula:
            raise ArgumentError(
                "the mask function of this block mask has changed since its tiles were found: it "
                f"captures another number or function; {_REBUILD}\n"
                f"{self.formula}\n{formula}"
            )
        for t in tensors:
            if id(t) not in self.tensors or self.tensors[id(t)][0]() is not t:
                raise ArgumentError(
                    f"the mask function of this block mask captures another tensor "
                    f"{tuple(t.shape)} {t.dtype} than when its tiles were found; {_REBUILD}"
                )
        if self.tensors:
            self.check()


def _stamp(t: Tensor) -> int | Tensor:
    """Return the version counter of a tensor, or a copy where it has none."""
    version = version_of(t)
    return t.clone() if version is None else version


def _written(t: Tensor, stamp: int | Tensor) -> bool:
    """Return whether a tensor was written to since it had this stamp."""
    if not isinstance(stamp, Tensor):
        return t._version != stamp
    if capturing(t.device):
        raise ArgumentError(
            f"the mask of this block mask captures a tensor {tuple(t.shape)} {t.dtype} made in "
            "inference mode, which is compared with a copy; that is impossible while a CUDA graph "
            "is being captured. Pass the mask itself, or make the tensor under "
            "torch.inference_mode(False)"
        )
    if t.shape != stamp.shape:
        return True
    return not torch.isclose(t, stamp, rtol=0, atol=0, equal_nan=True).all()


# -- compiled programs ----------------------------------------------------------------------------
#
# A compiled program calls the operator with tensors only, so tiles lead to their provenance.

_by_row_order: WeakIdKeyDictionary = WeakIdKeyDictionary()


def record_provenance(tiles: Any, provenance: Provenance) -> None:
    """Record the provenance of tiles, for as long as they live."""
    _by_row_order[tiles.row_order] = provenance


def check_tiles(tiles: Any) -> None:
    """Check the tiles that a compiled program takes; replays of a CUDA graph check nothing."""
    provenance = _by_row_order.get(tiles.row_order)
    if provenance is not None:
        provenance.check()
