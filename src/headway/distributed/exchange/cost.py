"""The cost model: estimated seconds, by which "auto" chooses a plan, and the sizes of head chunks.

Times are those of the busiest rank, forward and backward together, since a call has one plan for
both. The estimates tell plans apart where these differ much; name a plan where you have measured.

A headwise plan exchanges some key/value heads at a time: the keys of one chunk travel while the
kernel of the chunk before runs. Nothing hides the first chunk's keys, and in the backward the last
chunk's gradients. But every chunk has a cost of its own, the host must keep up with the GPU, and a
kernel takes at least as long as its longest work tile: of documents of different lengths, one
kernel of few heads takes as long as one of many. Where the keys of all chunks fit, kernels run in
several streams (`streams.py`): the next kernel's work tiles begin where this one's leave
multiprocessors idle.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .nodes import LocalNode, select_heads
from .plan_inputs import MAX_CHUNK_BYTES, CallSizes, PlanInputs

# Bytes and flops per second that links and GPUs reach (copy engines between four GPUs of one host,
# 10 Gb/s for gloo).
LINK_BANDWIDTH = {"cuda": 250e9, "cpu": 1.2e9}
INTER_NODE_BANDWIDTH = {"cuda": 45e9, "cpu": 1.2e9}  # per GPU: 400 Gb/s
_FLOPS = {"cuda": 600e12, "cpu": 50e9}
_EXCHANGE_LATENCY = {"cuda": 30e-6, "cpu": 300e-6}  # seconds until an exchange has begun
# Seconds in the forward and in the backward, measured on two and four H100s and H200s: the GPU's
# cost of a chunk, in one stream and in several; and the host's cost of a call and of each chunk.
_CHUNK_OVERHEAD = 150e-6, 250e-6
_CHUNK_OVERHEAD_IN_STREAMS = 15e-6, 60e-6
# Of its longest work tile, a chunk in several streams takes this share longer: fewer heads fill a
# GPU.
_TAIL_SHARE = 0.2
_HOST_CALL_AND_CHUNK = (0.2e-3, 0.65e-3), (0.4e-3, 1.0e-3)
_MULTIPROCESSORS = 132  # of a GPU as fast as `_FLOPS`; not this one's, since all ranks choose alike
_BACKWARD_COST = 2.5  # in forwards
# Sizes of a small first or last chunk. In a backward of one head all CTAs add to the dQ of few
# heads, so there it has two.
_SMALLEST_END, _LARGEST_END = (1, 2), 4
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
    one_chunk = sum(_headwise_seconds(inputs, [sizes.hk], back, bandwidth) for back in _DIRECTIONS)
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
        _headwise_seconds(inputs, chunk_heads(inputs, back, planned_bandwidth), back, bandwidth)
        for back in _DIRECTIONS
    )


def _ulysses_seconds(inputs: PlanInputs, backward: bool, bandwidth: float) -> float:
    """Return the seconds of all tokens of some heads and of the all-to-alls. Every rank then has as
    many pairs."""
    sizes, device, ranks = inputs.sizes, inputs.device.type, inputs.q.ranks
    exchange = _all_to_all(sizes, inputs.q.sizes, inputs.kv.sizes, ranks)
    pairs = float(inputs.rank_pairs.mean()) * ranks * exchange.q_heads / sizes.hq
    seconds = _kernel_seconds(sizes, pairs, device, backward)
    seconds += _all_to_all_seconds(sizes, exchange.received, backward, bandwidth, device)
    return max(seconds, _host_seconds(3, backward, device))


def _all_to_all_seconds(
    sizes: CallSizes, received: int, backward: bool, bandwidth: float, device: str
) -> float:
    """Return the seconds of the all-to-alls. A backward repeats those of the forward, with the
    gradient of out for out, and adds those of gradients in the accumulation dtype."""
    moved = received + received * 4 // sizes.itemsize if backward else received
    return moved / bandwidth + 3 * _EXCHANGE_LATENCY.get(device, 1e-4)


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


# -- head chunks -----------------------------------------------------------------------------------


class _HeadTimes(NamedTuple):
    """Seconds of one key/value head.

    - `kernel`: of its kernel; `longest`: of that kernel's longest work tile.
    - `keys`, `gradients`: of their exchange; gradients are 0 in the forward.
    """

    kernel: float
    longest: float
    keys: float
    gradients: float


def most_received(tokens_read: Sequence[int], tokens_held: np.ndarray) -> int:
    """Return how many remote tokens the rank that receives most of them receives."""
    pairs = zip(tokens_read, tokens_held.tolist(), strict=True)
    return max(read - min(read, held) for read, held in pairs)


def _kernel_seconds(sizes: CallSizes, pairs: float, device: str, backward: bool) -> float:
    """Return the seconds of a call's kernels for so many pairs per head."""
    cost = _BACKWARD_COST if backward else 1.0
    flops = 2.0 * sizes.b * sizes.hq * (sizes.d + sizes.dv) * pairs * cost
    return flops / _FLOPS.get(device, 1e14)


