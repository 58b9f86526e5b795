"""The row of first calls, on a CPU, where nothing is compiled; and what is asked of a card."""

from dataclasses import replace

import pytest

from headway_lab.bench import first_call
from headway_lab.bench.case import Case
from headway_lab.bench.cases import GPU_CASES
from headway_lab.bench.results import FAIL, NOT_RUN, PASS

TINY = Case("first-call-16-bias", 1, 2, 2, 64, 16, dtype="bfloat16", measure="first call")


def test_a_process_times_its_first_call_and_says_what_took_how_long(tmp_path):
    found = first_call.ask(TINY, "cpu", "auto", str(tmp_path), parts=True)
    assert 0 < found["forward"] < found["both"]
    assert found["second"] > 0
    assert found["parts"]["tracing"] > 0
    assert found["kernels"] == []


def test_there_is_a_case_for_every_kind_and_width():
    cases = [case for case in GPU_CASES if case.measure == "first call"]
    assert sorted((case.d, first_call.kind_of(case)) for case in cases) == sorted(
        (d, kind) for d in (64, 128) for kind in ("plain", "score", "bias")
    )


@pytest.fixture
def answers(monkeypatch):
    """What processes would say on a card; and what they were asked."""
    seen = []
    given = {"forward": 2.0, "both": 3.0, "second": 2.5}

    def ask(case, device, contestant, caches, parts=False):
        seen.append((contestant, parts))
        if contestant == "flex":
            return {"error": "it does not compile this"}
        if parts:
            kernels = [["forward", 3.9, {"front end": 1.0, "llir": 3.0}], ["backward", 0.1, {}]]
            return given | {"parts": {"tracing": 0.01}, "kernels": kernels}
        return dict(given)

    monkeypatch.setattr(first_call, "ask", ask)
    return seen, given


def test_cold_warm_and_a_second_kind_of_every_contestant_are_in_the_table(answers):
    seen, _ = answers
    results = first_call.measure(replace(TINY, name="first-call-16"), "cuda", 1, lambda: None)
    assert seen == [(c, False) for c in ("auto", "triton", "flex") for _ in range(2)] + [
        ("auto", True)
    ]
    found = {(r.contestant, r.direction): r for r in results}
    cold = found["headway", "cold, forward + backward"]
    assert (cold.median, cold.target, cold.verdict) == (3000.0, "<= 5.20 s", PASS)
    assert cold.note == "longest kernel 4.00 s; tracing 0.01; forward: front end 1.00, llir 3.00; backward: read"  # fmt: skip
    assert found["headway", "warm, forward + backward"].verdict == FAIL
    assert found["headway", "second kind, forward + backward"].verdict == PASS
    assert found["headway triton", "warm, forward"].target == ""
    assert found["flex", "cold, forward + backward"].verdict == NOT_RUN
    assert found["flex", "cold, forward + backward"].note == "it does not compile this"


def test_a_score_may_take_longer(answers):
    _, given = answers
    given["both"] = 0.55
    (warm,) = (
        r
        for r in first_call.measure(replace(TINY, name="first-call-64-score"), "cpu", 1, lambda: 0)
        if r.direction == "warm, forward + backward"
    )
    assert (warm.target, warm.verdict) == ("<= 0.60 s", PASS)
