"""The bench of one sequence over ranks, here two over gloo."""

import pytest
import torch

from headway.resolve import prepare
from headway_lab.bench import Options
from headway_lab.bench.case import BACKWARD, FORWARD
from headway_lab.bench.cases import RANK_CASES, every, select, uneven_documents
from headway_lab.bench.ranks import ONE_CARD, RankProcesses, measure
from headway_lab.bench.ranks_process import PLANS, idle, shortened
from headway_lab.bench.results import WRONG
from headway_lab.bench.run import bench


def test_two_ranks():
    """Of which the next case that fails ends the processes: its error says why, and nothing is left
    running."""
    made = RankProcesses.of("cpu")
    try:
        path, results = bench(Options(context_parallel=True, repeats=1))
        rows, error = made.ask({"case": "no such case", "repeats": 1})
        assert "KeyError" in error
        assert rows == []
        assert made.processes == []
    finally:
        made.end()
    assert path is None
    assert not [r for r in results if r.verdict == WRONG]
    found = {(r.direction, r.contestant) for r in results if r.gflops}
    names = "headway", *(f"headway, {plan}" for plan in PLANS), ONE_CARD
    assert found == {(d, name) for d in (FORWARD, BACKWARD) for name in names}
    assert "plan: heads" in next(r.note for r in results if r.contestant == "headway")


@pytest.mark.parametrize("case", [c for c in RANK_CASES if c.length <= 32768], ids=lambda c: c.name)
def test_one_card_has_a_sequence_that_can_be(case):
    """Masks and scores of its length, and a window as wide as before."""
    short = shortened(case, 4)
    assert short.length < case.length
    zeros = torch.zeros(1).expand
    q, k, v = (zeros(1, h, short.length, 128) for h in (case.hq, case.hk, case.hk))
    score = None if short.score is None else short.score()
    prepare(q, k, v, score, short.mask())
    if "window" in case.name:
        assert str(short.mask()) == str(case.mask())


def test_idle():
    """Of whole calls: each has a short kernel, a wait of 2, a long one and a wait of 3; two long ones
    that overlap are one; and what comes before the first and after the last counts for nothing."""
    calls = [(at + x, at + y) for at in range(0, 400, 100) for x, y in ((0, 10), (12, 97))]
    assert idle([(-500.0, -450.0), *calls, (900.0, 910.0)]) == pytest.approx(0.05)
    assert idle([*calls, *[(start + 2, end - 20) for start, end in calls]]) == pytest.approx(0.05)
    assert idle(calls[:2]) == 0.0
    assert idle([]) == 0.0


def test_only_when_asked():
    assert all(case.measure == "ranks" for case in select((), "cuda", ranks=True))
    assert not [case for case in select((), "cuda") if case.measure == "ranks"]


def test_ranks_that_cannot_start(monkeypatch):
    """The case is not measured, and the table says why."""
    case = next(case for case in every() if case.measure == "ranks")
    monkeypatch.setattr(RankProcesses, "of", lambda device: RankProcesses("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (row,) = measure(case, "cuda", 1, lambda: None)
    assert "two or more" in row.note


@pytest.mark.parametrize("length", [2048, 65536])
def test_documents(length):
    mask = uneven_documents(length)
    i = torch.arange(length)
    starts = ~mask(0, 0, i[1:], i[:-1])
    sizes = torch.diff(torch.cat([torch.tensor([0]), starts.nonzero()[:, 0] + 1, i[-1:] + 1]))
    assert sizes.max() <= 0.26 * length
    assert 0.05 * length < sizes.double().mean() < 0.2 * length
