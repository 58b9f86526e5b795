"""The experiments run, and what holds from the first step on holds. (The claims themselves take
minutes: `headway experiment scaling`, `headway experiment qk-clip`.)"""

import pytest

from headway.cli.experiment import main
from headway.experiments import qk_clip, scaling, train
from headway.experiments.train import Run


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
    assert "QK-norm is a strong alternative: in MHA it ends at " in found.reading


def test_the_command_says_whether_the_claim_holds(tmp_path, capsys):
    assert main(["scaling", "--steps", "1", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "fails  AdamW" in printed
    assert "checks hold" in printed


def test_distance_is_over_all_steps():
    a, b = Run([1.0, 2.0, 3.0], [5.0, 7.0, 6.0]), Run([1.0, 2.5, 3.0], [0.0] * 3)
    assert a.distance(b) == 0.5
    assert (a.loss, a.peak) == (3.0, 7.0)
