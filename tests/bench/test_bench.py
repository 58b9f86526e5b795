"""The bench on tiny shapes: what it measures is right, what is wrong is not measured."""

import csv
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import headway
from headway.dropout import keep, kept_factor
from headway.errors import ArgumentError
from headway_lab.bench import cases as table
from headway_lab.bench import (
    child,
    forward_mode,
    measure,
    overhead,
    row_statistics,
    run,
    timing,
    training,
)
from headway_lab.bench import results as book
from headway_lab.bench.case import (
    BACKWARD,
    BUILD,
    FORWARD,
    JVP,
    SEED,
    Case,
    CaseInputs,
    Target,
    make_inputs,
    size,
)
from headway_lab.bench.cases import select
from headway_lab.bench.measure import Truth, sampled_rows
from headway_lab.bench.peers import PEERS, Unavailable
from headway_lab.bench.results import Result, ResultsFile, describe
from headway_lab.cli import bench as terminal

TINY = Case("tiny", b=2, hq=4, hk=2, length=150, d=16, mask=headway.causal, peers=("sdpa",))
SCORED = replace(
    TINY, name="scored", score=lambda: headway.alibi(4), peers=("sdpa causal", "sdpa"),
    targets=(Target(FORWARD, "sdpa causal", 1e-6), Target(BACKWARD, "sdpa", 1e6)),
)  # fmt: skip
PACKED = replace(
    TINY, name="packed", peers=("causal, per tile",),
    mask=lambda: headway.causal() & headway.document(torch.arange(150) // 40),
)  # fmt: skip
PEAKED = replace(TINY, name="peaked", std=4.0, stats=True)
MASKS = {
    "none": None,
    "causal": headway.causal,
    "window": lambda: headway.causal() & headway.sliding_window(70),
    "prefix": lambda: headway.causal() | headway.prefix(33),
    "padding": lambda: headway.padding(torch.tensor([150, 61])),
    "by head": lambda: lambda b, h, i, j: (j < 40 * h + 3) & (i > 20),
}


@pytest.fixture
def fast(monkeypatch):
    """No matrix products for the roof, no seconds per sample."""
    monkeypatch.setattr(measure, "roof", lambda dtype, device: 1e9)
    monkeypatch.setattr(timing, "SHORTEST", 1e-6)


# ------------------------------------------------------------------- a training step, recorded


RECORDED = replace(TINY, hk=4, length=20, measure="recording", most=3.0)


def test_recording_and_clipping_are_measured_apart(monkeypatch):
    def step(self, first, *, clip=False):  # layers differ, and the machine slows down
        step.slower += 0.01
        layers = [0.1 + 0.01 * n + step.slower for n in range(training.LAYERS)]
        whole = 10.0 + 8 * step.slower
        layers[first::2] = [seconds + 0.01 for seconds in layers[first::2]]
        return training.StepTimes(whole + 0.04, layers, 0.05 if clip else 0.0)

    step.slower = 0.0
    monkeypatch.setattr(training.Steps, "step", step)
    step_, recorded, clipped = training.recording(RECORDED, "cpu", 3, lambda: None)
    base = step_.median / 1e3
    assert 10 < base < 11.5
    assert recorded.median == pytest.approx(100 * 0.08 / base, rel=1e-4)
    assert clipped.median == pytest.approx(100 * 0.13 / base, rel=1e-4)
    assert (step_.unit, clipped.unit, clipped.runs) == ("ms", "%", 6)
    assert (clipped.target, clipped.verdict) == ("<= 3 %", "pass")


def test_steps_record_in_turns():
    steps = training.Steps(RECORDED, "cpu")
    attentions = steps.model.attentions
    even = steps.step(0)
    assert [a.max_logit.empty for a in attentions] == [False, True] * 4
    odd = steps.step(1)
    assert not any(a.max_logit.empty for a in attentions)
    both = steps.step(0, clip=True)
    assert all(a.max_logit.empty for a in attentions)  # clipping begins a new record
    for whole, parts, _ in (even, odd, both):
        assert len(parts) == training.LAYERS
        assert min(parts) > 0
        assert sum(parts) < whole
    assert even.clip < both.clip


# ---------------------------------------------------------------------------------- the table


def test_table_is_consistent():
    names = [case.name for case in table.CASES]
    assert len(set(names)) == len(names)
    for case in table.CASES:
        assert case.measure in {*child.MEMORY, *run.MEASURES}, case.name
        assert set(case.peers) <= set(PEERS), case.name
        assert {t.peer for t in case.targets} <= set(case.peers), case.name
        assert {t.direction for t in case.targets} <= {FORWARD, BACKWARD, BUILD}, case.name
        assert not case.isa or case.isa in child.LIMITS, case.name
        assert case.tags, case.name


def test_select_by_name_part_and_tag():
    assert select((), "cpu") == [case for case in table.CASES if "cpu" in case.devices]
    assert [c.name for c in select(("softcap-4k-64",), "cpu")] == ["softcap-4k-64"]
    assert {c.name for c in select(("memory", "compiled"), "cpu")} == {
        "memory-window-1024-64k-64", "overhead-16-32-compiled",
    }  # fmt: skip
    assert len(select(("overhead",), "cpu")) == 6
    with pytest.raises(ArgumentError, match=r"'sofcap'.*names.*softcap-4k-64"):
        select(("causal", "sofcap"), "cpu")
    with pytest.raises(
        ArgumentError, match=r"'nonsense'; there are the tags block masks, .*--list"
    ) as raised:
        select(("nonsense",), "cpu")
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("name", MASKS)
def test_size_counts_every_pair_once(name: str):
    case = replace(TINY, mask=MASKS[name])
    mask = make_inputs(case).mask
    b, h = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
    i, j = torch.arange(150)[:, None], torch.arange(150)
    kept = torch.ones(2, 4, 150, 150, dtype=torch.bool)
    if mask is not None:
        kept = kept & mask(b, h, i, j)
    tiles = kept.view(2, 4, 150, 150)
    tiles = torch.nn.functional.pad(tiles, (0, 106, 0, 106)).view(2, 4, 2, 128, 2, 128)
    expected = int(kept.sum()), int(tiles.any(5).any(3).sum())
    assert tuple(size(case, mask)) == expected


def test_inputs_are_the_same_every_time_and_differ_between_cases():
    first, again, other = make_inputs(TINY), make_inputs(TINY), make_inputs(SCORED)
    assert all(torch.equal(a, b) for a, b in zip(first[:4], again[:4], strict=True))
    assert not torch.equal(first.q, other.q)
    assert first.k.shape == (2, 2, 150, 16)


# ---------------------------------------------------------------------------------- the check

FAULTS = {
    "no scale": lambda x: headway.attention(x.q, x.k, x.v, x.score, x.mask, scale=1.0),
    "no mask": lambda x: headway.attention(x.q, x.k, x.v, x.score),
    "no score": lambda x: headway.attention(x.q, x.k, x.v, mask=x.mask),
    "wrong head": lambda x: headway.attention(x.q, x.k.flip(1), x.v, x.score, x.mask),
    "missing tail": lambda x: headway.attention(
        x.q, x.k, x.v, x.score, x.mask & headway.padding(torch.tensor([149, 149]))
    ),
    "NaN": lambda x: headway.attention(x.q * math.nan, x.k, x.v, x.score, x.mask),
    "no gradient of k": lambda x: headway.attention(
        x.q, x.k.detach() + 0 * x.k, x.v, x.score, x.mask
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [TINY, SCORED, PACKED, PEAKED], ids=str)
def test_right_results_pass(case: Case, dtype: str):
    x = make_inputs(replace(case, dtype=dtype))
    errors = Truth(replace(case, dtype=dtype), x).errors(x.headway, backward=True)
    assert [e.what for e in errors] == ["out", "dq", "dk", "dv"]
    assert all(e.passed for e in errors), errors


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_caught(fault: str):
    x = make_inputs(SCORED)
    errors = Truth(SCORED, x).errors(lambda: FAULTS[fault](x), backward=True)
    assert not all(e.passed for e in errors)


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (4.0, False)])
def test_with_dropout_gradients_may_come_from_a_rounded_out(
    factor: float, passes: bool, monkeypatch: pytest.MonkeyPatch
):
    """As in every flash kernel; on few rows, of which the first has one key."""
    monkeypatch.setattr(measure, "PAIRS", 1)
    case = replace(TINY, dtype="bfloat16", dropout=0.1, score=None, mask=headway.causal)
    x = make_inputs(case)
    truth, rows = Truth(case, x), sampled_rows(case, x.q.device)
    q, k, v, dout = (t.detach().double() for t in (x.q, x.k, x.v, truth.dout))
    k, v = (t.repeat_interleave(case.hq // case.hk, 1) for t in (k, v))
    index = torch.arange(case.length)
    s = (q @ k.mT / math.sqrt(case.d)).masked_fill(index[:, None] < index, -math.inf)
    where = torch.meshgrid(*map(torch.arange, s.shape), indexing="ij")
    kept = keep(0.1, torch.tensor(SEED), *where) * kept_factor(0.1)
    p = s.softmax(-1)
    out = (p * kept) @ v
    taken = out + factor * (out.bfloat16() - out)
    ds = p * ((dout @ v.mT) * kept - (dout * taken).sum(-1, keepdim=True))
    of_groups = lambda t: t.unflatten(1, (case.hk, -1)).sum(2)
    dk, dv = of_groups(ds.mT @ q / math.sqrt(case.d)), of_groups((p * kept).mT @ dout)
    errors = truth.compare([out[:, :, rows], ds @ k / math.sqrt(case.d), dk, dv])
    assert all(e.passed for e in errors) == passes, errors


def test_learned_tensors_are_checked_too():
    weight = torch.randn(4, 299).requires_grad_()
    case = replace(TINY, score=lambda: headway.relative_bias(weight))
    x = make_inputs(case)
    assert x.learned[0] is weight
    truth = Truth(case, x)
    errors = truth.errors(x.headway, backward=True)
    assert errors[-1].what == "d(learned 0)"
    assert all(e.passed for e in errors)

    def wrong():
        call = headway.relative_bias(2 * weight - weight.detach())  # the right value
        return headway.attention(x.q, x.k, x.v, call, x.mask)

    assert [e.what for e in truth.errors(wrong, backward=True) if not e.passed] == ["d(learned 0)"]


# ---------------------------------------------------------------------------------- the timing


def contestants(monkeypatch, **seconds: float):
    """Calls that take so long by a clock of their own, and the log of who was called."""
    clock, log = [0.0], []
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(timing.time, name, lambda: clock[0])

    def contestant(name: str, seconds: float):
        def call():
            log.append(name)
            clock[0] += seconds

        return call

    return {name: contestant(name, t) for name, t in seconds.items()}, log


def test_contestants_take_turns_in_an_order_that_is_reversed_every_round(monkeypatch):
    calls, log = contestants(monkeypatch, a=0.3, b=0.4)
    ticks = []
    found = timing.compare(calls, 3, tick=lambda: ticks.append(len(log)))
    assert "".join(log) == "ab" + "abbaab"
    assert ticks == [4, 6, 8]
    assert found["b"].median == pytest.approx(0.4)
    assert found["b"].runs == 3


def test_slow_contestants_are_timed_once_or_twice_and_fast_ones_many_at_once(monkeypatch):
    calls, log = contestants(monkeypatch, slow=20.0, less=5.0, fast=1e-4)
    found = timing.compare(calls, 5)
    counts = [log.count(name) for name in ("slow", "less", "fast")]
    assert counts == [1 + 1, 1 + 2, 2 + 5 * 20]
    assert found["slow"] == timing.Timing(20.0, 20.0, 20.0, 1)
    assert found["fast"].median == pytest.approx(1e-4)
    assert found["fast"].runs == 5


def test_timing_gives_median_and_quartiles():
    assert timing.Timing.of([5.0]) == (5.0, 5.0, 5.0, 1)
    assert timing.Timing.of([4.0, 1.0, 2.0, 3.0, 100.0]) == (3.0, 2.0, 4.0, 5)


# ------------------------------------------------------------------------------------- a run


def test_a_case_is_checked_timed_and_judged(fast):
    results = measure.measure_time(SCORED, "cpu", 3)
    assert [(r.direction, r.contestant) for r in results] == [
        (d, c) for d in (FORWARD, BACKWARD) for c in ("headway", "sdpa causal", "sdpa")
    ]
    by = {(r.direction, r.contestant): r for r in results}
    ours, theirs = by[FORWARD, "headway"], by[FORWARD, "sdpa causal"]
    assert ours.error is not None
    assert ours.error <= ours.limit
    assert theirs.error is None
    assert theirs.ratio == pytest.approx(theirs.median / ours.median, rel=1e-2)
    assert ours.pairs == 8 * 150 * 151 / 2
    assert ours.tiles == 8 * 3
    assert ours.gflops == pytest.approx(ours.pairs * 4 * 16 / ours.median / 1e6, rel=1e-2, abs=0.01)
    assert (theirs.target, theirs.verdict) == (">= 1e-06x", "pass")
    assert by[BACKWARD, "sdpa"].verdict == "fail"
    assert by[FORWARD, "sdpa"].target == ""


def test_time_per_live_tile_is_compared_with_causal(fast):
    results = measure.measure_time(PACKED, "cpu", 3)
    ours, causal = (r for r in results if r.direction == FORWARD)
    expected = causal.median / causal.tiles / (ours.median / ours.tiles)
    assert causal.ratio == pytest.approx(expected, rel=1e-2)
    assert "per live tile" in causal.note


def test_wrong_results_are_never_timed(fast, monkeypatch):
    calls = []
    monkeypatch.setattr(measure, "compare", lambda *a, **k: calls.append(a))
    wrong = lambda case, x: lambda: headway.attention(x.q, x.k, x.v, x.score)
    monkeypatch.setattr(CaseInputs, "headway", lambda x: wrong(None, x)())
    (result,) = measure.measure_time(TINY, "cpu", 3)[:1]
    assert not calls
    assert result.verdict == "wrong"
    assert result.median is None
    assert result.error > result.limit
    assert "is off by" in result.note


def test_a_wrong_peer_and_one_that_cannot_run_leave_a_line_each(fast, monkeypatch):
    wrong = replace(PEERS["sdpa causal"], same=True)

    def refuse(case, x):
        raise Unavailable("no compiler here")

    def break_down(case, x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 GiB.")

    monkeypatch.setitem(PEERS, "sdpa causal", wrong)
    monkeypatch.setitem(PEERS, "flex", replace(PEERS["flex"], prepare=refuse))
    monkeypatch.setitem(PEERS, "cudnn", replace(PEERS["sdpa"], prepare=break_down))
    peers = ("sdpa causal", "flex", "cudnn", "sdpa")
    results = measure.measure_time(replace(SCORED, peers=peers), "cpu", 2)
    by = {r.contestant: r for r in results}
    assert by["sdpa causal"].verdict == "wrong"
    assert by["sdpa causal"].median is None
    assert (by["flex"].verdict, by["flex"].note) == ("not run", "no compiler here")
    assert by["cudnn"].verdict == "not run"
    assert by["cudnn"].note.startswith("could not run: OutOfMemoryError: CUDA out of memory.")
    assert by["sdpa"].median is not None
    assert by["headway"].median is not None


DROPPED = replace(
    TINY, name="dropped", dropout=0.3, peers=("headway without dropout", "sdpa dropout", "sdpa"),
    targets=(Target(FORWARD, "headway without dropout", 1e-6),),
)  # fmt: skip


def test_dropout_is_checked_pair_by_pair(fast):
    """Of those who drop other pairs only times are taken; who drops none by mistake is wrong."""
    results = measure.measure_time(DROPPED, "cpu", 2)
    by = {(r.contestant, r.direction): r for r in results}
    assert by["sdpa", ""].verdict == "wrong"
    for direction in (FORWARD, BACKWARD):
        for name in ("headway", "headway without dropout", "sdpa dropout"):
            assert by[name, direction].median is not None
    assert by["headway without dropout", FORWARD].verdict in ("pass", "unclear")
    assert by["headway", FORWARD].error > 0


def test_tangents_are_checked_and_timed(fast, monkeypatch):
    peers = ("headway without tangents", "sdpa math", "sdpa", "flex")
    case = replace(TINY, hk=4, measure="forward mode", peers=peers)

    def still(case, x):
        return lambda: PEERS["sdpa math"].prepare(case, x)() + x.v.detach().mean() * 0 + 1

    monkeypatch.setitem(PEERS, "sdpa", replace(PEERS["sdpa"], prepare=still))

    def refuse(case, x):
        raise Unavailable("no compiler here")

    monkeypatch.setitem(PEERS, "flex", replace(PEERS["flex"], prepare=refuse))
    by = {r.contestant: r for r in forward_mode.measure_jvp(case, "cpu", 2)}
    assert {r.direction for r in by.values()} == {JVP}
    assert by["headway"].verdict == by["sdpa math"].verdict == ""
    assert 0 < by["headway"].error < 1e-5
    assert by["headway"].gflops > 0
    assert by["headway without tangents"].ratio is not None
    assert by["sdpa"].verdict == "wrong"
    assert (by["flex"].verdict, by["flex"].note) == ("not run", "no compiler here")


@pytest.mark.parametrize("what", ["entropy", "expect"])
def test_statistics_are_checked_and_timed(what, fast, monkeypatch):
    case = replace(TINY, measure=what, peers=("headway out alone",))
    lines = run.MEASURES[what](case, "cpu", 2, lambda: None)
    by = {(r.contestant, r.direction): r for r in lines}
    for direction in (FORWARD, BACKWARD):
        assert by["headway", direction].verdict == ""
        assert 0 < by["headway", direction].error < by["headway", direction].limit
        assert by["headway out alone", direction].ratio is not None
    monkeypatch.setattr(row_statistics, "expect", lambda *x, **y: 1.1 * headway.expect(*x, **y))
    wrong = run.MEASURES["expect"](case, "cpu", 2, lambda: None)
    assert [r.verdict for r in wrong] == ["wrong"]


def test_explicit_masks_that_do_not_fit_are_refused():
    case = replace(PACKED, length=100_000)
    x = make_inputs(TINY)._replace(mask=headway.causal() & headway.sliding_window(5))
    with pytest.raises(Unavailable, match="37 GiB"):
        PEERS["sdpa"].prepare(case, x)


# ------------------------------------------------------------------------- files and commands


def test_a_file_of_other_columns_is_not_resumed(tmp_path):
    path = tmp_path / "old.csv"
    path.write_text("case,measure\ntiny,time\n")
    with pytest.raises(ArgumentError, match=r"old.csv has other columns than this version writes"):
        ResultsFile(path, resume=True).__enter__()
    assert path.read_text() == "case,measure\ntiny,time\n"


def test_csv_has_machine_versions_and_commit(fast, monkeypatch, tmp_path):
    monkeypatch.setattr(table, "CASES", (TINY, SCORED))
    before = torch.get_num_threads()
    path = tmp_path / "new" / "out.csv"
    seen = []
    options = run.Options(threads=1, repeats=2, output=path)
    written, results = run.bench(options, show=lambda case, r: seen.append(case.name))
    assert torch.get_num_threads() == before
    assert written == path
    assert seen == ["tiny", "scored"]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(results) == 4 + 6
    row = rows[-1]
    assert row["device"] == book.processor()
    assert row["torch"] == torch.__version__
    assert row["threads"] == "1"
    assert row["headway"] == headway.__version__
    assert row["date"]
    assert row["score"] == str(headway.alibi(4))
    assert row["mask"] == "causal()"
    assert float(row["median"]) > 0
    assert row["commit"] == book.commit()
    with pytest.raises(ArgumentError, match="exists"), ResultsFile(path):
        pass


def test_wrong_results_give_exit_status_one(fast, monkeypatch, tmp_path, capsys):
    from rich.console import Console

    monkeypatch.setattr(table, "CASES", (TINY, SCORED))
    options = run.Options(repeats=2, output=tmp_path / "a.csv")
    assert terminal.run_in_terminal(options, Console(width=120)) == 0
    shown = capsys.readouterr().out
    assert "scored" in shown
    assert ">= 1e+06x fail" in shown
    assert str(tmp_path) in shown
    bad = [Result("tiny", "", "headway", error=1.0, limit=0.1, verdict="wrong", note="dq is off")]
    monkeypatch.setitem(run.MEASURES, "time", lambda *a: bad)
    assert (
        terminal.run_in_terminal(replace(options, output=tmp_path / "b.csv"), Console(width=120))
        == 1
    )
    assert "wrong" in capsys.readouterr().out


def test_nothing_is_written_unless_asked(fast, monkeypatch, tmp_path, capsys):
    from rich.console import Console

    monkeypatch.setattr(table, "CASES", (TINY,))
    monkeypatch.chdir(tmp_path)
    assert terminal.run_in_terminal(run.Options(threads=1, repeats=2), Console(width=120)) == 0
    shown = capsys.readouterr().out
    assert "nothing is written: --output FILE" in shown
    assert "sdpa" in shown
    assert list(tmp_path.iterdir()) == []
    path, _ = run.bench(run.Options(threads=1, repeats=2, output=tmp_path))
    assert path is not None
    assert path.parent == tmp_path / book.here("cpu").card
    assert path.match("bench-20*.csv")
    assert path.exists()


@pytest.mark.parametrize(
    ("device", "capability", "card"),
    [
        ("NVIDIA H200", "sm_90", "h200"),
        ("NVIDIA H100 80GB HBM3", "sm_90", "h100"),
        ("NVIDIA A100-SXM4-80GB", "sm_80", "a100-sxm4"),
        ("NVIDIA GeForce RTX 4090", "sm_89", "geforce-rtx-4090"),
        ("Intel(R) Xeon(R) Processor", "AVX512 AMX", "cpu-intel-xeon-amx"),
        ("Intel(R) Core(TM) i7-8700K CPU @ 3.70GHz", "AVX2", "cpu-intel-core-i7-8700k-avx2"),
    ],
)
def test_a_card_has_a_folder(device: str, capability: str, card: str):
    assert replace(book.here("cpu"), device=device, capability=capability).card == card


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 0}, "--threads 0"),
        ({"resume": True}, "--resume with no --output"),
        ({"resume": True, "output": Path()}, "--resume with --output ., a folder"),
        ({"repeats": -1}, "--repeats -1"),
        ({"seconds": -1.0}, "--seconds -1 must be 0 or more"),
        ({"seconds": float("nan")}, "--seconds nan"),
        ({"device": "abacus"}, "--device 'abacus'"),
        ({"device": "meta"}, "cpu and cuda only"),
    ],
)
def test_bad_options_are_refused(change: dict, message: str):
    with pytest.raises(ArgumentError, match=message):
        run.Options(**change)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ArgumentError, match="sees no GPU"):
        run.Options(device="cuda")


