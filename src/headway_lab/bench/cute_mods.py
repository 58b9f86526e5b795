"""Scores and masks of FlashAttention-4, in CuTe DSL. A score is a pair: forward and derivative.

FlashAttention-4 compiles them from their source, so they stand here as its users write them: it
knows the decorator by its spelling, and passes a score's arguments from `q_idx` on by their names.
Without CuTe DSL this file can be imported, but nothing in it can be called.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

try:
    import cutlass
    from cutlass import cute
except ImportError:
    cutlass, cute = None, SimpleNamespace(jit=lambda function: function)


class CuteScore(NamedTuple):
    """The arguments `score_mod` and `score_mod_bwd`."""

    forward: Any
    backward: Any


@cute.jit
def _identity(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score


@cute.jit
def _identity_backward(grad, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return grad


@cute.jit
def _tilted(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    distance = (kv_idx - q_idx).to(cutlass.Float32)
    scaled = score * cute.full_like(score, 1.1) + distance * cute.full_like(score, 0.01)
    return scaled + cute.full_like(score, 0.5)


@cute.jit
def _tilted_backward(grad, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return grad * cute.full_like(grad, 1.1)


@cute.jit
def _alibi(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    slope = _at(aux_tensors[0], h)
    return score + slope.to(cutlass.Float32) * (kv_idx - q_idx).to(cutlass.Float32)


@cute.jit
def _at(table, index):
    """Return one number of a captured tensor `(n,)`."""
    position = cute.make_rmem_tensor(1, cutlass.Int32)
    position.store(index)
    number = cute.make_rmem_tensor(1, table.element_type)
    number[0] = table[position[0]]
    return number.load()


@cute.jit
def causal_documents(b, h, i, j, seqlen, captured):
    """A causal mask inside of documents, whose numbers `(length,)` are captured."""
    return (j <= i) & (_at(captured[0], i) == _at(captured[0], j))


def causal_window(window: int) -> Any:
    """Return the mask of the last `window` keys, the query's own among them."""

    @cute.jit
    def mask(b, h, i, j, seqlen, captured):
        return (j <= i) & (i - j < cute.full_like(i, window))

    return mask


IDENTITY = CuteScore(_identity, _identity_backward)
TILTED = CuteScore(_tilted, _tilted_backward)
ALIBI = CuteScore(_alibi, _identity_backward)  # with a causal mask: the distance is at most 0
