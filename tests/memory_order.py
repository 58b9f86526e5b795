"""The order in which the dimensions of a tensor lie in memory."""

from torch import Tensor


def outer_first(x: Tensor) -> list[int]:
    """The dimensions of more than one entry, the outermost first."""
    return sorted((n for n in range(x.dim()) if x.shape[n] > 1), key=lambda n: -x.stride(n))


def same_order(q: Tensor, out: Tensor) -> bool:
    """Whether out is dense, and its dimensions lie as those of q do. An expanded dimension of q
    lies nowhere, so its place is open."""
    if 0 in out.shape:
        return True
    order = outer_first(out)
    step = 1
    for n in reversed(order):
        if out.stride(n) != step:
            return False
        step *= out.shape[n]
    lies = [n for n in outer_first(q) if q.stride(n) and out.shape[n] > 1]
    return [n for n in order if n in lies] == lies
