"""Scores and masks of FlashAttention-4, in CuTe DSL. A score is a pair: forward and derivative.

FlashAttention-4 compiles them from their source, so they stand here as its users write them.
Without CuTe DSL this file can be imported, but nothing in it can be called.
"""

from typing import Any, NamedTuple

try:
    import cutlass
    from cutlass import cute

    jit = cute.jit
except ImportError:
    cutlass, cute = None, None
    jit = lambda function: function


class CuteScore(NamedTuple):
    """The arguments `score_mod` and `score_mod_bwd`."""

    forward: Any
    backward: Any


@jit
def _identity(score, b, h, i, j, seqlen, captured):
    return score


@jit
def _identity_backward(grad, score, b, h, i, j, seqlen, captured):
    return grad


@jit
def _tilted(score, b, h, i, j, seqlen, captured):
    distance = (j - i).to(cutlass.Float32)
    scaled = score * cute.full_like(score, 1.1) + distance * cute.full_like(score, 0.01)
    return scaled + cute.full_like(score, 0.5)


@jit
def _tilted_backward(grad, score, b, h, i, j, seqlen, captured):
    return grad * cute.full_like(grad, 1.1)


@jit
def _alibi(score, b, h, i, j, seqlen, captured):
    slope = _at(captured[0], h)
    return score + slope.to(cutlass.Float32) * (j - i).to(cutlass.Float32)


@jit
def _at(table, index):
    """Return one number of a captured tensor `(n,)`."""
    position = cute.make_rmem_tensor(1, cutlass.Int32)
    position.store(index)
    number = cute.make_rmem_tensor(1, table.element_type)
    number[0] = table[position[0]]
    return number.load()


@jit
def causal_documents(b, h, i, j, seqlen, captured):
    """A causal mask inside of documents, whose numbers `(length,)` are captured."""
    return (j <= i) & (_at(captured[0], i) == _at(captured[0], j))


def causal_window(window: int) -> Any:
    """Return the mask of the last `window` keys, the query's own among them."""

    @jit
    def mask(b, h, i, j, seqlen, captured):
        return (j <= i) & (i - j < cute.full_like(i, window))

    return mask


IDENTITY = CuteScore(_identity, _identity_backward)
TILTED = CuteScore(_tilted, _tilted_backward)
ALIBI = CuteScore(_alibi, _identity_backward)  # with a causal mask: j - i is at most 0
