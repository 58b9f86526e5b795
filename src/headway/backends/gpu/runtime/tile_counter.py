"""The counter from which the CTAs of a persistent kernel take tickets: dynamic scheduling."""

from functools import lru_cache

import torch
from torch import Tensor

from ..counters import FIRST_FLAG, FLAGS

_counters: dict[tuple[int, int], Tensor] = {}  # by device and stream
_STREAMS = 1024
_SIZE = FIRST_FLAG + FLAGS


def zeroed_counter(device: torch.device) -> Tensor:
    """Return a counter and flags, int32 zeros, for a kernel that leaves them at 0. All launches of
    a stream share one, since they follow one another. A CUDA graph has its own, because it may be
    replayed in any stream."""
    index, cuda = device.index, torch._C
    if index is None or index != cuda._cuda_getDevice() or cuda._cuda_isCurrentStreamCapturing():
        return torch.zeros(_SIZE, dtype=torch.int32, device=device)
    key = index, cuda._cuda_getCurrentRawStream(index)
    counter = _counters.get(key)
    if counter is None:
        try:  # another thread may take the last one
            counter = _counters[key] = _unused_counters(device).pop()
        except IndexError:
            return torch.zeros(_SIZE, dtype=torch.int32, device=device)
    return counter


@lru_cache
def _unused_counters(device: torch.device) -> list[Tensor]:
    """Return counters for many streams. They are allocated together, in the self-test of a GPU: a
    stream may make its first launch where no allocation may stay."""
    with torch.inference_mode(False):
        counters = torch.zeros(_STREAMS, _SIZE, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # other streams will use them too
    return list(counters)
