"""Calls that are captured visit what they may have to visit when they are replayed."""

import itertools
import random
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import captured
import graphs
import headway as hw
from headway import backends
from headway.backends.hopper.fwd.plan import ForwardPlan
from headway.backends.hopper.launch_plan import plan_for
from headway.resolve import prepare
from long import long_unless
from tools import simulator


@pytest.fixture(autouse=True)
def simulated():
    with simulator.simulating():
        yield


# The simulator loads no positions one by one.
MASKS = [make for make in captured.MASKS if make is not captured.positions]


@pytest.mark.parametrize(
    ("warm", "make"),
    long_unless(
        [(False, captured.padding), *[(n % 2 == 0, make) for n, make in enumerate(MASKS)]],
        itertools.product([True, False], MASKS),
    ),
    ids=lambda x: {True: "known", False: "new"}.get(x) or x.__name__,
)
def test_what_is_written_after_the_capture_counts(warm, make):
    """Whether its plan and its tiles were known before, or are found while it is captured."""
    q, kv = random.choice([(128, 256), (140, 140), (260, 100)])
    of = make(q, kv, "cpu")
    step = captured.Step("hopper", of, q, kv, "cpu", torch.bfloat16, deterministic=warm)
    if warm:
        step()
    with graphs.recording() as graph:
        made = step()
    assert graph.strangers(*of.reads) == []
    step.rewrite()
    graph.replay()
    assert max(step.wrong(made)) < 1
    assert max(step.wrong(step())) < 1  # a call beside it finds its own tiles


def test_every_tile_of_a_captured_call_is_partial():
    """And none is left out but those above the diagonal; not so of a call beside it, nor where a
    mask reads no tensor."""
    q = torch.zeros(2, 2, 512, 16).bfloat16()
    padding = hw.padding(torch.tensor([100, 300]))
    for mask, many in ((padding, 64), (hw.causal() & padding, 36), (hw.causal(), None)):
        spec, call = prepare(q, q, q, None, mask, backend="hopper")

        def live(spec=spec, call=call):
            schedules = plan_for(ForwardPlan, spec, call, (), q, q, q).schedules
            assert schedules.plan.tile == (64, 64)
            schedule = schedules(call)
            return [runs[2] for runs in (schedule.full, schedule.partial)]

        beside = [x.sum() for x in live()]
        with graphs.recording():
            full, partial = live()
        if many is None:
            assert [full.sum(), partial.sum()] == beside
        else:
            assert (full.numel(), partial.sum()) == (0, many)
        assert [x.sum() for x in live()] == beside


def test_block_masks_that_take_turns():
    """CallArguments ones are used as they are; what a plan makes of each is kept for the graph."""
    q = torch.randn(1, 2, 384, 16).bfloat16()
    masks = [hw.causal(), hw.causal() & hw.sliding_window(100), hw.sliding_window(70)]
    given = [hw.block_mask(mask, 1, 1, 384, 384) for mask in masks]

    def step(backend="hopper"):
        made = []
        for mask in given:
            spec, call = prepare(q, q, q, None, mask, backend=backend, deterministic=True)
            run = backends.get(backend)
            out, lse, *_ = run.forward(spec, call)
            made += out, *run.backward(spec, call, out, lse, q, None, ())[:3]
        return made

    with graphs.recording() as graph:
        made = step()
    assert graph.strangers() == []
    q.copy_(torch.randn_like(q))
    graph.replay()
    for x, y in zip(made, step("reference"), strict=True):
        assert (x.float() - y.float()).abs().max() < 0.05


@pytest.mark.parametrize("name", ["relative", "per key"])
def test_what_a_score_captures_counts_too(name):
    """And its gradients: what is read by relative position is laid out by a kernel each time."""
    n = 140
    table = torch.randn(captured.HQ, 2 * n - 1 if name == "relative" else n)
    score = {
        "relative": lambda s, b, h, i, j: s + table[h, i - j + n - 1],
        "per key": lambda s, b, h, i, j: s * 1.1 + table[h, j],
    }[name]
    of = captured.causal_padding(n, n, "cpu")
    step = captured.Step("hopper", of, n, n, "cpu", torch.bfloat16, score)
    with graphs.recording() as graph:
        made = step()
    assert graph.strangers(*of.reads, table) == []
    step.rewrite()
    table.copy_(torch.randn_like(table))
    graph.replay()
    assert max(step.wrong(made)) < 1
