"""What a plan costs: bytes, and a guess of the time, by which "auto" chooses.

Times are of the rank that has most to do, from what links and cards reach (copy engines between
four cards of one host, 10 Gb/s for gloo). They tell plans apart where these differ much; name a
plan where you have measured.
"""

from typing import NamedTuple

import numpy as np

# Bytes and flops in a second.
LINK = {"cuda": 250e9, "cpu": 1.2e9}
BETWEEN = {"cuda": 45e9, "cpu": 1.2e9}  # nodes, for every card: 400 Gb/s
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


class Grid(NamedTuple):
    """Of a mesh of two dimensions: the ranks of a node, and by node the tokens of keys that it
    needs, and its pairs."""

    size: int
    needed: list[int]
    work: np.ndarray


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
    s: Sizes, q: np.ndarray, kv: np.ndarray, needed: list[int], work: np.ndarray, device: str,
    grid: Grid | None = None,
) -> dict[str, Cost]:  # fmt: skip
    """Every plan's, of tokens of queries and keys by rank, of keys that every rank needs, and of
    its pairs; with a grid also that of two dimensions, and all others then cross nodes."""
    ranks, row = len(q), s.b * (s.d + s.dv) * s.itemsize
    inside, between = LINK.get(device, 200e9), BETWEEN.get(device, 40e9)
    start = _EXCHANGE.get(device, 1e-4)
    away_ = (ranks - grid.size) / max(1, ranks - 1) if grid else 0.0  # of other ranks
    link = 1 / ((1 - away_) / inside + away_ / between)
    compute, mean = (seconds(s, float(x), device) for x in (work.max(), work.mean()))
    most = away(needed, kv) * s.hk * row
    all_ = int(kv.sum() - kv.min()) * s.hk * row
    heads, _, over = _all_to_all(s, q, kv, ranks)
    spread = mean * ranks * heads / s.hq
    merging = (
        3.0 * ranks * int(q.max()) * s.b * s.hq * s.dv * 4 / (3e12 if device == "cuda" else 5e9)
    )
    wire = most / link
    found = {
        "heads": Cost(most, max(compute, wire) + wire / s.hk + start * s.hk),
        "gather": Cost(all_, compute + all_ / link + start),
        "ring": Cost(most, max(compute, wire) + merging + start * ranks),
        "ulysses": Cost(over, spread + over / link + 3 * start),
    }
    if grid:
        heads, of_kv, over = _all_to_all(s, q, kv, grid.size)
        most = away(grid.needed, _of_nodes(kv, grid.size).sum(1)) * of_kv * row
        wire = most / between
        compute = seconds(s, float(grid.work.max()), device) * heads / s.hq
        took = max(compute, wire) + wire / of_kv + over / inside + start * (of_kv + 3)
        found["ulysses*heads"] = Cost(over + most, took)
    return found


def _all_to_all(s: Sizes, q: np.ndarray, kv: np.ndarray, size: int) -> tuple[int, int, int]:
    """Query heads and key/value heads of a rank whose node has `size`, and bytes that it is sent
    inside of the node: queries, keys and values, and results."""
    heads, row = -(-s.hq // size), s.b * (s.d + s.dv) * s.itemsize
    of_kv = min(s.hk, -(-heads // max(1, s.hq // s.hk)) + int(s.hk % size != 0 and s.hk > size))
    others = [(x.sum(1) - x.min(1)).max() for x in (_of_nodes(q, size), _of_nodes(kv, size))]
    over = int(others[0]) * s.b * heads * s.d * s.itemsize + int(others[1]) * of_kv * row
    return heads, of_kv, over + int(q.max()) * (s.hq - heads) * s.b * s.dv * s.itemsize


def _of_nodes(tokens: np.ndarray, size: int) -> np.ndarray:
    return tokens.reshape(-1, size)


def cheapest(
    s: Sizes, q: np.ndarray, kv: np.ndarray, needed: list[int], work: np.ndarray, device: str,
    grid: Grid | None, own_tiles: bool,
) -> str:  # fmt: skip
    """The plan that takes least time; "heads", unless another is a tenth faster."""
    found = costs(s, q, kv, needed, work, device, grid)
    if own_tiles:
        del found["ring"]
    best = min(found, key=lambda name: found[name].seconds)
    return best if found[best].seconds < 0.9 * found["heads"].seconds else "heads"
