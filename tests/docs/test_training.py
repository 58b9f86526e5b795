"""The plots and tables of docs/training.md, of arms that are made up."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import training


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(training, "RUNS", tmp_path)
    training.arms.cache_clear()
    yield tmp_path
    training.arms.cache_clear()


def write(runs: Path, arm: str, loss: float, logit: float | None = 20.0, lines: int = 12) -> None:
    head = {
        "arm": arm, "command": f"train {arm}", "device": "GPU", "commit": "abc",
        "date": "2026-01-01", "triton": "3", "seconds": 90.0, "seconds_training": 60.0,
        "tokens_per_second": 1234, "config": {"warmup": 0.1, "steps": 12},
        "versions": {"torch": "2", "python": "3"},
        "corpus": {"sha256": "f" * 64, "train": {"files": 2, "bytes": 9},
                   "held_out": {"files": 1, "bytes": 3}},
    }  # fmt: skip
    rows = [
        {
            "step": n, "tokens": n * 1e6, "bits_per_byte": loss + 4 / n,
            "max_logit": [] if logit is None else [logit * n, logit], "held_out_bits_per_byte": loss,
        }
        for n in range(1, lines + 1)
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in [head, *rows])
    (runs / f"{arm}.jsonl").write_text(text)


def test_nothing_was_run(runs: Path) -> None:
    assert training.pictures() == {}
    assert set(training.said().values()) == {training.MISSING}


def test_what_was_run_is_drawn(runs: Path) -> None:
    for n, arm in enumerate(("sdpa-0", "sdpa-1", "headway-0", "headway-1")):
        write(runs, arm, 1.0 + n / 100, None if arm.startswith("sdpa") else 20.0)
    for kind in ("gqa", "mla"):
        write(runs, f"explode-{kind}-0", 1.0, 200.0)
        write(runs, f"explode-{kind}-clip", 1.0, 9.0)
    write(runs, "scaling-none-adamw-0.001", 1.3)
    write(runs, "scaling-logits-adamw-0.01", 1.2)
    pictures = training.pictures()
    assert {re.split("[-.]", name)[1] for name in pictures} == {"baseline", "logits", "scaling"}
    for picture in pictures.values():
        ElementTree.fromstring(picture)
    assert "QK-Clip, tau 100" in pictures["pictures/training-logits.svg"]
    said = training.said()
    assert (
        "| headway-1 | 1.0300 | 1,234 | 60 s | 90 s | 240 | GPU | `abc` | `train headway-1` |"
        in said["baseline"]
    )
    assert "| sdpa-0 | 1.0000 | 1,234 | 60 s | 90 s |  |" in said["baseline"]
    assert "(pictures/training-baseline.svg)" in said["baseline"]
    assert "1.000 and 1.000 times" in said["baseline"]
    assert "differ by +0.0200 and +0.0200" in said["baseline"]
    assert "after the warm-up is 108 (GQA) and 108 (MLA): tau is 100" in said["logits"]
    assert said["variants"] == training.MISSING
    assert "| AdamW, 0.001 |  |  |  | 1.3000 (240) |" in said["scaling"]
    assert "10 runs, 15 minutes in all" in said["made-by"]
