"""The numbers by which ranks compare a call: one for each field, the same in every process."""

import hashlib
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...backends.base import Call
from ...caches import TensorCache
from ...errors import ArgumentError
from ...surroundings import capturing
from ...types import ExchangeSpec, Spec
from .shared_memory import rank_names

# Operations, and the fields of each that ranks compare.
ATTENTION, SHARD, UNSHARD, SHIFT = "attention", "layout.shard", "layout.unshard", "layout.shift"
_CALL_FIELDS = (
    "the layout", "the layout of its keys", "the sizes (b, heads, widths)", "dtype or device",
    "the score", "the mask", "scale, dropout, sink or what is asked for",
    "numbers that score and mask capture", "tensors that score and mask capture", "the sink",
    "the seed", "the plan", "whether it trains",
)  # fmt: skip
_MOVE_FIELDS = (
    "the layout", "the sizes beside the sequence", "dtype or device", "dim", "by or fill",
    "whether it trains",
)  # fmt: skip
FIELDS = {ATTENTION: _CALL_FIELDS, SHARD: _MOVE_FIELDS, UNSHARD: _MOVE_FIELDS, SHIFT: _MOVE_FIELDS}
# A call, its backward, or the call repeated in a backward, as activation checkpointing does.
_DESCRIPTIONS = (
    "{}", "the backward of {}, call {} over these ranks",
    "{}, again for a backward behind call {} over these ranks",
)  # fmt: skip
FORWARD, BACKWARD, RECOMPUTE = range(3)
ACTIONS = [(name, phase) for name in FIELDS for phase in range(len(_DESCRIPTIONS))]
HEADER = 3  # numbers before the fields: one of these, the action, its call
NUMBERS = HEADER + max(map(len, FIELDS.values()))  # that every rank sends for any operation
# Indices of the fields that a plan depends on.
PLAN_FIELDS = [
    n
    for n, name in enumerate(_CALL_FIELDS)
    if name not in ("the sink", "the seed", "whether it trains")
]
_DRAWN_SEED = 1 << 62  # stands for a seed that the first rank draws


def fields_of(
    spec: Spec, call: Call, digests: tuple[int, int], plan: tuple, exchange: ExchangeSpec
) -> list[int | Tensor]:
    """Return a number for every field of a call. Where a mask's tiles are the caller's own, they
    count as a part of the mask.

    - `digests`: of the layouts of queries and keys.

    **Raises:** `ArgumentError` while a CUDA graph is captured, for a mask that captures tensors.
    """
    (b, hq, _, d), hk, dv = call.q.shape, call.k.shape[1], call.v.shape[3]
    sizes, dtype, score, mask, options, plan_hash = _spec_hashes(
        spec, (b, hq, hk, d, dv), call.q.dtype, call.q.device, plan
    )
    tensors, ints, floats = call.captured
    if len(tensors) > spec.score_tensors and capturing(call.q.device):
        raise ArgumentError(
            "the mask of a call over ranks captures tensors, and a CUDA graph is being captured: "
            "every replay would exchange the keys that their contents of now ask for. Use a mask "
            "that captures none, such as causal() & sliding_window(n), or call outside of the graph"
        )
    seed = (_DRAWN_SEED if spec.dropout else 0) if call.seed is None else call.seed
    if exchange.own_tiles and call.tiles is not None:
        mask = hash_of([mask, *[_content(t) for t in call.tiles.flatten()]])
    return [
        *digests, sizes, dtype, score, mask, options,
        hash_of((ints, floats)) if ints or floats else 0,
        _hash_of_tensors(tensors, exchange.constants) if tensors else 0,
        0 if call.sink is None else _hash_of_tensors([call.sink], (exchange.constant_sink,)),
        seed, plan_hash, int(exchange.trains),
    ]  # fmt: skip


@lru_cache(256)
def _spec_hashes(
    spec: Spec, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, plan: tuple
) -> tuple[int, ...]:
    """Return the fields that do not depend on data: sizes, dtype and device, score, mask, options,
    and the plan."""
    options = [
        spec.scale, spec.dropout, spec.sink, spec.max_logit, spec.row_max, spec.partial,
        spec.deterministic, spec.tiles,
    ]  # fmt: skip
    values = sizes, (str(dtype), device.type), spec.score, spec.mask, options, plan
    return tuple(map(hash_of, values))


def fields_of_move(
    digest: int, x: Tensor, dim: int, options: tuple[float, ...], trains: bool
) -> list[int]:
    """Return a number for every field of a layout's operation on a tensor, along `dim` (0 or
    more)."""
    other_sizes = (*x.shape[:dim], *x.shape[dim + 1 :])
    sizes, dtype, numbers = _tensor_hashes(other_sizes, x.dtype, x.device.type, options)
    return [digest, sizes, dtype, dim, numbers, int(trains)]


