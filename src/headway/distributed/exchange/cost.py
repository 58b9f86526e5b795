"""What a plan costs: bytes, and a guess of the time, by which "auto" chooses.

A plan that runs in steps takes what `steps.py` says of the steps that it would run in. Times are of
the rank that has most to do, forward and backward together, since a call has one plan for both.
They tell plans apart where these differ much; name a plan where you have measured.
"""

from typing import NamedTuple

import numpy as np

from .nodes import Node, only
from .setting import Setting, Sizes
from .steps import BETWEEN, EXCHANGE, LINK, away, heads_of_steps, host, kernels, one_step, seconds

# Bytes in a second: of a card's memory, and of an all-to-all with the copies before and behind it
# (two H100s and H200s: some 90e9, four: 180e9).
_MEMORY = {"cuda": 3e12, "cpu": 5e9}
_ALL_TO_ALL = {"cuda": 100e9, "cpu": 1.2e9}
_MERGE = 16, 6  # how often a merge of a ring reads or writes results, forward and backward
_DIRECTIONS = False, True  # forward, backward


class Cost(NamedTuple):
    """Bytes that the busiest rank is sent in the forward; seconds of forward and backward."""

    received: int
    seconds: float


def costs(setting: Setting, node: Node | None) -> dict[str, Cost]:
    """Every plan's; with a node also that of two dimensions, and all others then cross nodes."""
    s, device = setting.sizes, setting.device.type
    q, kv, ranks = setting.q.sizes, setting.kv.sizes, setting.q.ranks
    inside, between = LINK.get(device, 200e9), BETWEEN.get(device, 40e9)
    size = ranks if node is None else node.q.ranks
    others = (ranks - size) / max(1, ranks - 1)  # of the other ranks, those of other nodes
    link = 1 / ((1 - others) / inside + others / between)
    apart = _ALL_TO_ALL.get(device, 100e9)
    over_all = 1 / ((1 - others) / apart + others / between)
    row = s.hk * setting.bytes_of_token
    most = away(setting.needed, kv) * row
    everything = [int(kv.sum())] * ranks
    _, _, over = _all_to_all(s, q, kv, ranks)
    found = {
        "heads": Cost(most, _in_steps(setting, inside, link)),
        "gather": Cost(
            int(kv.sum() - kv.min()) * row,
            sum(seconds(setting, [s.hk], back, link, everything) for back in _DIRECTIONS),
        ),
        "ring": Cost(most, sum(_ring(setting, back, most / link) for back in _DIRECTIONS)),
        "ulysses": Cost(over, sum(_ulysses(setting, back, over_all) for back in _DIRECTIONS)),
    }
    if node is not None:
        of_node = node.setting
        heads, of_kv, over = _all_to_all(s, q, kv, size)
        part = only(of_node, range(heads), range(of_kv))
        sent = away(of_node.needed, of_node.kv.sizes) * of_kv * setting.bytes_of_token
        moved = sum(_exchanges(s, over, back, apart, device) for back in _DIRECTIONS)
        took = _in_steps(part, between, between) + moved
        found["ulysses*heads"] = Cost(over + sent, took)
    return found


def cheapest(setting: Setting, node: Node | None, own_tiles: bool) -> str:
    """The plan that takes least time; "heads", unless another is a tenth faster."""
    found = costs(setting, node)
    if own_tiles:
        del found["ring"]
    best = min(found, key=lambda name: found[name].seconds)
    return best if found[best].seconds < 0.9 * found["heads"].seconds else "heads"


def _in_steps(setting: Setting, planned: float, link: float) -> float:
    """Of the steps that are planned for one link, over another."""
    return sum(
        seconds(setting, heads_of_steps(setting, back, planned), back, link, setting.needed)
        for back in _DIRECTIONS
    )


def _ring(setting: Setting, backward: bool, wire: float) -> float:
    """A kernel for every source of keys, and a merge of the results behind all but the first."""
    s, device, ranks = setting.sizes, setting.device.type, setting.q.ranks
    results = 4 * s.b * s.hq * int(setting.q.sizes.max()) * (s.d if backward else s.dv)
    merging = (ranks - 1) * _MERGE[backward] * results / _MEMORY.get(device, 1e12)
    wire *= 1 + 4 / s.itemsize if backward else 1
    compute = kernels(s, float(setting.work.max()), device, backward)
    took = max(compute, wire) + merging + ranks * one_step(backward, device)
    return max(took, host(ranks, backward, device))


def _ulysses(setting: Setting, backward: bool, link: float) -> float:
    """All tokens of some heads, of which ranks have as many pairs, and the exchanges."""
    s, device, ranks = setting.sizes, setting.device.type, setting.q.ranks
    heads, _, over = _all_to_all(s, setting.q.sizes, setting.kv.sizes, ranks)
    pairs = float(setting.work.mean()) * ranks * heads / s.hq
    took = kernels(s, pairs, device, backward) + _exchanges(s, over, backward, link, device)
    return max(took, host(3, backward, device))


def _exchanges(s: Sizes, over: int, backward: bool, link: float, device: str) -> float:
    """All-to-alls: a backward's are those of the forward, with the gradient of out for out, and
    those of gradients in the accumulation dtype."""
    sent = over + over * 4 // s.itemsize if backward else over
    return sent / link + 3 * EXCHANGE.get(device, 1e-4)


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
