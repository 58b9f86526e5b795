"""Score functions of FlashAttention-4, in CuTe DSL: each is a pair, forward and its derivative.

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
    slopes = captured[0]
    head = cute.make_rmem_tensor(1, cutlass.Int32)
    head.store(h)
    slope = cute.make_rmem_tensor(1, slopes.element_type)
    slope[0] = slopes[head[0]]
    return score + slope.load().to(cutlass.Float32) * (j - i).to(cutlass.Float32)


IDENTITY = CuteScore(_identity, _identity_backward)
TILTED = CuteScore(_tilted, _tilted_backward)
ALIBI = CuteScore(_alibi, _identity_backward)  # with a causal mask: j - i is at most 0