def test_commit_is_that_of_the_checkout():
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    found = book.commit().removesuffix("-dirty")
    assert found == "" or done.stdout.startswith(found)


# ------------------------------------------------------------------- overhead, memory, children


@pytest.mark.parametrize("mask", [None, headway.causal], ids=["full", "causal"])
def test_the_kernel_of_the_overhead_is_the_same_function(mask):
    x = make_inputs(replace(TINY, hk=4, mask=mask))
    out = headway.attention(x.q, x.k, x.v, mask=x.mask)
    torch.testing.assert_close(overhead.kernel(x, training=False)(), out)
    grads = torch.autograd.grad(out, (x.q, x.k, x.v), x.dout)
    torch.testing.assert_close(overhead.kernel(x, training=True)(), grads)


@pytest.mark.parametrize("name", ["window", "document", "closure-score", "method-mask"])
def test_without_a_kernel_of_pytorch_overhead_is_what_is_above_our_own_pair(name, monkeypatch):
    (case,) = (c for c in table.CASES if c.name == f"overhead-16-32-{name}")
    x = make_inputs(case)
    out = headway.attention(x.q, x.k, x.v, x.score, x.mask)
    torch.testing.assert_close(overhead.kernel(x, training=False)(), out)
    grads = torch.autograd.grad(out, (x.q, x.k, x.v), x.dout)
    torch.testing.assert_close(overhead.kernel(x, training=True)()[:3], grads)
    monkeypatch.setattr(timing, "SHORTEST", 1e-6)
    results = overhead.overhead(case, "cpu", 1, lambda: None, compiled=False)
    whole, resolved, _ = results
    assert [(r.contestant, r.direction) for r in results] == [
        ("headway", FORWARD), (overhead.RESOLVE, FORWARD), ("headway", overhead.BOTH),
    ]  # fmt: skip
    assert whole.note.startswith("the pair ")
    assert (whole.target, resolved.target) == ("", "<= 20 µs")
    assert 0 < resolved.median < 1000
    shown = describe(case)
    assert "0x" not in f"{shown['score']}{shown['mask']}"  # the same in every run


