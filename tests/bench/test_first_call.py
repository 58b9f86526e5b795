"""The row of first calls, on a CPU, where nothing is compiled; and what is asked of a card."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from headway_lab.bench import first_call, first_call_process, results
from headway_lab.bench.case import Case
from headway_lab.bench.cases import GPU_CASES
from headway_lab.bench.results import FAIL, NOT_RUN, PASS

TINY = Case("first-call-16-bias", 1, 2, 2, 64, 16, dtype="bfloat16", measure="first call")
BOTH = "forward + backward"


@pytest.fixture
def asked(monkeypatch):
    """Processes with the byte code that is there, which saves seconds; and what they were to use."""
    seen = []

    def ask_process(command, question, **more):
        seen.append(more)
        rest = {name: x for name, x in more.items() if not name.startswith("PYTHON")}
        return results.ask_process(command, question, **rest)

    monkeypatch.setattr(first_call, "ask_process", ask_process)
    return seen


def test_a_process_times_its_first_call_and_says_what_took_how_long(asked, tmp_path):
    found = first_call.ask(TINY, "cpu", "auto", str(tmp_path), "made", parts=True)
    assert 0 < found["forward"] < found["both"]
    assert found["second"] > 0
    assert found["parts"]["tracing"] > 0
    assert found["kernels"] == []
    assert asked[0]["PYTHONPYCACHEPREFIX"] == "made"
    assert not asked[0]["PYTHONDONTWRITEBYTECODE"]


def test_a_llama_times_its_first_step(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    asked = {}

    def ask_process(command, question, **more):
        asked.update(more)
        return first_call_process.main(question)

    monkeypatch.setattr(first_call, "ask_process", ask_process)
    case = replace(TINY, name="first-step-llama")
    seconds = first_call.ask(case, "cpu", "auto", str(tmp_path), "")
    assert seconds["step"] > 0
    assert asked["PYTHONPYCACHEPREFIX"].startswith(str(tmp_path))
    assert asked["PYTHONDONTWRITEBYTECODE"]
    for contestant, target in (("headway", "<= 3.00 s"), ("sdpa", "")):
        (row,) = first_call.judged(case, first_call.rows(case, "warm", contestant, seconds), {})
        assert (row.direction, row.target) == ("warm, training step", target)


@pytest.mark.parametrize("contestant", ["auto", "flex"])
def test_nothing_is_imported_before_the_clock_that_a_user_does_not_import(contestant):
    """When the clock starts: neither autograd's own imports nor, for FlexAttention, any of ours."""
    code = """
import json, sys, time
sys.argv = [sys.argv[1]]
def perf_counter():
    print(json.dumps(sorted(sys.modules)))
    sys.exit()
process = {"__name__": "process", "__file__": sys.argv[0]}
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"), process)
question = json.load(sys.stdin)
time.perf_counter = perf_counter
process["main"](question)
"""
    question = {
        "kind": "score", "contestant": contestant, "device": "cpu", "shape": (1, 2, 64, 16),
        "parts": False,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, str(first_call.PROCESS)], input=json.dumps(question),
        capture_output=True, text=True, env=results.environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert not loaded & {"sympy", "triton", "torch._dynamo", "torch._inductor"}
    assert ("headway" in loaded) == (contestant == "auto")
    assert "torch.nn.attention.flex_attention" not in loaded or contestant == "auto"


def test_there_is_a_case_for_every_kind_and_width():
    cases = [case for case in GPU_CASES if case.name.startswith("first-call-")]
    with_byte_code = [case for case in cases if case.measure == "first call"]
    assert sorted((case.d, first_call.kind_of(case)) for case in with_byte_code) == sorted(
        (d, kind) for d in (64, 128) for kind in ("plain", "score", "bias")
    )
    without = [case for case in cases if case not in with_byte_code]
    assert [first_call.kind_of(case) for case in without] == ["plain", "score"]
    (llama,) = (case for case in GPU_CASES if first_call.kind_of(case) == "llama")
    assert llama.measure == "first call"


@pytest.fixture
def answers(monkeypatch):
    """What processes would say on a card; and what they were asked."""
    seen = []
    given = {"forward": 2.0, "both": 3.0, "second": 2.5}

    def ask(case, device, contestant, caches, byte_code, parts=False):
        seen.append((contestant, bool(byte_code), parts))
        if contestant == "flex" and "bias" in case.name:
            return {"error": "it does not compile this"}
        if contestant == "flex":
            return {"forward": 3.0, "both": 3.5, "second": 1.0}
        if parts:
            kernels = [["forward", 3.9, {"front end": 1.0, "llir": 3.0}], ["backward", 0.1, {}]]
            return given | {"parts": {"tracing": 0.01}, "kernels": kernels}
        return dict(given)

    monkeypatch.setattr(first_call, "ask", ask)
    return seen, given


@pytest.mark.parametrize("byte_code", [True, False])
def test_cold_warm_and_a_second_kind_of_every_contestant_are_in_the_table(answers, byte_code):
    """With byte code, a process that is not measured makes it."""
    seen, _ = answers
    case = replace(TINY, name="first-call-16")
    measured = first_call.measure(case, "cuda", 1, lambda: None, byte_code)
    runs = 2 + byte_code
    assert seen == [
        (c, byte_code, False) for c in ("auto", "triton", "flex") for _ in range(runs)
    ] + [("auto", byte_code, True)]
    found = {(r.contestant, r.direction): r for r in measured}
    cold = found["headway", f"cold, {BOTH}"]
    assert (cold.median, cold.target, cold.verdict) == (3000.0, "<= flex", PASS)
    assert cold.note == "longest kernel 4.00 s; tracing 0.01; forward: front end 1.00, llir 3.00; backward: read"  # fmt: skip
    assert found["headway", f"warm, {BOTH}"].verdict == FAIL
    assert found["headway", f"second kind, {BOTH}"].verdict == PASS
    assert found["headway triton", "warm, forward"].target == ""


def test_where_flex_does_not_compile_there_is_no_limit(answers):
    measured = first_call.measure(TINY, "cuda", 1, lambda: None, byte_code=False)
    found = {(r.contestant, r.direction): r for r in measured}
    assert found["headway", f"cold, {BOTH}"].target == ""
    assert found["flex", f"cold, {BOTH}"].verdict == NOT_RUN
    assert found["flex", f"cold, {BOTH}"].note == "it does not compile this"


def test_a_score_may_take_longer(answers):
    _, given = answers
    given["both"] = 0.95
    for kind, verdict in (("", FAIL), ("-score", PASS)):
        case = replace(TINY, name=f"first-call-64{kind}")
        (warm,) = (
            r
            for r in first_call.measure(case, "cpu", 1, lambda: 0, byte_code=False)
            if r.direction == f"warm, {BOTH}"
        )
        assert warm.verdict == verdict
