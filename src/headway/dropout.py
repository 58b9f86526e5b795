"""Counter-based dropout: the same pairs drop in forward and backward, on every backend and shard.

Philox-4x32 with 7 rounds (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3, SC'11)
turns a counter into four 32-bit words. The layout, pinned by golden vectors in the tests:

    key     = (seed mod 2^32, seed / 2^32)
    counter = (j / 4, i, h, b)        global positions, query head and batch index
    word    = j mod 4

A pair is kept where its word is at least p * 2^32.
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
    """Return the number below which a word drops its pair."""
    return round(p * 2**32)


def keep(p: float, seed: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return which pairs survive dropout with probability `p`, bool, of the shape of the
    positions."""
    seed = seed.to(torch.int64)
    key = (seed & _LOW, seed >> 32 & _LOW)
    rest = (q_idx & _LOW, h & _LOW, b & _LOW)
    if kv_idx.numel() == kv_idx.shape[-1]:
        # One counter serves four keys: compute each once, then pick the words.
        groups, which = torch.unique(kv_idx.flatten() >> 2, return_inverse=True)
        words = philox(torch.broadcast_tensors(groups & _LOW, *rest), key)
        columns = which * 4 + (kv_idx.flatten() & 3)
        return torch.stack(words, dim=-1).flatten(-2)[..., columns] >= threshold(p)
    words = philox(torch.broadcast_tensors(kv_idx >> 2 & _LOW, *rest), key)
    word_index = (kv_idx & 3).expand_as(words[0])[..., None]
    return torch.stack(words, dim=-1).gather(-1, word_index)[..., 0] >= threshold(p)
