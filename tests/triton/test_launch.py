"""Launching: through Triton the first time, straight to the compiled kernel after that.

The driver is a stand-in for a GPU's: kernels are compiled for it, and launches are written down.
"""

from importlib.util import find_spec

import pytest
import torch

import headway as hw

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from headway.backends import triton as backend
from headway.backends.gpu import captured_grads, inference
from headway.backends.gpu.runtime import call_plan
from headway.backends.triton import plan as backend_plan
from headway.backends.triton.plan import planned
from headway.resolve import prepare
from headway.types import Coords
from tools.compile_triton import launching, lost


@pytest.fixture(scope="module")
def device():
    """The launches so far, as (kernel, arguments); and how many went through Triton."""
    with launching("sm_90") as seen:
        yield seen


@pytest.fixture(autouse=True)
def kernels_of_training(monkeypatch):
    """Small calls that train nothing have another kernel."""
    monkeypatch.setattr(inference, "suits", lambda *of: False)


def forward(device, x, **options):
    """Launch a forward; its arguments, and whether it went through Triton."""
    device.clear()
    backend.forward(*prepare(x, x, x, backend="triton", **options))
    ((_, arguments),) = device.launches
    return arguments, device.through_triton == 1


def rows(length=32, width=16, spare=0):
    return torch.randn(1, 2, length, width + spare, dtype=torch.bfloat16)[..., :width]


def test_the_second_launch_goes_straight_to_the_kernel_with_the_same_arguments(device):
    call_plan.clear()
    x, mask = rows(), hw.causal()
    first, slow = forward(device, x, mask=mask)
    again, through = forward(device, x, mask=mask)
    assert slow
    assert not through
    assert len(first) == len(again)
    for a, b in zip(first, again, strict=True):  # but for the outputs, which are new
        assert isinstance(a, torch.Tensor) or a is b or a == b


@pytest.mark.parametrize(
    "other",
    [
        {"x": rows(33)},
        {"x": rows(spare=16)},
        {"mask": hw.causal(offset=1)},
        {"keys": Coords(q=16)},
        {"scale": 2.0},
        {"row_max": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_kind_of_call_goes_through_triton_once(device, other):
    call_plan.clear()
    options = {"x": rows(), "mask": hw.causal()}
    forward(device, **options)
    assert forward(device, **options | other)[1]
    assert not forward(device, **options | other)[1]
    assert not forward(device, **options)[1]


@pytest.mark.parametrize(
    ("mask", "many"),
    [
        (hw.causal(), False),
        (hw.sliding_window(200), False),
        (hw.causal() & hw.sliding_window(200) | hw.global_tokens(64), False),
        (lambda b, h, i, j: (i // 64 + j // 64) % 2 == 0, True),
        (lambda b, h, i, j: (i // 512 + j // 512) % 2 == 0, False),
    ],
)
def test_many_short_runs_of_full_tiles_are_one_loop(device, mask, many):
    x = torch.randn(1, 1, 1024, 16, dtype=torch.bfloat16)
    hw.attention(x, x, x, mask=mask, backend="triton")
    (made,) = [p for p in call_plan._plans.values() if isinstance(p, backend_plan.Plan)][-1:]
    (kernel,) = made.launchers["forward"].tiled.kernels.values()
    assert kernel.options["SCATTERED"] is many


@pytest.mark.parametrize("name", ["alibi", "relative"])
def test_forward_and_backward_share_a_block_mask(device, name):
    """Whose tiles both choose alike, whatever tiles their kernels take."""
    x = torch.randn(1, 2, 256, 128, dtype=torch.bfloat16)
    slopes, biases = torch.rand(2, requires_grad=True), torch.randn(2, 511, requires_grad=True)
    score = {
        "alibi": lambda s, b, h, i, j: s - slopes[h] * (i - j),
        "relative": lambda s, b, h, i, j: s + biases[h, j - i + 255],
    }[name]
    spec, call = prepare(x, x, x, score, hw.causal(), backend="triton")
    wanted = captured_grads.wanted(spec.score, (True,))
    of_forward, of_backward = (
        planned(spec, call, (), x, x, x),
        planned(spec, call, wanted, *[x] * 4),
    )
    assert of_forward.kind != of_backward.kind
    assert of_forward.tile == of_backward.tile


def test_pointers_that_are_no_multiple_of_16_always_go_through_triton(device):
    """For these Triton compiles other loads."""
    x, values = rows(), torch.randn(33)
    options = {"score": lambda s, b, h, i, j: s + captured[j]}
    captured = values[:32]
    forward(device, x, **options)
    captured = values[1:]
    assert forward(device, x, **options)[1]
    assert forward(device, x, **options)[1]
    captured = values[:32]
    assert not forward(device, x, **options)[1]


@pytest.mark.parametrize(
    "x", [rows(width=13), rows(spare=3), rows().flatten()[1:481].view(1, 2, 15, 16), rows(spare=8)]
)
def test_rows_are_copied_unless_all_loads_may_take_16_bytes(device, x):
    (q, k, *_), _ = forward(device, x)
    assert (q is x) == (x.stride(2) == 24)
    for given in (q, k):
        assert given.data_ptr() % 16 == 0
        assert not any(n % 8 for n in (*given.stride()[:3], given.shape[3]))
        assert torch.equal(given[..., : x.shape[3]], x)
        assert not given[..., x.shape[3] :].any()


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_without_tensor_cores_k_is_transposed(device, precision):
    x = rows(33).float()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        (q, k, v, *_), _ = forward(device, x)
    finally:
        torch.set_float32_matmul_precision(before)
    assert q is x
    assert v is x
    assert torch.equal(k, x)
    assert k.stride()[2:] == ((1, 48) if precision == "highest" else (16, 1))


def test_a_number_may_change_between_direct_launches(device):
    x = rows()
    forward(device, x, score=hw.softcap(30.0))
    arguments, through = forward(device, x, score=hw.softcap(20.0))
    assert not through
    assert any(a == (20.0,) for a in arguments if isinstance(a, tuple))


def test_plans_are_few(device, monkeypatch):
    monkeypatch.setattr(call_plan._plans, "capacity", 3)
    call_plan.clear()
    for length in range(16, 24):
        planned(*prepare(*[rows(length)] * 3, backend="triton"), (), *[rows(length)] * 3)
    assert len(call_plan._plans) == 3


def test_a_backward_goes_by_the_strides_of_what_hooks_of_saved_tensors_hand_back(device):
    x = torch.randn(1, 32, 2, 16, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    plain = lambda t: t.detach().clone(memory_format=torch.contiguous_format)
    for pack in (lambda t: t, lambda t: t, plain, plain):
        device.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = hw.attention(x, x, x, mask=hw.causal(), backend="triton")
        out.backward(torch.ones_like(out))
        (given,) = [given for name, given in device.launches if name == "backward_q"]
        q, strides = given[0], given[11]
        assert q.stride()[:2] == (8 * (strides[0] >> 2), 8 * (strides[1] >> 2))


def test_reads_that_are_taken_for_dead_are_found():
    """Of single numbers; copies that run ahead repeat some, and those of tiles become others."""
    one = "%start = tt.load %at, %there, %zero : !tt.ptr<i32>\n"
    tile = "%k = tt.load %rows : tensor<64x128x!tt.ptr<bf16>, #blocked>\n"
    assert lost(one * 2 + tile, one) == ["1 of 2 reads are gone"]
    assert lost(one * 2 + tile, one * 2) == lost(one * 2, one * 3) == []
