"""Stand-ins of serving engines: steps with prefill, decode and padding, over their own caches."""

import pytest
import torch

import headway as hw

from .engines import ENGINES, WINDOWS


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_steps(backend, engine, window):
    mask, width = WINDOWS[window]
    serving = ENGINES[engine]("cpu", torch.float32, width)
    for seed in range(4):
        serving.draw(seed)
        made = serving.step(mask, backend=backend)
        torch.testing.assert_close(made.double(), serving.expected(), atol=1e-5, rtol=1e-5)


def test_padding_alone():
    """A step in which no request is left, as engines run to warm up: nothing is written."""
    serving = ENGINES["vLLM"]("cpu", torch.float32)
    serving.draw(0)
    for buffer, number in ((serving.lengths, 0), (serving.cu_q, 0), (serving.slots, -1)):
        buffer.fill_(number)
    before = serving.kv_cache.clone()
    assert not serving.step(hw.causal()).any()
    torch.testing.assert_close(serving.kv_cache, before, equal_nan=True, atol=0, rtol=0)
