"""CUDA streams for the kernels of consecutive head chunks.

The last work tiles of a kernel leave multiprocessors idle, and in one stream the next kernel waits
for the very last of them. In another stream its CTAs start as multiprocessors become free. On
two H200s, causal 16k, this cut the time without a kernel from 6.0 to 1.0 % of a forward and from
6.7 to 2.5 % of a backward (docs/lab/ranks.md).

The caller's stream waits for a pool before it uses results, and a pool waits for the caller's
stream before it starts: memory that was freed in between is not reused too early.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

_COUNT = 2


class StreamPool:
    """The streams of one call; none where `enabled` is False: then all runs in the caller's stream.
    On exit the caller's stream waits for all of them."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.streams = _streams(device) if enabled else []
        self.kept_alive: list[object] = []

    def __enter__(self) -> "StreamPool":
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self.kept_alive.clear()

    def keep(self, *objects: object) -> None:
        """Keep memory of the caller's stream alive until that has waited for the pool's streams,
        which read it."""
        if self.streams:
            self.kept_alive += objects

    def stream(self, chunk: int) -> AbstractContextManager:
        """Return a context in which the stream of a chunk is the current one."""
        if not self.streams:
            return nullcontext()
        return torch.cuda.stream(self.streams[chunk % len(self.streams)])


@lru_cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(_COUNT)]
