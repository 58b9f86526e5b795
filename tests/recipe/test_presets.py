"""The long runs of docs/training.md: their settings, and the baseline that they are compared with."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console

from headway.errors import ArgumentError
from headway_lab.cli import train as command
from headway_lab.recipe import TrainConfig, plots, train
from headway_lab.recipe.model import Transformer
from headway_lab.recipe.presets import PRESETS, preset
from headway_lab.recipe.run import Run

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "_figure", mock.Mock(side_effect=ModuleNotFoundError))


def losses(run: Run) -> list[float]:
    return [r["loss"] for r in run.read_metrics()]


def test_the_baseline_differs_by_the_call_alone(tiny: TrainConfig, quiet: Console) -> None:
    """The same weights, batches and losses; F.sdpa tells no logits. Not attending past a file is
    another run, and so is a softcap."""
    config = replace(tiny, mask="causal", sample_bytes=0, steps=6)
    runs = {
        name: train(replace(config, name=name, **changes), console=quiet).run
        for name, changes in {
            "headway": {}, "sdpa": {"implementation": "sdpa"},
            "documents": {"mask": "documents"}, "softcap": {"softcap": 0.5},
        }.items()
    }  # fmt: skip
    assert losses(runs["sdpa"]) == pytest.approx(losses(runs["headway"]), rel=1e-5)
    assert {str(r["max_logit"]) for r in runs["sdpa"].read_metrics()} == {"[]"}
    assert not (runs["sdpa"].folder / "sample.txt").exists()
    for other in ("documents", "softcap"):
        assert losses(runs[other]) != pytest.approx(losses(runs["headway"]), rel=1e-5)


@pytest.mark.parametrize(("optimizer", "scaling"), [("adamw", "query"), ("adafactor", "none")])
def test_optimizers_and_scalings_are_resumed(
    optimizer: Any, scaling: Any, tiny: TrainConfig, quiet: Console
) -> None:
    config = replace(tiny, optimizer=optimizer, scaling=scaling, sample_bytes=0)
    whole = train(replace(config, name="whole"), console=quiet).run
    cut = train(config, console=quiet).run
    cut.newest_checkpoint().unlink()
    train(config, resume=True, console=quiet)
    assert losses(cut) == losses(whole)


def test_presets() -> None:
    sizes = {}
    for name, config in PRESETS.items():
        settings = config.resolved()
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in Transformer(settings.model()).parameters()) / 1e6
        text = settings.steps * settings.batch * settings.context / 1e6
        assert text == pytest.approx(20 if name == "19m" else 100, rel=1e-3)
    assert sizes == pytest.approx({"60m": 57, "60m-explode": 52, "19m": 19}, rel=0.02)
    with pytest.raises(ArgumentError, match="there are 60m, 60m-explode, 19m"):
        preset("70m")


def test_a_preset_is_where_the_command_starts_from(tiny: TrainConfig) -> None:
    asked = []
    with (
        mock.patch.object(command, "train", lambda config, *_: asked.append(config) or 1 / 0),
        pytest.raises(ZeroDivisionError),
    ):
        command.main(["--preset", "19m", "--lr", "0.5", "--runs", str(tiny.runs)])
    assert asked == [replace(PRESETS["19m"], lr=0.5, runs=tiny.runs)]
    with pytest.raises(ArgumentError, match="--preset 19m with --resume"):
        command.main(["--preset", "19m", "--resume"])


def test_an_arm_leaves_a_small_file(text_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    import training_runs

    monkeypatch.setattr(training_runs, "LINES", 3)
    small = {"device": "cpu", "dtype": "float32", "depth": 1, "width": 16, "heads": 2}
    small |= {"kv_heads": 2, "context": 24, "batch": 2, "steps": 8, "eval_every": 4, "threads": 1}
    changes = [f"{k}={json.dumps(v)}" for k, v in small.items()]
    changes += ['text="library"', f'corpus="{text_folder}"']
    out = tmp_path / "out"
    arguments = ["headway-0", "sdpa-0", "--commit", "abc", "--out", str(out)]
    arguments += ["--runs", str(tmp_path / "runs"), "--set", *changes]
    monkeypatch.setattr(sys, "argv", ["training_runs.py", *arguments])
    assert training_runs.main() == 0
    assert (out / "corpus.csv").read_text().startswith("package,part")
    head, *lines = map(json.loads, (out / "headway-0.jsonl").read_text().splitlines())
    assert (head["arm"], head["commit"], head["tokens"]) == ("headway-0", "abc", 8 * 48)
    assert head["config"]["steps"] == 8
    assert len(head["corpus"]["sha256"]) == 64
    assert [line["step"] for line in lines] == [3, 6, 8]
    assert [len(line["max_logit"]) for line in lines] == [1] * 3
    assert lines[-1]["held_out_bits_per_byte"] > 0
    run = Run(tmp_path / "runs" / "headway-0").read_metrics()
    assert lines[0]["loss"] == pytest.approx(sum(r["loss"] for r in run[:3]) / 3, abs=1e-5)
    sdpa = json.loads((out / "sdpa-0.jsonl").read_text().splitlines()[1])
    assert sdpa["max_logit"] == []


def test_every_arm_is_a_run_that_can_be(monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    import training_runs

    for arm in training_runs.arms():
        training_runs.config_of(arm).resolved()
    assert training_runs.command_of("explode-mla-clip") == (
        "headway train --preset 60m-explode --attention=mla --qk-clip-tau=100.0"
    )
