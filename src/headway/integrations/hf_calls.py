"""What a model of transformers was called with, for the attention inside of it.

Not every model hands its `position_ids` down to its attention; every model is given them.
"""

import inspect
import threading
import warnings
from functools import cache, cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .hf_mask import AttentionMask

_running = threading.local()
_causal: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()
_DOCUMENTS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")


class ModelCall:
    """A forward of a model, from when it begins to when it ends."""

    def __init__(
        self, model: torch.nn.Module, args: tuple, kwargs: dict, outer: "ModelCall | None"
    ):
        self.model = model
        mask = argument_of(model, args, kwargs, "attention_mask")
        masks = [*mask.values()] if isinstance(mask, dict) else [mask]
        ours = [m for m in masks if isinstance(m, AttentionMask)]
        squares = [m for m in masks if isinstance(m, Tensor) and m.dim() == 4]
        # A square is the caller's word about documents, unless a model around this one made it.
        self.own_mask = len(squares) > len(ours) if outer is None else outer.own_mask
        self.mask = ours[0] if ours else mask
        self.made: list[AttentionMask] = []  # masks that were made in this call
        positions = argument_of(model, args, kwargs, "position_ids")
        plain = isinstance(positions, Tensor) and positions.dim() in (1, 2, 3)
        self.positions: Tensor | None = positions if plain and positions.shape[-1] > 1 else None
        self.judged = self.positions is None or self.own_mask
        self.bare = mask is None and argument_of(model, args, kwargs, "use_cache") is False
        self.documents = [name for name in _DOCUMENTS if kwargs.get(name) is not None]

    @cached_property
    def packed(self) -> bool:
        """True if positions restart within a row, between two tokens that are not padding."""
        positions = self.positions
        assert positions is not None
        # Of time, height and width, tokens of an image share the first.
        restarts = positions[0].diff() < 0 if positions.dim() == 3 else positions.diff() <= 0
        unpadded: Any = self.mask
        if isinstance(unpadded, AttentionMask):
            unpadded = None if unpadded.kept is None else unpadded.kept()
        length = positions.shape[-1]
        if isinstance(unpadded, Tensor) and unpadded.dim() == 2 and unpadded.shape[1] >= length:
            unpadded = unpadded[:, -length:].to(restarts.device, torch.bool)
            restarts = restarts & unpadded[:, 1:] & unpadded[:, :-1]
        return bool(restarts.any())

    def look(self, mask: Any, queries: int, keys: int, has_documents: bool) -> None:
        """Warn once if packed documents see each other, under this mask and without documents."""
        positions = self.positions
        if positions is None or positions.shape[-1] != queries:
            return
        plain = isinstance(mask, Tensor) and not isinstance(mask, AttentionMask)
        longer = plain and any(m.is_looked_at and keys > m.sizes[3] for m in self.made)
        masks = [mask, *self.made] if isinstance(mask, AttentionMask) else self.made
        separated = has_documents or any(m.documents for m in masks)
        if separated and not longer:
            return
        self.judged = True
        if self.packed:
            warnings.warn(
                "position_ids restart inside a row, but the packed documents see each other: "
                + self._way_out(longer),
                stacklevel=5,
            )

    def _way_out(self, longer: bool) -> str:
        name = type(self.model).__name__
        if longer:
            return f"{name} adds keys that belong to no document; give it one document a row"
        if names := ", ".join(self.documents):
            return f"{name} does not hand {names} to its attention; give it one document a row"
        arguments = (
            "seq_idx, the number of each token's document (batch, keys), or with cu_seq_lens_q "
            "and cu_seq_lens_k"
        )
        if self.bare:
            return f"transformers reads no position_ids for {name}; call it with {arguments}"
        return (
            "transformers reads position_ids only with use_cache=False and no attention_mask, and "
            f"not for every model; call {name} in this way, or with {arguments}"
        )

    @property
    def none_keeps_all(self) -> bool:
        """Return whether no attention of the model is causal without a mask."""
        if self.model not in _causal:
            _causal[self.model] = any(
                getattr(part, "is_causal", False) for part in self.model.modules()
            )
        return not _causal[self.model]


def current() -> ModelCall | None:
    """Return the innermost call that is running in this thread."""
    calls = getattr(_running, "calls", None)
    return calls[-1] if calls else None


def begin(model: torch.nn.Module, args: tuple, kwargs: dict) -> None:
    """Record a call, before the model's forward."""
    calls = _running.__dict__.setdefault("calls", [])
    # What was interrupted and never ended is no longer running.
    for number, call in enumerate(calls):
        if call.model is model:
            del calls[number:]
            break
    calls.append(ModelCall(model, args, kwargs, calls[-1] if calls else None))


def end(model: torch.nn.Module) -> None:
    """Forget the call, after the forward or an exception in it."""
    calls = getattr(_running, "calls", None)
    if calls and calls[-1].model is model:
        calls.pop()


def argument_of(model: torch.nn.Module, args: tuple, kwargs: dict, name: str) -> Any:
    """Return the argument of a model's call, by name or position; None where it is missing."""
    if name in kwargs or not args:
        return kwargs.get(name)
    place = _places(type(model)).get(name)
    return args[place] if place is not None and place < len(args) else None


@cache
def _places(cls: type) -> dict[str, int]:
    names = list(inspect.signature(cls.forward).parameters)[1:]  # type: ignore[attr-defined]
    return {name: place for place, name in enumerate(names)}