def test_overhead_is_what_is_above_the_kernel(monkeypatch):
    seconds = {"kernel": 10e-6, "headway": 60e-6, "sdpa": 15e-6}

    def compare(calls, *rest):
        assert set(calls) == set(seconds)
        return {name: timing.Timing(t, t - 1e-6, t + 1e-6, 9) for name, t in seconds.items()}

    monkeypatch.setattr(overhead, "compare", compare)
    case = Case("o", hq=2, hk=2, length=8, d=8, mask=headway.causal, most=47.0)
    results = overhead.overhead(case, "cpu", 1, lambda: None, compiled=False)
    assert [r.contestant for r in results] == ["headway", "sdpa"] * 2
    first = results[0]
    # Of a difference of two times: both have quartiles.
    assert (first.median, first.low, first.high, first.unit) == (50.0, 48.0, 52.0, "µs")
    assert [r.verdict for r in results] == ["fail", "", "", ""]
    results = overhead.overhead(replace(case, most=51.0), "cpu", 1, lambda: None, compiled=False)
    assert [r.verdict for r in results] == ["noise", "", "", ""]
    seconds["headway"] = 5e-6
    results = overhead.overhead(case, "cpu", 1, lambda: None, compiled=False)
    assert [r.verdict for r in results] == ["noise", "", "", ""]  # less than nothing


