"""FlashAttention-4 in the bench, played by Headway: what it is asked, and what becomes of it."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import headway
from headway_lab.bench import measure, peers, timing
from headway_lab.bench.case import BACKWARD, FORWARD, Case, Target, Unavailable, make_inputs
from headway_lab.bench.cases import GPU_CASES, select
from headway_lab.bench.peers import PEERS
from headway_lab.cli import bench as terminal

NAME = "flash-attention-4"
CASE = Case(
    "four", b=2, hq=4, hk=2, length=150, d=16, dv=8, mask=headway.causal, peers=(NAME,),
    targets=(Target(FORWARD, NAME, 1e-6), Target(BACKWARD, NAME, 1e6)),
)  # fmt: skip
IDS = torch.arange(150) // 40
MASKS = {
    "none": None,
    "causal": headway.causal,
    "window": lambda: headway.causal() & headway.sliding_window(70),
    "both sides": lambda: headway.sliding_window(9),
    "documents": lambda: headway.causal() & headway.document(IDS),
    "documents, window": lambda: headway.document(IDS) & headway.sliding_window(7),
}


def flash_attn_func(q, k, v, causal=False, window_size=(None, None), softcap=0.0, ids=None):
    """As in the package: (b, length, heads, width) in, a pair out."""
    mask = headway.causal() if causal else None
    if window_size[0] is not None:
        left, right = window_size
        window = lambda b, h, i, j: (i - j <= left) & (j - i <= right)
        mask = window if mask is None else mask & window
    if ids is not None:
        documents = headway.document(ids)
        mask = documents if mask is None else documents & mask
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    assert all(x.is_contiguous() for x in (q, k, v))
    score = headway.softcap(softcap) if softcap else None
    return headway.attention(*turned, score, mask).transpose(1, 2), None


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
):
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert cu_seqlens_q.dtype == torch.int32
    lengths = cu_seqlens_q.diff()
    assert max_seqlen_q == max_seqlen_k == lengths.max()
    ids = torch.repeat_interleave(lengths)
    out, lse = flash_attn_func(q[None], k[None], v[None], ids=ids, **options)
    return out[0], lse


@pytest.fixture
def package(monkeypatch):
    """A package of that name, and a bench in no time."""
    played = SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
    )
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", played)
    monkeypatch.setattr(peers.metadata, "version", lambda name: "4.0")
    monkeypatch.setitem(PEERS, NAME, replace(PEERS[NAME], backward=("cpu",)))
    monkeypatch.setattr(measure, "roof", lambda dtype, device: 1e9)
    monkeypatch.setattr(timing, "SHORTEST", 1e-6)
    return played


@pytest.mark.parametrize("score", [None, lambda: headway.softcap(5.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_it_computes_the_same_on_its_own_layout(package, mask, score):
    results = measure.measure_time(replace(CASE, mask=mask, score=score), "cpu", 1)
    ours, theirs = (r for r in results if r.direction == FORWARD)
    assert theirs.contestant == NAME
    assert theirs.error <= theirs.limit
    assert theirs.ratio == pytest.approx(theirs.median / ours.median, rel=1e-2)
    assert (theirs.target, theirs.verdict) == (">= 1e-06x", "pass")
    assert theirs.note == "flash-attn-4 4.0"
    assert [r.verdict for r in results if r.direction == BACKWARD] == ["", "fail"]


REFUSED = {
    "scores": {"score": lambda: headway.alibi(4)},
    "causal, windows": {"mask": lambda: headway.causal() | headway.prefix(5)},
    "documents and": {"mask": lambda: headway.causal(3)},
    "one row": {"mask": lambda: headway.document(IDS.expand(2, 150))},
    "one piece": {"mask": lambda: headway.document(IDS % 2)},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_it_has_no_option_for_is_said(why):
    with pytest.raises(Unavailable, match=why):
        peers.flash4_options(make_inputs(replace(CASE, **REFUSED[why])))


def test_what_it_raises_becomes_a_line(package):
    def fails(*tensors, **options):
        raise ValueError("no kernel\nfor this width")

    package.flash_attn_func = fails
    *_, line = measure.measure_time(CASE, "cpu", 1)
    assert (line.verdict, line.note) == ("not run", "could not run: ValueError: no kernel")

    class OnlyForward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            raise RuntimeError("no backward")

    package.flash_attn_func = lambda *x, **options: (OnlyForward.apply(x[0][..., :8]), None)
    *timed, line = measure.measure_time(CASE, "cpu", 1)
    assert (line.verdict, line.note) == ("not run", "could not run: RuntimeError: no backward")
    assert {r.contestant for r in timed} == {"headway"}


def test_where_it_is_not_installed_it_is_left_out(monkeypatch):
    def missing(name):
        raise peers.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(measure, "roof", lambda dtype, device: 1e9)
    monkeypatch.setattr(peers.metadata, "version", missing)
    results = measure.measure_time(CASE, "cpu", 1)
    assert {r.contestant for r in results} == {"headway"}
    assert "left out: flash-attn-4 is not installed" in terminal.listing()
    monkeypatch.setattr(peers.metadata, "version", lambda name: "4.0")
    assert "(flash-attn-4 4.0)" in terminal.listing()


def test_it_is_asked_of_every_row_that_it_can_run():
    assert {t.times for c in select(("main", "short", "long"), "cuda") for t in c.targets
            if t.peer == NAME} == {1.0, 0.95, 1.2}  # fmt: skip
    for case in GPU_CASES:
        assert {t.peer for t in case.targets} <= {*case.peers, "headway"}, case.name
        # Documents have 8192 positions; what FlashAttention-4 has no option for is a line there.
        if NAME in case.peers and case.name != "documents-causal" and not case.by_rows:
            peers.flash4_options(make_inputs(replace(case, b=1, length=64)))
        of = {t.direction: t.times for t in case.targets if t.peer == NAME}
        if NAME in case.peers and "softcap" in case.name and not case.by_rows:
            assert of == {FORWARD: 1.5, BACKWARD: 1.3}
        if NAME in case.peers and case.d == 256:
            assert of == {FORWARD: 0.95, BACKWARD: 1.2}
