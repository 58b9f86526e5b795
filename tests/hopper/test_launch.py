"""Launching: through Triton the first time, straight to the compiled kernels after that.

The driver is a stand-in for a GPU's: kernels are compiled for it, and launches are written down.
"""

import random
from dataclasses import fields
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

import headway as hw

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from headway import backends
from headway.backends import hopper
from headway.backends.gpu import captured_grads
from headway.backends.gpu.preprocess import BackwardWorkspace
from headway.backends.gpu.runtime import call_plan as plans
from headway.backends.gpu.runtime import parallel_compile, tile_counter
from headway.backends.gpu.runtime.launcher import KernelLauncher
from headway.backends.hopper import launch, launch_plan
from headway.backends.hopper.bwd import segment_table
from headway.backends.hopper.bwd.plan import BackwardPlan
from headway.backends.hopper.device.gluon_compat import TensorDescriptor
from headway.backends.hopper.fwd.plan import ForwardPlan
from headway.backends.hopper.tma import aligned, with_tma_strides
from headway.errors import BackendRefused
from headway.resolve import prepare
from tools import bring_up
from tools.compile_triton import launching
from triton import knobs


@pytest.fixture(scope="module")
def device():
    """The launches so far, as (kernel, arguments); and how many went through Triton."""
    with (
        launching("sm_90") as seen,
        mock.patch.object(backends, "_SELF_TESTED", ()),
        mock.patch.object(hopper, "unavailable", return_value=""),
        mock.patch.object(launch_plan, "processors", return_value=132),
    ):
        yield seen


@pytest.fixture
def uncompiled(device, monkeypatch):
    """Launches are written down, and no kernel is compiled: for tests of which ones there are."""

    def write_down(self, *args, grid, warmup, **options):
        if not warmup:
            device.launches.append((self.__name__, args))

    monkeypatch.setattr(JITFunction, "run", write_down)
    monkeypatch.setattr(parallel_compile, "compile_in_parallel", lambda *of: None)
    plans.clear()
    yield
    plans.clear()


def launches(device, x, **options):
    """Launch a forward and a backward; their launches, and how many went through Triton."""
    device.clear()
    spec, call = prepare(x, x, x, backend="hopper", **options)
    out, lse, *_ = hopper.forward(spec, call)
    hopper.backward(spec, call, out, lse.fill_(0), x, None, ())
    return device.launches[:], device.through_triton


def same(a, b):
    """Equal but for the tensors that a call allocates, which are new."""
    if isinstance(a, TensorDescriptor):
        a, b = ([getattr(d, f.name) for f in fields(d) if f.name != "base"] for d in (a, b))
    return isinstance(a, torch.Tensor) or a is b or a == b


def test_later_launches_go_straight_to_the_kernels_with_the_same_arguments(device):
    x, other = torch.randn(2, 1, 2, 200, 64).bfloat16()
    first, through = launches(device, x, mask=hw.causal())
    again, directly = launches(device, other, mask=hw.causal())
    names = ["forward", "preprocess_kernel", "backward", "postprocess_dq"]
    assert [name for name, _ in first] == [name for name, _ in again] == names
    assert (through, directly) == (4, 0)
    for (_, before), (_, after) in zip(first, again, strict=True):
        assert len(before) == len(after)
        assert all(same(a, b) for a, b in zip(before, after, strict=True))
    # The descriptors are of this call's tensors, and the plan keeps none of them alive.
    assert again[0][1][0].base is other
    for found in plans._plans.values():
        if isinstance(found, ForwardPlan):
            assert not any(hasattr(kind, "base") for kind in found.q.classes)


def test_a_cta_owns_whole_heads_where_they_are_short_and_many(device, uncompiled):
    """With no kernel after; where there are few heads, or a CTA's dQ-accum does not stay in the cache,
    or results are float32, as ever."""
    by_tile = ["forward", "preprocess_kernel", "backward", "postprocess_dq"]
    for (b, length), options, names in (
        ((66, 200), {}, by_tile[:3]),
        ((66, 200), {"deterministic": True}, by_tile[:3]),
        ((66, 200), {"partial": True}, by_tile),
        ((70, 200), {}, by_tile),  # eight heads more than run at once
        ((66, 2000), {}, by_tile),
    ):
        x = torch.zeros(b, 2, length, 64).bfloat16()
        launched, _ = launches(device, x, mask=hw.causal(), **options)
        assert [name for name, _ in launched] == names


