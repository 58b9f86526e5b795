"""Calls that are just alike are checked and settled once; from then on they are looked up.

Calls are alike if all is the same that their checks, their `Spec` and the plans of backends depend
on: the options, everything about the tensors but what is in them, and what score and mask are made
of. A user's function is looked through at every call (`mods.capture`): what it captures may change.
"""

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .backends.base import Call, CallSignature, CapabilityKey
from .blocks import BlockMask
from .caches import Cache
from .mods import Captured
from .mods.base import Mod
from .mods.capture import Reads, reads, shared
from .mods.constants import brought
from .mods.lowering import Lowered, Parts, parts_of
from .types import Spec

_known: Cache[CallSignature] = Cache(4096)

_PLAIN = {Tensor, Parameter}  # a subclass may be anything
_SCALES = {type(None), float, int}
_READABLE = (Mod, FunctionType)


# What a score or mask is made of at one call: its parts, the tensors of the values in it on q's
# device, and what the functions in it see. (No class: this is made at every call.)
Made = tuple[Parts, list[Tensor], list[Reads]]


def look(
    q: Any, k: Any, v: Any, score: Any, mask: Any, sink: Any, scale: Any, dropout: Any,
    deterministic: Any, *more: Any,
) -> tuple[tuple, CallSignature | None, list[Made | None]] | None:  # fmt: skip
    """The key of a call, what was remembered for it, and what score and mask are made of. None for
    calls that no key tells from others."""
    if not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN):
        return None
    if not (type(dropout) is float and type(deterministic) is bool and type(scale) in _SCALES):
        return None
    try:
        key = [
            q.shape, q.stride(), q.dtype, q.device, q.requires_grad,
            k.shape, k.stride(), k.dtype, k.device, k.requires_grad,
            v.shape, v.stride(), v.dtype, v.device, v.requires_grad,
            scale, dropout, deterministic, more, torch.is_grad_enabled(),
        ]  # fmt: skip
        of_score = of_mask = None
        if sink is not None:
            _about(key, sink)
        if score is not None:
            of_score = _made_of(key, score, q.device)
        key.append(None)
        if mask is not None:
            if type(mask) is BlockMask:
                key += mask.shape, mask.tile, mask.device
                mask = mask.mask
            of_mask = _made_of(key, mask, q.device)
        known = tuple(key)
        return known, _known.get(known), [of_score, of_mask]
    except (_Unknown, RuntimeError, TypeError):  # RuntimeError: it has no strides
        return None


def captured_by(alike: CallSignature, made: list[Made | None]) -> Captured:
    """What a call captures that is alike to those."""
    if alike.captured is not None:
        return alike.captured
    captured = Captured([], [], [])
    for of, picks in zip(made, alike.picks, strict=True):
        if of is not None:
            parts, tensors, found = of
            captured.tensors.extend(tensors)
            captured.tensors.extend([found[n].tensors[at][1] for n, at in picks])
            captured.ints.extend(parts.ints)
            captured.floats.extend(parts.floats)
    return captured


def remember(
    key: tuple, spec: Spec, kind: CapabilityKey, call: Call, made: list[Made | None],
    lowered: list[Lowered | None],
) -> Call:  # fmt: skip
    """The call, known from now on: it has passed all checks, and this is its spec."""
    if call.q.device.type not in ("cuda", "cpu"):  # others may be watched (`ops`)
        return call
    if any(low is not None and low.again is not None for low in lowered):
        return call
    picks = [() if low is None else low.picks for low in lowered]
    tensors, _, floats = call.captured
    alike = CallSignature(spec, kind.trained, picks, None if tensors or floats else call.captured)
    _known.put(key, alike)
    return Call(*call[:-1], alike)


class _Unknown(Exception):
    """A key does not tell this."""


def _about(key: list, t: Any) -> None:
    """Everything about a tensor but what is in it."""
    if type(t) not in _PLAIN:
        raise _Unknown
    key += t.shape, t.stride(), t.dtype, t.device, t.requires_grad


def _made_of(key: list, mod: Any, device: torch.device) -> Made:
    """What a score or mask is made of; all of it that is not in its numbers goes into the key."""
    if not isinstance(mod, _READABLE):
        raise _Unknown
    parts = parts_of(mod)  # type: ignore[bad-argument-type]
    structure, functions, tensors, ints, _ = parts
    key.append(structure)
    if ints:
        key += ints
    if tensors:
        tensors = [t if t.device == device else brought(t, device) for t in tensors]
        for t in tensors:
            _about(key, t)
    if not functions:
        return parts, tensors, []
    key.append(torch.get_default_dtype())
    found = [reads(fn) for fn in functions]
    for of in found:
        if of.unseen is not None:
            raise _Unknown
        key.append(tuple(of.key))
        for _, t in of.tensors:
            if t.device != device:
                raise _Unknown
            _about(key, t)
    if len(found) > 1:
        key.append(shared(found))
    return parts, tensors, found