@pytest.mark.parametrize("seed", range(20))
def test_a_verdict_is_what_every_pair_of_quartiles_says(seed: int):
    """Noise is what two of them would answer differently."""
    draws = torch.rand(3, 3, generator=torch.Generator().manual_seed(seed)).sort(1).values.tolist()
    ours, theirs, limits = draws
    pair = [timing.Timing(median, low, high, 5) for low, median, high in (ours, theirs)]
    for times in (0.1, *limits, 10.0):
        answers = {b >= times * a for a in ours for b in theirs}
        assert pair[1].takes(times, pair[0]) == (answers.pop() if len(answers) == 1 else None)
    for limit in (0.01, *limits, 2.0):
        answers = {a <= limit for a in ours}
        expected = {True: "pass", False: "fail"}[answers.pop()] if len(answers) == 1 else "noise"
        result = Result("x", FORWARD, "headway", unit="s")
        low, median, high = ours
        assert replace(result, median=median, low=low, high=high).at_most(limit).verdict == expected


def test_memory_has_a_figure_only_if_the_result_is_right(monkeypatch):
    case = Case("m", length=256, hq=1, hk=1, mask=headway.causal, measure="memory", most=1e6)
    result = child.memory(case, "cpu")
    assert result.verdict == "pass"
    assert result.median >= 0
    assert result.error <= result.limit
    monkeypatch.setattr(CaseInputs, "headway", lambda x: headway.attention(x.q, x.k, x.v))
    result = child.memory(case, "cpu")
    assert result.verdict == "wrong"
    assert result.median is None


