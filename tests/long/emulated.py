"""The whole table, compiled for each GPU and run on the CPU: an hour of `make test-long`."""

from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from cases import CASES, problem
from checks import check, compare, run
from headway.backends import hopper, triton
from headway.backends.gpu.inference import plan
from headway.backends.hopper.fwd import stream_k
from headway.errors import BackendRefused
from inference import gpu_kernel as inference
from positions import scattered
from tools.emulator.launch import TARGETS, emulating
from tools.emulator.values import Fault

HALF = [case for case in CASES if "half" in case.tags]


@contextmanager
def known():
    """What the emulator does not know: sines of large numbers, for which threads of a warp part."""
    try:
        yield
    except Fault as fault:
        if "not known here" not in str(fault):
            raise
        pytest.skip(str(fault))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", HALF, ids=str)
def test_triton(case, target):
    with known(), emulating(target, triton):
        check(case, "triton", torch.bfloat16)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_float32(case):
    with known(), emulating("sm_90", triton):
        check(case, "triton", torch.float32)


@pytest.mark.parametrize("case", [case for case in CASES if case.mask is None], ids=str)
def test_hopper_shares(case, monkeypatch):
    """Ranks are shared out wherever they do not fill a round of five CTAs."""
    monkeypatch.setattr(stream_k, "MIN_SAVED_BLOCKS", 1)
    with mock.patch("tools.emulator.launch.PROCESSORS", 5):
        test_hopper(case)


@pytest.mark.parametrize("backend", [triton, hopper], ids=lambda backend: backend.name)
@pytest.mark.parametrize("case", HALF, ids=str)
def test_positions_one_by_one(case, backend):
    with known(), emulating("sm_90", backend):
        try:
            made = scattered(case, torch.bfloat16, backend.name, per_batch=True)
        except BackendRefused:
            pytest.skip("not what this backend does")
    assert compare(case, torch.bfloat16, made, True) == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_hopper(case):
    with known(), emulating("sm_90", hopper):
        try:
            made = run(problem(case, torch.bfloat16), "hopper", True)
        except BackendRefused:
            pytest.skip("not what this backend does")
    assert compare(case, torch.bfloat16, made, True) == []


# Without a scale of 0: the largest of zeros of both signs is one or the other, and the emulator
# takes two threads that say so differently for a fault. (Triton's interpreter runs it.)
INFERENCE = [
    partial(inference.masks_and_scores, some=slice(6)), inference.block_masks, inference.strides,
    inference.packed, inference.float8, inference.lengths_change, inference.placement,
    *[partial(inference.groups, n) for n in (1, 5, 7, 8, 20)],
    *[partial(inference.latent, n) for n in (3, 16, 40)],
]  # fmt: skip


def named(case) -> str:
    """A name that is the same in every process."""
    if isinstance(case, partial):
        return "-".join([case.func.__name__, *map(str, (*case.args, *case.keywords))])
    return case.__name__


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("processors", [1, 7])
@pytest.mark.parametrize("case", INFERENCE, ids=named)
def test_inference(case, processors, target):
    with emulating(target, triton), mock.patch.object(plan, "processors", return_value=processors):
        assert case(dtype=torch.bfloat16) < 0.01


@pytest.mark.parametrize(("precision", "bound"), [("highest", 1e-5), ("high", 3e-3)])
@pytest.mark.parametrize("case", INFERENCE, ids=named)
def test_inference_float32(case, precision, bound):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        with emulating("sm_90", triton):
            assert case(dtype=torch.float32) < bound
    finally:
        torch.set_float32_matmul_precision(before)
