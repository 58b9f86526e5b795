"""The experiments run, and what holds from the first step on holds. (The claims themselves take
minutes: `headway experiment scaling`, `headway experiment qk-clip`.)"""

import re

import pytest

from headway.errors import ArgumentError
from headway_lab.cli.experiment import main
from headway_lab.experiments import qk_clip, scaling, train
from headway_lab.experiments.report import Check, Experiment
from headway_lab.experiments.train import TrainingCurves


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The same models on an eighth of the text."""
    monkeypatch.setattr(train, "BATCH", 4)
    monkeypatch.setattr(train, "LENGTH", 32)


def test_scaling_is_bit_equal_where_it_should_be(tmp_path):
    found = scaling.run(steps=3)
    checks = {check.statement: check.passed for check in found.checks}
    assert checks["Adafactor: the two are bit-equal"]
    assert checks["AdamW, queries × 8: the two are bit-equal"]
    pytest.importorskip("matplotlib")
    found.draw(tmp_path / "new" / "scaling.png")
    assert (tmp_path / "new" / "scaling.png").stat().st_size > 10_000


def test_qk_clip_runs_and_an_idle_clip_changes_no_bit():
    found = qk_clip.run(steps=2)
    assert found.checks[-1].passed
    assert not found.checks[0].passed  # nothing has exploded yet
    assert len(found.rows) == 9
    failed = sum(not check.passed for check in found.checks)
    assert (
        f"does not hold in these runs: {failed} of {len(found.checks)} checks fail" in found.reading
    )
    assert "QK-norm, the alternative, at " in found.reading


def test_what_an_experiment_concludes_follows_from_its_checks():
    def said(peak, passed):
        quiet, wild = TrainingCurves([1.0], [5.0]), TrainingCurves([2.0], [peak])
        muon = {"no clip": wild, "clip": quiet, "QK-norm": quiet}
        adamw = {"no clip": wild, "clip": quiet}
        return qk_clip._reading(muon, adamw, quiet, [Check("one", True), Check("two", passed)])

    assert said(9e3, True).startswith("The clip holds the logits")
    assert "AdamW explodes as well" in said(9e3, True)
    assert "AdamW explodes as well" not in said(40.0, True)
    assert said(9e3, False).startswith("The claim does not hold in these runs: 1 of 2 checks fail")


def test_the_picture_has_a_line_at_tau_and_plain_ticks(tmp_path):
    pytest.importorskip("matplotlib")
    runs = {"no clip": TrainingCurves([3.0, 2.0, 1.5], [2.0, 6.0, 9.0])}
    Experiment("t", (), [], {"MHA": runs}, [], "", ("tau 30", 30.0)).draw(tmp_path / "t.svg")
    drawn = (tmp_path / "t.svg").read_text()
    assert "<!-- tau 30 -->" in drawn
    assert "times" not in drawn  # 6 x 10^0
    labels = re.findall(r"<!-- ([\d.]+) -->", drawn)
    assert "2.5" not in labels[:3]  # steps are whole


def test_a_folder_that_cannot_be_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(qk_clip, "run", lambda **_: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"--out .*file.*; name another folder"):
        main(["qk-clip", "--out", str(tmp_path / "file")])


def test_the_command_says_whether_the_claim_holds(tmp_path, capsys):
    assert main(["scaling", "--steps", "1", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "fails  AdamW" in printed
    assert "checks hold" in printed


def test_distance_is_over_all_steps():
    a, b = (
        TrainingCurves([1.0, 2.0, 3.0], [5.0, 7.0, 6.0]),
        TrainingCurves([1.0, 2.5, 3.0], [0.0] * 3),
    )
    assert a.distance(b) == 0.5
    assert (a.loss, a.peak) == (3.0, 7.0)
