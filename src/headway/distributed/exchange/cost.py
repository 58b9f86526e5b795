"""What a plan costs: bytes, and a guess of the time, by which "auto" chooses.

Times are of the rank that has most to do, from what links and cards reach (NCCL between cards of
one host, 10 Gb/s for gloo). They tell plans apart where these differ much; name a plan where you
have measured.
"""

from typing import NamedTuple

import numpy as np

# Bytes and flops in a second.
LINK = {"cuda": 300e9, "cpu": 1.2e9}
_SPEED = {"cuda": 600e12, "cpu": 50e9}
_EXCHANGE = {"cuda": 30e-6, "cpu": 300e-6}  # seconds until an exchange has begun


class Sizes(NamedTuple):
    """Batch, query and key/value heads, widths, and bytes of a number."""

    b: int
    hq: int
    hk: int
    d: int
    dv: int
    itemsize: int


class Cost(NamedTuple):
    """Of the forward: bytes that the busiest rank is sent, and seconds."""

    received: int
    seconds: float


def away(needed: list[int], held: np.ndarray) -> int:
    """Tokens of others that a rank is sent, the rank that is sent most, of those that each needs
    and holds."""
    return max(n - min(n, own) for n, own in zip(needed, held.tolist(), strict=True))


def seconds(s: Sizes, pairs: float, device: str) -> float:
    """What a forward's kernels take for so many pairs of a head."""
    return 2.0 * s.b * s.hq * (s.d + s.dv) * pairs / _SPEED.get(device, 1e14)


def costs(
    s: Sizes, q: np.ndarray, kv: np.ndarray, needed: list[int], work: np.ndarray, device: str
) -> dict[str, Cost]:
    """Every plan's, of tokens of queries and keys by rank, of keys that every rank needs, and of
    its pairs."""
    ranks, row = len(q), s.b * (s.d + s.dv) * s.itemsize
    link, start = LINK.get(device, 200e9), _EXCHANGE.get(device, 1e-4)
    compute, mean = (seconds(s, float(x), device) for x in (work.max(), work.mean()))
    most = away(needed, kv) * s.hk * row
    all_ = int(kv.sum() - kv.min()) * s.hk * row
    heads = -(-s.hq // ranks)
    of_kv = min(s.hk, -(-heads // max(1, s.hq // s.hk)) + int(s.hk % ranks != 0 and s.hk > ranks))
    over = int(q.sum() - q.min()) * s.b * heads * s.d * s.itemsize
    over += int(kv.sum() - kv.min()) * of_kv * row
    over += int(q.max()) * (s.hq - heads) * s.b * s.dv * s.itemsize
    spread = mean * ranks * heads / s.hq
    wire = most / link
    merging = (
        3.0 * ranks * int(q.max()) * s.b * s.hq * s.dv * 4 / (3e12 if device == "cuda" else 5e9)
    )
    return {
        "heads": Cost(most, max(compute, wire) + wire / s.hk + start * s.hk),
        "gather": Cost(all_, compute + all_ / link + start),
        "ring": Cost(most, max(compute, wire) + merging + start * ranks),
        "ulysses": Cost(over, spread + over / link + 3 * start),
    }


def cheapest(
    s: Sizes,
    q: np.ndarray,
    kv: np.ndarray,
    needed: list[int],
    work: np.ndarray,
    device: str,
    own_tiles: bool,
) -> str:
    """The plan that takes least time; "heads", unless another is a tenth faster."""
    found = costs(s, q, kv, needed, work, device)
    if own_tiles:
        del found["ring"]
    best = min(found, key=lambda name: found[name].seconds)
    return best if found[best].seconds < 0.9 * found["heads"].seconds else "heads"
