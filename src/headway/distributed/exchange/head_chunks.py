"""The sizes of head chunks: how many key/value heads are exchanged at a time.

The keys of one chunk travel while the kernel of the chunk before runs. Nothing hides the first
chunk's keys, and in the backward the last chunk's gradients. But every chunk has a cost of its own,
the host must keep up with the GPU, and a kernel takes at least as long as its longest work tile: of
documents of different lengths, one kernel of few heads takes as long as one of many.

Where the keys of all chunks fit, kernels run in several streams (`streams.py`): the next kernel's
work tiles begin where this one's leave multiprocessors idle.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .plan_inputs import MAX_CHUNK_BYTES, CallSizes, PlanInputs

# Bytes and flops per second that links and GPUs reach (copy engines between four GPUs of one host,
# 10 Gb/s for gloo).
LINK_BANDWIDTH = {"cuda": 250e9, "cpu": 1.2e9}
INTER_NODE_BANDWIDTH = {"cuda": 45e9, "cpu": 1.2e9}  # per GPU: 400 Gb/s
_FLOPS = {"cuda": 600e12, "cpu": 50e9}
EXCHANGE_LATENCY = {"cuda": 30e-6, "cpu": 300e-6}  # seconds until an exchange has begun
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


def kernel_seconds(sizes: CallSizes, pairs: float, device: str, backward: bool) -> float:
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


def headwise_seconds(
    inputs: PlanInputs, chunks: Sequence[int], backward: bool, bandwidth: float
) -> float:
    """Return the seconds of a call, or of its backward, in chunks of so many key/value heads, the
    host's time included."""
    times = _head_times(inputs, backward, bandwidth, inputs.kv_tokens_read)
    return _split_seconds(inputs, chunks, backward, times)


def host_seconds(chunks: int, backward: bool, device: str) -> float:
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
        longest = kernel_seconds(sizes, pairs, device, backward) / (sizes.b * sizes.hq)
    return _HeadTimes(
        kernel_seconds(sizes, float(inputs.rank_pairs.max()), device, backward) / sizes.hk,
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
            overhead = EXCHANGE_LATENCY.get(device, 1e-4)
        gpu = _seconds_in_one_stream(chunks, times, overhead)
    return max(gpu, host_seconds(len(chunks), backward, device))


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
