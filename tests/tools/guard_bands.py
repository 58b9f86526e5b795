"""Guard bands: what the backend allocates lies between two bands that nobody may write to."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch

from headway.backends.gpu import captured_grads
from headway.backends.triton import launch

BAND = 256  # numbers before and after: a kernel that is one row or one tile off hits them
MARK = 1234.0


@contextmanager
def guarded() -> Iterator[None]:
    """Inside, outputs of the backend are poisoned with NaN and lie between bands; at the end an
    AssertionError if a band was written to."""
    made: list[torch.Tensor] = []

    def allocate(shape, fill, dtype, device):
        size = torch.Size(shape).numel()
        whole = torch.full((size + 2 * BAND,), MARK, dtype=dtype, device=device)
        made.append(whole)
        return whole[BAND : BAND + size].fill_(fill).view(shape)

    def empty(*shape, dtype, device):
        return allocate(shape, float("nan"), dtype, device)

    def zeros(shape, *, dtype, device):
        return allocate(shape, 0.0, dtype, device)

    names = {name: getattr(torch, name) for name in dir(torch)}
    fake = SimpleNamespace(**names | {"empty": empty, "zeros": zeros})
    with mock.patch.object(launch, "torch", fake), mock.patch.object(captured_grads, "torch", fake):
        yield
    for whole in made:
        for band in (whole[:BAND], whole[-BAND:]):
            assert (band == MARK).all(), "a kernel wrote outside of its output"
    assert made, "nothing was allocated where guards are"