BLOCKS = Case(
    "blocks", hq=1, hk=1, length=384, d=0, mask=headway.causal, measure="block mask", most=1e6,
    peers=("create_block_mask",), targets=(Target(BUILD, "create_block_mask", 1e-6),),
)  # fmt: skip


def test_block_masks_are_timed_and_compared(fast, monkeypatch):
    ours, theirs = run.MEASURES["block mask"](BLOCKS, "cpu", 2, lambda: None)
    assert (ours.tiles, ours.target, ours.verdict) == (6, "<= 1e+06 ms", "pass")
    assert ours.note.startswith("3 full, 3 partial, 3 empty")
    assert (theirs.target, theirs.verdict) == (">= 1e-06x", "pass")
    assert theirs.ratio == pytest.approx(theirs.median / ours.median, rel=0.1, abs=0.1)
    other = replace(BLOCKS, mask=lambda: headway.causal() & headway.sliding_window(200))
    prepare = PEERS["create_block_mask"].prepare
    wrong = lambda case, x: prepare(case, x._replace(mask=headway.causal()))
    monkeypatch.setitem(PEERS, "create_block_mask", replace(PEERS["flex"], prepare=wrong))
    _, theirs = run.MEASURES["block mask"](other, "cpu", 1, lambda: None)
    assert (theirs.verdict, theirs.median) == ("wrong", None)