@lru_cache(256)
def _tensor_hashes(
    sizes: tuple[int, ...], dtype: torch.dtype, device: str, options: tuple[float, ...]
) -> tuple[int, ...]:
    return hash_of(sizes), hash_of((str(dtype), device)), hash_of(options)


def hash_of(value: Any) -> int:
    """Return a hash of 63 bits that is the same in every process."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _hash_of_tensors(tensors: Sequence[Tensor], constants: tuple[bool, ...]) -> int:
    """Hash shapes and dtypes, and the contents of tensors that are not trained. The others change
    with every optimizer step, and to read them would be to wait for the device."""
    parts: list[Any] = [(tuple(t.shape), str(t.dtype)) for t in tensors]
    pairs = zip(tensors, constants, strict=True)
    parts += [_content(tensor) for tensor, constant in pairs if constant]
    return hash_of(parts)


# Checksums of tensors. (During a capture no tensor can be read: then cached ones count.)
_contents: TensorCache[int] = TensorCache(256, in_captures=True)


def _content(t: Tensor) -> int:
    return read_once(t, None, _checksum)


def read_once(t: Tensor, key: Any, read: Callable[[Tensor], int]) -> int:
    """Return `read(t)`, cached until somebody writes into the tensor.

    - `key`: of the reader.
    """
    return _contents.of([t], key, lambda: read(t))


def _checksum(t: Tensor) -> int:
    flat = t.detach().contiguous().flatten()
    flat = flat.as_strided(flat.shape, (1,))  # a tensor of one element may have any stride
    if t.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    if t.device.type == "cpu":
        return zlib.crc32(flat.view(torch.uint8).numpy().data)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize]
    words = flat.view(integer)
    weights = torch.arange(len(words), device=t.device) * 0x9E3779B97F4A7C1 + 1
    return int((words.to(torch.int64) * weights).sum()) & (2**63 - 1)


# -- words --------------------------------------------------------------------------------------


def described(action: int, call: int, number: int) -> str:
    """Return the words for a call."""
    operation, phase = ACTIONS[action]
    if phase == FORWARD:
        return f"{operation}, call {number} over these ranks"
    return in_words(action, call)


def in_words(action: int, call: int) -> str:
    """Return the words for what all ranks compare of a call."""
    operation, phase = ACTIONS[action]
    if phase == RECOMPUTE and not call:  # made before the first one, or too long ago
        return f"{operation}, again for a backward"
    return _DESCRIPTIONS[phase].format(operation, call)


def failure_words(ranks: str, call: str) -> str:
    """Return the words for ranks that raised between exchanges."""
    return (
        f"{ranks} raised in {call}; see the error there. Every rank of the layout raises, since "
        "results depend on those of all"
    )


def in_backward(action: int) -> bool:
    """Return whether a rank's call is a part of a backward."""
    return ACTIONS[action][1] != FORWARD


def error_of_other_calls(per_rank: list[list[int]]) -> Exception:
    """Return the error of ranks that make other calls, or the same with other fields."""
    actions = [tuple(numbers[1:3]) for numbers in per_rank]
    if any(action != actions[0] for action in actions):
        calls = [f"rank {rank}: {in_words(*action)}" for rank, action in enumerate(actions)]
        guess = _guess([ACTIONS[action][1] for action, _ in actions])
        return ArgumentError(
            f"ranks do not make the same call: {'; '.join(calls)}. All ranks of a layout make "
            f"the same calls in the same order, and call backward in the same order{guess}"
        )
    operation, _ = ACTIONS[actions[0][0]]
    columns = list(zip(*per_rank, strict=True))
    n = next(n for n in range(HEADER, NUMBERS) if len(set(columns[n])) > 1)
    majority = max(columns[n], key=columns[n].count)
    outliers = [number != majority for number in columns[n]]
    differ = f"{ranks_with(outliers, True)} differ{'s' * (sum(outliers) == 1)} from the others"
    if len(per_rank) == 2:  # neither is a majority
        differ = "ranks 0 and 1 differ"
    return ArgumentError(
        f"ranks do not make the same call: {differ} in {FIELDS[operation][n - HEADER]}; all ranks "
        "of a layout pass the same mask, score and options, with tensors that are the same "
        "everywhere"
    )


def _guess(phases: list[int]) -> str:
    """Return what may have happened where some ranks are in a backward and others are not."""
    if FORWARD not in phases or set(phases) == {FORWARD}:
        return ""
    ahead = ranks_with(phases, FORWARD)
    behind = rank_names(rank for rank, phase in enumerate(phases) if phase != FORWARD)
    return (
        f". Either {ahead} left the backward out (a hook or code of yours raised in it, or the "
        f"loss does not depend on the call), or {behind} left a call out"
    )


def ranks_with(values: Sequence[Any], chosen: Any) -> str:
    """Return the words for the ranks that have a value."""
    return rank_names(rank for rank, value in enumerate(values) if value == chosen)
