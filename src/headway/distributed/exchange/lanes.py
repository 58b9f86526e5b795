"""Streams for the kernels of steps, in turns.

A kernel's last work tiles leave multiprocessors idle, and in one stream the next kernel waits for
the very last. In another one its CTAs take them as they become free.

What is made in a lane is used in the caller's stream when that has waited for the lane; and before
a lane is used again it waits for the caller's, so that memory that was freed in between is given to
nobody too early.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

_COUNT = 2


class Lanes:
    """Lanes of a card for one call; without any, everything is in the caller's stream. When they
    are left, the caller's stream waits for all of them."""

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self.streams = _streams(device) if wanted else []
        self.kept: list[object] = []

    def __enter__(self) -> "Lanes":
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self.kept.clear()

    def keep(self, *read: object) -> None:
        """Memory of the caller's stream, until that has waited for the lanes that read it."""
        if self.streams:
            self.kept += read

    def of(self, step: int) -> AbstractContextManager:
        """Inside, a step's lane is the current stream."""
        if not self.streams:
            return nullcontext()
        return torch.cuda.stream(self.streams[step % len(self.streams)])


@lru_cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(_COUNT)]