def chunk_heads(inputs: PlanInputs, backward: bool, bandwidth: float) -> list[int]:
    """Return the key/value heads of every chunk: the fastest split, or on the CPU one head each."""
    heads = inputs.sizes.hk
    if inputs.device.type != "cuda":
        return [1] * heads
    head_bytes = max(inputs.kv_tokens_read) * inputs.kv_bytes_per_token
    most = max(1, MAX_CHUNK_BYTES // max(1, head_bytes))
    splits = _splits(heads, most, _SMALLEST_END[backward])
    times = _head_times(inputs, backward, bandwidth, inputs.kv_tokens_read)
    return min(splits, key=lambda chunks: _split_seconds(inputs, chunks, backward, times))


def _headwise_seconds(
    inputs: PlanInputs, chunks: Sequence[int], backward: bool, bandwidth: float
) -> float:
    """Return the seconds of a call, or of its backward, in chunks of so many key/value heads, the
    host's time included."""
    times = _head_times(inputs, backward, bandwidth, inputs.kv_tokens_read)
    return _split_seconds(inputs, chunks, backward, times)


def _host_seconds(chunks: int, backward: bool, device: str) -> float:
    """Return the seconds of the host for a call of so many chunks on a GPU."""
    call, chunk = _HOST_CALL_AND_CHUNK[backward]
    return call + chunk * chunks if device == "cuda" else 0.0


def _head_times(
    inputs: PlanInputs, backward: bool, bandwidth: float, tokens_read: Sequence[int]
) -> _HeadTimes:
    sizes, device = inputs.sizes, inputs.device.type
    received = most_received(tokens_read, inputs.kv.sizes)
    exchange = received * inputs.kv_bytes_per_token / bandwidth
    longest = 0.0
    if device == "cuda":
        pairs = inputs.longest_work_tile[backward] * _MULTIPROCESSORS
        longest = _kernel_seconds(sizes, pairs, device, backward) / (sizes.b * sizes.hq)
    return _HeadTimes(
        _kernel_seconds(sizes, float(inputs.rank_pairs.max()), device, backward) / sizes.hk,
        longest,
        exchange,
        4 / sizes.itemsize * exchange if backward else 0.0,
    )


def _split_seconds(
    inputs: PlanInputs, chunks: Sequence[int], backward: bool, times: _HeadTimes
) -> float:
    device = inputs.device.type
    if device == "cuda" and inputs.all_kv_fits:
        overhead = _CHUNK_OVERHEAD_IN_STREAMS[backward] + _TAIL_SHARE * times.longest
        gpu = _seconds_in_streams(chunks, times, overhead)
    else:
        overhead = _CHUNK_OVERHEAD[backward]
        if device != "cuda":
            overhead = _EXCHANGE_LATENCY.get(device, 1e-4)
        gpu = _seconds_in_one_stream(chunks, times, overhead)
    return max(gpu, _host_seconds(len(chunks), backward, device))


def _seconds_in_one_stream(chunks: Sequence[int], times: _HeadTimes, overhead: float) -> float:
    """Simulate a GPU with one stream of kernels and one of copies. A copy begins as early as it
    can: the next chunk's keys when a kernel begins, a chunk's gradients when it has ended."""
    kernel_end = 0.0
    copies_end = keys_ready = times.keys * chunks[0]
    for n, heads in enumerate(chunks):
        kernel_begin = max(kernel_end, keys_ready)
        if n + 1 < len(chunks):
            copies_end = keys_ready = max(copies_end, kernel_begin) + times.keys * chunks[n + 1]
        kernel_end = kernel_begin + max(times.kernel * heads, times.longest) + overhead
        copies_end = max(copies_end, kernel_end) + times.gradients * heads
    return copies_end if times.gradients else kernel_end


def _seconds_in_streams(chunks: Sequence[int], times: _HeadTimes, overhead: float) -> float:
    """Simulate a GPU where all keys are in flight at once, and a kernel begins when those before it
    have no work tiles left to hand out."""
    keys_ready = kernel_begin = kernel_end = copies_end = 0.0
    for heads in chunks:
        keys_ready += times.keys * heads
        kernel_begin = max(kernel_begin, keys_ready)
        duration = max(times.kernel * heads, times.longest)
        kernel_end = max(kernel_end, kernel_begin + duration) + overhead
        copies_end = max(copies_end, kernel_end) + times.gradients * heads
        kernel_begin += times.kernel * heads + overhead
    return copies_end if times.gradients else kernel_end


def _splits(heads: int, most: int, smallest_end: int) -> Iterator[list[int]]:
    """Yield splits of heads into chunks of at most `most`, fewest chunks first. The first and the
    last chunk have `smallest_end` to `_LARGEST_END` heads, or as many as those between."""
    end_sizes = 0, *range(smallest_end, min(_LARGEST_END, most, heads) + 1)
    for first in end_sizes:
        for last in end_sizes:
            between = heads - first - last
            if between >= 0:
                count = -(-between // most)
                cuts = [between * n // count for n in range(count + 1)] if count else [0]
                sizes = [stop - start for start, stop in pairwise(cuts)]
                yield [size for size in (first, *sizes, last) if size]
