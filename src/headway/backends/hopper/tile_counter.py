"""The counter that a persistent kernel's CTAs take ranks from."""

from functools import lru_cache

import torch
from torch import Tensor

_zeros: dict[tuple[int, int], Tensor] = {}  # by device and stream
_STREAMS = 1024
_NUMBERS = 512  # of each: the counter, and from 32 on flags (stream_k.py)


def zeroed_counter(device: torch.device) -> Tensor:
    """A counter and flags that are 0, int32, for a kernel that leaves them at 0: the same for all
    launches of a stream, which follow one another. A CUDA graph, which may be replayed in any
    stream, has its own."""
    index, cuda = device.index, torch._C
    if index is None or index != cuda._cuda_getDevice() or cuda._cuda_isCurrentStreamCapturing():
        return torch.zeros(_NUMBERS, dtype=torch.int32, device=device)
    key = index, cuda._cuda_getCurrentRawStream(index)
    found = _zeros.get(key)
    if found is None:
        try:  # another thread may take the last one
            found = _zeros[key] = _free(device).pop()
        except IndexError:
            return torch.zeros(_NUMBERS, dtype=torch.int32, device=device)
    return found


@lru_cache
def _free(device: torch.device) -> list[Tensor]:
    """Some for each of many streams. They are allocated at once, and early
    (when the first use of a card is checked), since a stream may make its first launch where
    nothing that is allocated may stay."""
    with torch.inference_mode(False):
        found = torch.zeros(_STREAMS, _NUMBERS, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # the numbers are for other streams too
    return list(found)