def test_a_cta_owns_short_documents(device, uncompiled):
    """Where they begin with tiles, fit, and are many; whatever the length of all."""
    by_tile = ["forward", "preprocess_kernel", "backward", "postprocess_dq"]
    every = torch.arange(4096)
    for heads, ids, names in (
        (4, every // 256, by_tile[:3]),
        (32, torch.stack([every // 256, every // 128]), by_tile[:3]),
        (32, every // 250, by_tile),
        (32, every // 2048, by_tile),  # too long
        (32, (every - 2048).clamp(0) // 128, by_tile),  # one is
        (4, torch.arange(512) // 256, by_tile),  # eight at once
    ):
        x = torch.zeros(2, heads, ids.shape[-1], 128).bfloat16()
        launched, _ = launches(device, x, mask=hw.causal() & hw.document(ids))
        assert [name for name, _ in launched] == names


def test_grids_have_one_axis_whatever_the_sizes(device, monkeypatch):
    """A launch has 2^31 - 1 programs along the first axis, and 65,535 along the others."""
    made, init = [], KernelLauncher.__init__

    def note(self, *given):
        init(self, *given)
        made.append(self)

    monkeypatch.setattr(KernelLauncher, "__init__", note)
    sizes = random.Random(7)
    for _ in range(5):
        heads = 2 ** sizes.randrange(17, 24)
        b = 2 ** sizes.randrange(17)
        h, length = heads // b + sizes.randrange(3), 2 ** sizes.randrange(8) + sizes.randrange(3)
        table = torch.zeros(1).expand(h, 9)
        x = torch.zeros(1, dtype=torch.bfloat16).expand(b, h, length, 8 * sizes.randrange(1, 33))
        score = lambda s, b, h, i, j, t=table: s + t[h, (i - j).clamp(-4, 4) + 4]
        spec, call = prepare(x, x, x, score, backend="hopper")
        launch_plan.plan_for(ForwardPlan, spec, call, (), x, x, x)
        wanted = captured_grads.wanted(spec.score, (True,))
        plan = launch_plan.plan_for(BackwardPlan, spec, call, wanted, x, x, x, x)
        plan.workspace.kernel()
        assert made[-1].grid[0] == b * h * -(-plan.q_rows // 32)
    names = {kernel.fn.__name__ for kernel in made}
    assert {"preprocess_kernel", "fill_bias_table", "collect_bias_grad", "postprocess_dq"} < names
    assert {kernel.grid[1:] for kernel in made} == {(1, 1)}
    plans.clear()


def test_more_programs_than_a_launch_has_are_refused():
    rows = BackwardWorkspace((2**20, 2**11, 1, 8), 1, 0, torch.device("cpu"))
    said = r"takes 2,147,483,648 programs of the kernel preprocess_kernel, .* 2,147,483,647; split"
    with pytest.raises(BackendRefused, match=said):
        rows.kernel()


def test_segments_are_looked_for_once_for_a_mask(device, uncompiled, monkeypatch):
    """Not in every call: the host would wait for the GPU."""
    made = []
    found = segment_table.Segments
    monkeypatch.setattr(
        segment_table, "Segments", lambda *given: made.append(given) or found(*given)
    )
    x = torch.zeros(2, 4, 4096, 128).bfloat16()
    for ids in (torch.arange(4096) // 256, torch.arange(4096) // 128):
        made.clear()
        for _ in range(3):
            launches(device, x, mask=hw.causal() & hw.document(ids))
        assert len(made) == 1


def test_which_consumers_a_call_gets(device):
    """One for short work tiles under a mask, three for long tile rows at width 64, else two; with
    queries in registers where there is room."""
    ids = torch.arange(2048) // 700
    documents, window = hw.causal() & hw.document(ids), hw.causal() & hw.sliding_window(100)
    for width, length, options, wanted in (
        (128, 512, {"mask": hw.causal()}, (1, True)),
        (128, 1024, {"mask": hw.causal()}, (2, False)),
        (128, 2048, {"mask": documents}, (1, True)),
        (128, 2048, {"mask": window}, (2, False)),
        (128, 2048, {}, (2, True)),
        (128, 512, {"mask": hw.causal(), "score": hw.softcap(30.0)}, (2, False)),
        (64, 2048, {"mask": window}, (1, False)),
        (64, 2304, {}, (3, False)),
        (192, 512, {"mask": hw.causal()}, (2, False)),
    ):
        x, v = torch.zeros(1, 2, length, width), torch.zeros(1, 2, length, min(width, 128))
        given = x.bfloat16(), x.bfloat16(), v.bfloat16()
        spec, call = prepare(*given, backend="hopper", **options)
        how = launch_plan.plan_for(ForwardPlan, spec, call, (), *given).kernel.options["CONFIG"]
        assert (how.consumers, how.q_in_registers) == wanted, (width, length, options)


def test_what_tma_cannot_read_is_copied():
    x = torch.randn(2, 3, 50, 72)
    for y in (x, x[..., :68], x.transpose(1, 2)):  # whole rows, steps of 16 bytes
        assert with_tma_strides(*aligned(y)) is y
    odd = torch.randn(x.numel() + 1)[1:].view(x.shape)
    for y in (odd, x[..., 1:], x[..., ::2], x[:, :1].expand(2, 3, 50, 72), x.mT):
        copy = with_tma_strides(*aligned(y))
        assert torch.equal(copy, y)
        assert copy.data_ptr() % 16 == 0
        assert all(step * 4 % 16 == 0 for step in copy.stride()[:3])


def test_a_mask_is_worked_out_again_when_what_it_captures_is_written_to(device):
    x, ids = torch.randn(1, 2, 256, 128).bfloat16(), torch.zeros(256, dtype=torch.int64)
    full = []
    for cut in (256, 128, 128):  # one document, two, and the same two
        if cut == 128 and not ids.any():
            ids[cut:] = 1
        launched, _ = launches(device, x, mask=lambda b, h, i, j: ids[i] == ids[j])
        full += [next(a for a in launched[0][1] if isinstance(a, plans.TileSchedule)).full]
    assert [runs[2].tolist() for runs in full] == [[4] * 4, [2] * 4, [2] * 4]  # of 64 x 64
    assert all(a is b for a, b in zip(full[1], full[2], strict=True))


def test_hooks_of_a_profiler_see_direct_launches(device):
    x = torch.randn(1, 2, 256, 64).bfloat16()
    launches(device, x)
    names = []
    knobs.runtime.launch_enter_hook.add(hook := lambda metadata: names.append(metadata.get()))
    try:
        launched, through = launches(device, x)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert through == 0
    assert [given["name"] for given in names] == [name for name, _ in launched]
    assert len(names) == 4


def test_every_stream_has_a_zero_of_its_own_and_so_has_every_capture():
    card, own = torch.device("cuda", 0), torch.zeros(2, 1, dtype=torch.int32)
    state = {"stream": 7, "capturing": False}
    fakes = {
        "_cuda_getDevice": lambda: 0,
        "_cuda_getCurrentRawStream": lambda index: state["stream"],
        "_cuda_isCurrentStreamCapturing": lambda: state["capturing"],
    }
    with (
        mock.patch.multiple(torch._C, create=True, **fakes),
        mock.patch.object(tile_counter, "_unused_counters", return_value=list(own)),
        mock.patch.object(tile_counter, "_counters", {}),
        mock.patch.object(torch, "zeros", side_effect=lambda *size, **options: object()),
    ):
        first = tile_counter.zeroed_counter(card)
        assert tile_counter.zeroed_counter(card) is first
        state["stream"] = 8
        other = tile_counter.zeroed_counter(card)
        assert {other.data_ptr(), first.data_ptr()} == {row.data_ptr() for row in own}
        state["stream"] = 9  # there are no more
        assert tile_counter.zeroed_counter(card) is not tile_counter.zeroed_counter(card)
        state |= {"stream": 7, "capturing": True}
        assert tile_counter.zeroed_counter(card) is not first
        assert tile_counter.zeroed_counter(card) is not tile_counter.zeroed_counter(card)


@pytest.mark.parametrize("name", [n for n in bring_up.CHECKS if n.startswith("whole")])
def test_checks_of_whole_heads_are_of_whole_heads(device, name):
    """What fits the cache has changed before, and they were of something else."""
    (b, hq, hk, n, m, d, dv), options = bring_up.CHECKS[name]
    sizes = (b, hq, n, d), (b, hk, m, d), (b, hk, m, dv), (b, hq, n, dv)
    q, k, v, dout = (torch.empty(size, dtype=torch.bfloat16) for size in sizes)
    mask = bring_up.mask_of(options.get("mask"), bring_up.CHECKS[name][0], "cpu")
    in_turn = options.get("deterministic", False)
    spec, call = prepare(q, k, v, None, mask, backend="hopper", deterministic=in_turn)
    made = launch_plan.plan_for(BackwardPlan, spec, call, (), q, k, v, dout)
    assert made.with_segments(spec, call, (), (q, k, v, dout)).owned_segments is not None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_too_little_shared_memory_is_said_with_the_way_out(device, direction):
    """A score or a mask may need some of its own: the compiler says how much."""
    x = torch.randn(1, 2, 256, 64).bfloat16()
    spec, call = prepare(x, x, x, backend="hopper", mask=lambda b, h, i, j: i - j > -7)
    out, rows = torch.zeros_like(x), torch.zeros(x.shape[:3])
    step = {
        "forward": lambda: hopper.forward(spec, call),
        "backward": lambda: hopper.backward(spec, call, out, rows, x, None, ()),
    }[direction]
    error = OutOfResources(233092, 232448, "shared memory")
    said = r"d = 64, dv = 64: 233092 bytes of 232448; use backend='triton'"
    with (
        mock.patch.object(JITFunction, "run", side_effect=error),
        mock.patch.object(
            launch, "run_preprocess", lambda workspace, *rest: torch.empty(workspace.size)
        ),
        pytest.raises(BackendRefused, match=said),
    ):
        step()