def test_the_memory_of_a_block_mask_is_measured_in_a_fresh_process():
    case = next(c for c in table.CASES if c.name == "block-mask-window-1024k-peak")
    used, (result,) = child.ask(case, "cpu", 1)
    assert used.threads == torch.get_num_threads()
    assert (result.unit, result.target, result.verdict) == ("MB", "<= 1000 MB", "pass")
    assert result.tiles == 253456 + 16352


@pytest.mark.parametrize("name", table._BLOCK_MASKS | table._UNKNOWN)
def test_block_masks_of_the_table_are_equal_to_the_definition(name: str):
    n, tile = 4096, 128
    mask = (table._BLOCK_MASKS | table._UNKNOWN)[name](n)
    i = torch.arange(n)
    zero = i.new_zeros(())
    kept = mask(zero, zero, i[:, None], i).view(n // tile, tile, n // tile, tile)
    want = kept.any(3).any(1).int() + kept.all(3).all(1)
    got = headway.block_mask(mask, 1, 1, n, n, tile=(tile, tile)).to_dense()[0, 0]
    assert torch.equal(got.int(), want)


def test_peak_memory_is_the_most_a_process_had_not_its_parents():
    ours = torch.ones(1 << 26)  # 256 MB here
    code = """
import torch
from headway_lab.bench.timing import peak
before = peak("cpu")
torch.ones(before // 4 + (1 << 24))  # 64 MB more than there ever was
print(before, peak("cpu") - before)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    before, more = map(int, done.stdout.split())
    assert before < timing.peak("cpu") - 64e6
    assert 60e6 < more < 2 * before
    assert ours.sum() == 1 << 26


def test_a_child_measures_with_less_of_a_cpu():
    small = next(c for c in table.CASES if c.name == "batch-8x256-64")
    used, results = child.ask(small, "cpu", 1, "AVX512_CORE_VNNI")
    assert used.isa == "AVX512_CORE_VNNI"
    assert "AMX" not in used.capability
    assert used.threads == torch.get_num_threads()
    assert {r.contestant for r in results} == {"headway", "sdpa"}


def test_a_child_that_dies_is_an_error_with_its_last_words(monkeypatch):
    with pytest.raises(child.ChildFailed, match=r"tiny: .* ended with 1: StopIteration"):
        child.ask(TINY, "cpu", 1)
