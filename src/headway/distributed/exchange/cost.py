"""The cost model of plans: bytes and estimated seconds, by which "auto" chooses.

A headwise plan takes what `head_chunks.py` says of the chunks that it would run in. Times are those
of the busiest rank, forward and backward together, since a call has one plan for both. The
estimates tell plans apart where these differ much; name a plan where you have measured.
"""

from typing import NamedTuple

import numpy as np

from .head_chunks import (
    EXCHANGE_LATENCY,
    INTER_NODE_BANDWIDTH,
    LINK_BANDWIDTH,
    chunk_heads,
    headwise_seconds,
    host_seconds,
    kernel_seconds,
    most_received,
)
from .nodes import LocalNode, select_heads
from .plan_inputs import CallSizes, PlanInputs

# Bytes per second of an all-to-all with the copies before and behind it (two H100s and H200s: some
# 90e9, four: 180e9).
_ALL_TO_ALL_BANDWIDTH = {"cuda": 100e9, "cpu": 1.2e9}
_DIRECTIONS = False, True  # forward, backward


class Cost(NamedTuple):
    """Bytes that the busiest rank receives in the forward; seconds of forward and backward."""

    received: int
    seconds: float


class _AllToAll(NamedTuple):
    """Query and key/value heads of a rank after an all-to-all, and the bytes that it receives:
    queries, keys, values and results."""

    q_heads: int
    kv_heads: int
    received: int


def costs(inputs: PlanInputs, node: LocalNode | None) -> dict[str, Cost]:
    """Return the cost of every plan. With a node, "ulysses*heads" is one of them, and the others
    are charged for crossing nodes."""
    sizes, device = inputs.sizes, inputs.device.type
    q_sizes, kv_sizes, ranks = inputs.q.sizes, inputs.kv.sizes, inputs.q.ranks
    intra_node = LINK_BANDWIDTH.get(device, 200e9)
    inter_node = INTER_NODE_BANDWIDTH.get(device, 40e9)
    all_to_all_bandwidth = _ALL_TO_ALL_BANDWIDTH.get(device, 100e9)
    node_size = ranks if node is None else node.q.ranks
    remote = (ranks - node_size) / max(1, ranks - 1)  # share of the peers that are on other nodes
    bandwidth = 1 / ((1 - remote) / intra_node + remote / inter_node)
    over_all_ranks = 1 / ((1 - remote) / all_to_all_bandwidth + remote / inter_node)
    kv_row = sizes.hk * inputs.kv_bytes_per_token
    received = most_received(inputs.kv_tokens_read, kv_sizes) * kv_row
    one_chunk = sum(headwise_seconds(inputs, [sizes.hk], back, bandwidth) for back in _DIRECTIONS)
    ulysses = sum(_ulysses_seconds(inputs, back, over_all_ranks) for back in _DIRECTIONS)
    by_plan = {
        "heads": Cost(received, _chunked_seconds(inputs, intra_node, bandwidth)),
        "gather": Cost(received, one_chunk),
        "ulysses": Cost(_all_to_all(sizes, q_sizes, kv_sizes, ranks).received, ulysses),
    }
    if node is not None:
        exchange = _all_to_all(sizes, q_sizes, kv_sizes, node_size)
        part = select_heads(node.inputs, range(exchange.q_heads), range(exchange.kv_heads))
        tokens = most_received(node.inputs.kv_tokens_read, node.inputs.kv.sizes)
        between = tokens * exchange.kv_heads * inputs.kv_bytes_per_token
        inside = sum(
            _all_to_all_seconds(sizes, exchange.received, back, all_to_all_bandwidth, device)
            for back in _DIRECTIONS
        )
        seconds = _chunked_seconds(part, inter_node, inter_node) + inside
        by_plan["ulysses*heads"] = Cost(exchange.received + between, seconds)
    return by_plan


def cheapest(inputs: PlanInputs, node: LocalNode | None) -> str:
    """Return the name of the fastest plan: "heads", unless another is a tenth faster."""
    by_plan = costs(inputs, node)
    fastest = min(by_plan, key=lambda name: by_plan[name].seconds)
    return fastest if by_plan[fastest].seconds < 0.9 * by_plan["heads"].seconds else "heads"


def _chunked_seconds(inputs: PlanInputs, planned_bandwidth: float, bandwidth: float) -> float:
    """Return the seconds of the chunks that are planned for one bandwidth, at another."""
    return sum(
        headwise_seconds(inputs, chunk_heads(inputs, back, planned_bandwidth), back, bandwidth)
        for back in _DIRECTIONS
    )


def _ulysses_seconds(inputs: PlanInputs, backward: bool, bandwidth: float) -> float:
    """Return the seconds of all tokens of some heads and of the all-to-alls. Every rank then has as
    many pairs."""
    sizes, device, ranks = inputs.sizes, inputs.device.type, inputs.q.ranks
    exchange = _all_to_all(sizes, inputs.q.sizes, inputs.kv.sizes, ranks)
    pairs = float(inputs.rank_pairs.mean()) * ranks * exchange.q_heads / sizes.hq
    seconds = kernel_seconds(sizes, pairs, device, backward)
    seconds += _all_to_all_seconds(sizes, exchange.received, backward, bandwidth, device)
    return max(seconds, host_seconds(3, backward, device))


def _all_to_all_seconds(
    sizes: CallSizes, received: int, backward: bool, bandwidth: float, device: str
) -> float:
    """Return the seconds of the all-to-alls. A backward repeats those of the forward, with the
    gradient of out for out, and adds those of gradients in the accumulation dtype."""
    moved = received + received * 4 // sizes.itemsize if backward else received
    return moved / bandwidth + 3 * EXCHANGE_LATENCY.get(device, 1e-4)


def _all_to_all(
    sizes: CallSizes, q_sizes: np.ndarray, kv_sizes: np.ndarray, node_size: int
) -> _AllToAll:
    """Return what a rank of a node of so many ranks has after an all-to-all inside of it."""
    q_heads = -(-sizes.hq // node_size)
    kv_token = sizes.b * (sizes.d + sizes.dv) * sizes.itemsize
    kv_heads = -(-q_heads // max(1, sizes.hq // sizes.hk))
    uneven = sizes.hk % node_size != 0 and sizes.hk > node_size
    kv_heads = min(sizes.hk, kv_heads + int(uneven))
    q_remote, kv_remote = (
        int((tokens.sum(1) - tokens.min(1)).max())
        for tokens in (q_sizes.reshape(-1, node_size), kv_sizes.reshape(-1, node_size))
    )
    q_bytes = q_remote * sizes.b * q_heads * sizes.d * sizes.itemsize
    result_heads = sizes.hq - q_heads
    out_bytes = int(q_sizes.max()) * result_heads * sizes.b * sizes.dv * sizes.itemsize
    return _AllToAll(q_heads, kv_heads, q_bytes + kv_remote * kv_heads * kv_token + out_bytes)
