"""The counter from which the CTAs of a persistent kernel fetch tickets: dynamic scheduling."""

from functools import lru_cache

import torch
from torch import Tensor

from ..counters import FIRST_FLAG, FLAGS

_zeros: dict[tuple[int, int], Tensor] = {}  # by device and stream
_STREAMS = 1024
_COUNT = FIRST_FLAG + FLAGS


def zeroed_counter(device: torch.device) -> Tensor:
    """A counter and flags, int32 zeros, for a kernel that leaves them at 0. All launches of a
    stream share one, since they follow one another. A CUDA graph has its own, because it may be
    replayed in any stream."""
    index, cuda = device.index, torch._C
    if index is None or index != cuda._cuda_getDevice() or cuda._cuda_isCurrentStreamCapturing():
        return torch.zeros(_COUNT, dtype=torch.int32, device=device)
    key = index, cuda._cuda_getCurrentRawStream(index)
    found = _zeros.get(key)
    if found is None:
        try:  # another thread may take the last one
            found = _zeros[key] = _free(device).pop()
        except IndexError:
            return torch.zeros(_COUNT, dtype=torch.int32, device=device)
    return found


@lru_cache
def _free(device: torch.device) -> list[Tensor]:
    """Counters for many streams. They are allocated at once, and early (when the first use of a
    card is checked): a stream may make its first launch where nothing allocated may stay."""
    with torch.inference_mode(False):
        found = torch.zeros(_STREAMS, _COUNT, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # other streams will use them too
    return list(found)
