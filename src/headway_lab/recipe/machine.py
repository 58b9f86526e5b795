"""The machine that a run is on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headway.errors import ArgumentError


def check_device(device: str) -> None:
    """Raise ArgumentError if there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            f"--device cuda: PyTorch {torch.__version__} sees no CUDA device; use --device cpu, or "
            "look at `headway doctor`"
        )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run the body with this many CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
