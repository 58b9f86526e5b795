"""Counter-based dropout: the same pairs drop in forward and backward, on every backend and shard.

Philox-4x32 with 7 rounds (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3, SC'11)
turns a counter into four 32-bit words, and a word decides two pairs. The layout, pinned by golden
vectors in the tests:

    key     = (seed mod 2^32, seed / 2^32)
    counter = (i without bit 3, j without bits 3 and 0, h, b)    global positions, query head, batch
    word    = 2 (bit 3 of i) + (bit 3 of j)
    half    = bit 0 of j: 0 is the lower one

A pair is kept where the low 15 of its 16 bits are at least `threshold(p)`. (15 bits compare as
half-precision numbers do, two pairs in one instruction.) These eight pairs are what one thread
has of a tensor core's product of queries and keys, two neighbours of each row in one register.
"""

import torch
from torch import Tensor

from .errors import BackendRefused

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
ROUNDS = 7


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four 32-bit words (in int64 tensors) from a four-word counter and a two-word key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The 64-bit products wrap around in int64; their bits, and so both halves, are right.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (p1 >> 32 & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            (p0 >> 32 & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = k0 + _W0 & _LOW, k1 + _W1 & _LOW
    return c0, c1, c2, c3


def draw_seed(device: torch.device) -> Tensor:
    """Return a seed, 0-d int64, from PyTorch's generator of the device."""
    return torch.randint(2**62, (), dtype=torch.int64, device=device)


def seed_not_saved(budget: str) -> BackendRefused:
    """Return the error for a compiled program that saves nothing but its inputs for its
    backward."""
    return BackendRefused(
        f"{budget} is 0, with which the backward of a compiled program draws the seed of the "
        "dropout again: pass seed=, a number or a 0-d int64 tensor, or use a budget above 0"
    )


def threshold(p: float) -> int:
    """Return the number below which 15 bits drop their pair: p in units of 2^-15. Only 0 rounds to
    nothing dropped, and only 1 to nothing kept."""
    return round(p * 2**15) if p in (0, 1) else min(max(round(p * 2**15), 1), 2**15 - 1)


def kept_factor(p: float) -> float:
    """Return what the pairs that are kept are multiplied with. It is 1 / (1 - p) of the rounded p,
    so that the mean over seeds is attention without dropout."""
    return 2**15 / (2**15 - threshold(p)) if p < 1 else 0.0


def keep(p: float, seed: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return which pairs survive dropout with probability `p`, bool, of the shape of the
    positions."""
    seed = seed.to(torch.int64)
    word = q_idx >> 2 & 2 | kv_idx >> 3 & 1
    if q_idx.dim() > 1 and q_idx.numel() == q_idx.shape[-2] and kv_idx.numel() == kv_idx.shape[-1]:
        # One counter serves eight pairs: compute each once, then pick the words.
        rows, row = torch.unique(q_idx.flatten() & ~8, return_inverse=True)
        columns, column = torch.unique(kv_idx.flatten() & ~9, return_inverse=True)
        words = _words(rows[:, None], columns, h, b, seed)
        bits = words[..., row[:, None], column, word.reshape(len(row), len(column))]
    else:
        words = _words(q_idx & ~8, kv_idx & ~9, h, b, seed)
        bits = words.gather(-1, word.expand(words.shape[:-1])[..., None])[..., 0]
    return (bits >> (kv_idx & 1) * 16 & 0x7FFF) >= threshold(p)


def _words(i: Tensor, j: Tensor, h: Tensor, b: Tensor, seed: Tensor) -> Tensor:
    """Return the four words of counters, in a last dimension of their own."""
    counter = torch.broadcast_tensors(*(x & _LOW for x in (i, j, h, b)))
    return torch.stack(philox(counter, (seed & _LOW, seed >> 32 & _LOW)), dim=-1)
