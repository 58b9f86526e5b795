"""Training runs: resumed ones equal unbroken ones, and nothing that was saved is ever lost."""

import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from rich.console import Console

from headway import cli
from headway.errors import ArgumentError, CheckpointError, HeadwayError
from headway_lab.recipe import TrainConfig, Trained, report, train
from headway_lab.recipe.checkpoint import list_checkpoints, load_checkpoint, load_model, write_text
from headway_lab.recipe.config import from_json, learning_rate, to_json
from headway_lab.recipe.errors import CorpusError, RunError
from headway_lab.recipe.run import Run


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Do something once, right after that step has been recorded."""
    original = report.Report.step
    done: list[bool] = []

    def patched(self: report.Report, record: dict[str, Any]) -> None:
        original(self, record)
        if record["step"] == step and not done:
            done.append(True)
            act()

    monkeypatch.setattr(report.Report, "step", patched)


def losses(run: Run) -> list[tuple[int, float, Any, float | None]]:
    """Everything recorded but the speed."""
    return [
        (r["step"], r["loss"], r["max_logit"], r.get("held_out_bits_per_byte"))
        for r in run.read_metrics()
    ]


def same_weights(a: Run, b: Run) -> bool:
    one, two = (safetensors.torch.load_file(run.model) for run in (a, b))
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


@pytest.fixture(scope="module")
def unbroken(
    tiny_in: Callable[[Path], TrainConfig], tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """One run of the tiny configuration from its first step to its last, with all it leaves."""
    return train(tiny_in(tmp_path_factory.mktemp("unbroken")), console=Console(quiet=True))


@pytest.fixture
def finished(unbroken: Trained, tiny: TrainConfig) -> Run:
    """That run as if it had been made here: a folder can be moved."""
    shutil.copytree(unbroken.run.folder, tiny.runs / "tiny")
    return Run.find(tiny.runs, "tiny")


@pytest.fixture
def pictures() -> None:
    """For tests of the pictures that end a run; the others go without."""


@pytest.fixture(autouse=True)
def _short_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("headway_lab.recipe.train")
    monkeypatch.setattr(module, "samples", lambda *_: "")
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(module.plots, "draw", lambda *_: None)


# -- what a run leaves ----------------------------------------------------------------------------


def test_the_folder_of_a_run(unbroken: Trained) -> None:
    run = unbroken.run
    assert unbroken.step == 12
    assert unbroken.stopped_by is None
    there = {path.name for path in run.folder.iterdir()} - {".lock"}
    assert there == {
        "config.json", "corpus.csv", "metrics.jsonl", "checkpoints", "model.safetensors", "loss.png",
        "max_logit.png", "sample.txt",
    }  # fmt: skip
    assert [p.name for p in list_checkpoints(run.checkpoints)] == [
        "step-000008.safetensors",
        "step-000012.safetensors",
    ]
    records = run.read_metrics()
    assert [r["step"] for r in records] == list(range(1, 13))
    assert [r["step"] for r in records if "held_out_bits_per_byte" in r] == [5, 10, 12]
    assert all(len(layer) == 2 for r in records for layer in r["max_logit"])
    described = json.loads((run.folder / "config.json").read_text())
    assert described["config"]["steps"] == 12
    assert described["corpus"]["held_out"]["bytes"] == records[-1]["held_out_bytes"]
    for picture in ("loss.png", "max_logit.png"):
        assert (run.folder / picture).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "prompt: 'class '" in (run.folder / "sample.txt").read_text()


def test_it_learns(tiny: TrainConfig, quiet: Console) -> None:
    """This text has 10 letters and long repeats: far below the 8 bits of the first step."""
    records = train(replace(tiny, steps=60, eval_every=60), console=quiet).run.read_metrics()
    assert records[0]["bits_per_byte"] > 7.9
    assert records[-1]["held_out_bits_per_byte"] < 4


def test_held_out_bits_are_those_of_the_saved_model(unbroken: Trained, text_folder: Path) -> None:
    """Computed here again from the files, one whole sequence after the other."""
    from headway_lab.recipe.corpus import load_corpus

    corpus = load_corpus(text_folder)
    model = load_model(unbroken.run.model)
    stream, ids = [], []
    for n, text in enumerate(corpus.held_out_texts):
        stream += [256, *text]
        ids += [n] * (len(text) + 1)
    nats = 0.0
    for at in range(0, len(ids), 24):
        tokens = torch.tensor([stream[at : at + 24]])
        targets = torch.tensor([*stream[at + 1 :], 256][: tokens.shape[1]])
        with torch.no_grad():
            logits = model(tokens, torch.tensor([ids[at : at + 24]]))[0].double()
        nats -= logits.log_softmax(-1)[range(len(targets)), targets].sum().item()
    bits = nats / torch.tensor(2.0, dtype=torch.float64).log().item() / corpus.held_out_bytes
    assert unbroken.run.read_metrics()[-1]["held_out_bits_per_byte"] == pytest.approx(
        bits, rel=1e-5
    )


def test_training_leaves_the_global_state_alone(tiny: TrainConfig, quiet: Console) -> None:
    before = torch.get_rng_state(), torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    train(replace(tiny, steps=1), console=quiet)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_num_threads(), signal.getsignal(signal.SIGINT)) == before[1:]


# -- stopping and continuing ----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [7, 8])  # between two checkpoints, and at one
def test_a_resumed_run_equals_an_unbroken_one(
    number: signal.Signals, step: int, tiny: TrainConfig, quiet: Console, unbroken: Trained,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    at_step(monkeypatch, step, lambda: os.kill(os.getpid(), number))
    stopped = train(tiny, console=quiet)
    assert (stopped.step, stopped.stopped_by) == (step, number)
    assert load_checkpoint(stopped.run.newest_checkpoint()).step == step
    assert not (stopped.run.folder / "sample.txt").exists()
    resumed = train(tiny, resume=True, console=quiet)
    assert (resumed.step, resumed.stopped_by) == (12, None)
    assert losses(resumed.run) == losses(unbroken.run)
    assert same_weights(resumed.run, unbroken.run)


def test_a_killed_run_continues_from_its_last_checkpoint(
    tiny: TrainConfig, quiet: Console, unbroken: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was recorded after the checkpoint, half a line included, is recorded again."""

    def die() -> None:
        with open(tiny.runs / "tiny" / "metrics.jsonl", "a") as file:
            file.write('{"step": 11, "lo')
        raise ZeroDivisionError

    at_step(monkeypatch, 10, die)
    with pytest.raises(ZeroDivisionError):
        train(tiny, console=quiet)
    run = Run.find(tiny.runs, "tiny")
    assert load_checkpoint(run.newest_checkpoint()).step == 8
    assert len(run.read_metrics()) == 10
    assert losses(train(tiny, resume=True, console=quiet).run) == losses(unbroken.run)


def test_a_run_killed_at_once_can_be_resumed(
    tiny: TrainConfig, quiet: Console, unbroken: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, 1, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tiny, console=quiet)
    assert losses(train(tiny, resume=True, console=quiet).run) == losses(unbroken.run)


def test_resuming_a_finished_run_draws_its_pictures_again(
    tiny: TrainConfig, quiet: Console, finished: Run, pictures: None
) -> None:
    run, before = finished, losses(finished)
    (run.folder / "loss.png").unlink()
    assert train(tiny, resume=True, console=quiet).step == 12
    assert losses(run) == before
    assert (run.folder / "loss.png").exists()


def test_without_matplotlib_it_says_so(
    tiny: TrainConfig,
    pictures: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = train(replace(tiny, steps=2)).run
    assert "pip install matplotlib" in capsys.readouterr().out
    assert not (run.folder / "loss.png").exists()
    assert (run.folder / "sample.txt").exists()


# -- refusals: what, where, the way out, and nothing touched --------------------------------------


def refused(error: type[HeadwayError], match: str, config: TrainConfig, resume: bool) -> None:
    """Raised, and every file is as it was."""
    runs = config.runs

    def files() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in runs.rglob("*") if p.is_file() and p.name != ".lock"}

    before = files()
    with pytest.raises(error, match=match):
        train(config, resume, console=Console(quiet=True))
    assert files() == before


def test_a_name_is_never_overwritten(tiny: TrainConfig, finished: Run) -> None:
    refused(RunError, "exists and is not overwritten.*--name tiny --resume", tiny, resume=False)


def test_runs_without_a_name_are_numbered(tiny: TrainConfig, quiet: Console) -> None:
    config = replace(tiny, name=None, steps=1)
    names = [train(config, console=quiet).run.name for _ in range(3)]
    assert names == ["run-1", "run-2", "run-3"]
    assert train(config, resume=True, console=quiet).run.name == "run-3"


@pytest.mark.parametrize("name", ["a/b", "..", "", ".hidden", "with space", "/tmp/x", "[b]"])
def test_names_that_are_no_names(name: str, tiny: TrainConfig) -> None:
    refused(RunError, "--name", replace(tiny, name=name), resume=False)


def test_nothing_to_resume(tiny: TrainConfig, quiet: Console) -> None:
    refused(RunError, r"no run 'tiny' in .* \(there: none\)", tiny, resume=True)
    train(replace(tiny, steps=1, name="other"), console=quiet)
    refused(RunError, r"\(there: other\)", tiny, resume=True)


def test_settings_cannot_change_on_the_way(tiny: TrainConfig, finished: Run) -> None:
    changed = replace(tiny, head_lr=0.5, batch=3)
    refused(
        RunError, r"asked for .*--batch 3 \(the run has 2\).*--head-lr 0.5", changed, resume=True
    )


def test_the_text_cannot_change_on_the_way(
    tiny: TrainConfig, quiet: Console, tmp_path: Path, text_folder: Path
) -> None:
    copy = shutil.copytree(text_folder, tmp_path / "copy")
    config = replace(tiny, corpus=copy, steps=2)
    train(config, console=quiet)
    (copy / "m0.py").write_text("changed")
    refused(CorpusError, "SHA-256.*start a new run", config, resume=True)


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut short":
        data = data[: len(data) // 2]
    elif how == "one bit":
        data[-100] ^= 1
    elif how == "empty":
        data = bytearray()
    elif how == "not safetensors":
        data = bytearray(b"hello, this is no checkpoint")
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["cut short", "one bit", "empty", "not safetensors"])
def test_a_damaged_checkpoint(
    how: str, tiny: TrainConfig, quiet: Console, unbroken: Trained, finished: Run
) -> None:
    """It is named, with the one that can be used instead; deleting it, the run can be finished."""
    run = finished
    newest = run.newest_checkpoint()
    damage(newest, how)
    refused(CheckpointError, "step-000012.* is damaged.*continues from step-000008", tiny, True)
    newest.unlink()
    assert losses(train(tiny, resume=True, console=quiet).run) == losses(unbroken.run)
    damage(run.newest_checkpoint(), how)
    list_checkpoints(run.checkpoints)[0].unlink()
    refused(CheckpointError, "is damaged.*no other checkpoint.*another --name", tiny, True)


def test_a_missing_checkpoint(tiny: TrainConfig, finished: Run) -> None:
    for path in list_checkpoints(finished.checkpoints):
        path.unlink()
    refused(CheckpointError, "no checkpoint in", tiny, resume=True)


def test_a_checkpoint_of_another_model(tiny: TrainConfig, quiet: Console, finished: Run) -> None:
    other = train(replace(tiny, steps=2, width=32, name="other"), console=quiet).run
    shutil.copy(other.newest_checkpoint(), finished.newest_checkpoint())
    refused(CheckpointError, "does not fit", tiny, resume=True)


@pytest.mark.parametrize(
    "text", ["", "{", '{"config": {}}', "[]", "3", '{"config": {}, "corpus": {}, "versions": {}}']
)
def test_a_damaged_config(text: str, tiny: TrainConfig, finished: Run) -> None:
    (finished.folder / "config.json").write_text(text)
    refused(RunError, "config.json is damaged", tiny, resume=True)


def test_damaged_metrics_are_not_cut_off(tiny: TrainConfig, finished: Run) -> None:
    run = finished
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text(lines[0] + "oops\n" + "".join(lines[2:]))
    refused(RunError, "line 2 of 12", tiny, resume=True)
    for other in ("[1]", '{"loss": 1.0}'):
        run.metrics.write_text(lines[0] + other + "\n" + "".join(lines[2:]))
        refused(RunError, "line 2 of 12", tiny, resume=True)
    run.metrics.unlink()
    refused(RunError, "metrics.jsonl is damaged", tiny, resume=True)


def test_one_process_trains_a_run(tiny: TrainConfig, finished: Run) -> None:
    with finished.locked():
        refused(RunError, "by another process", tiny, resume=True)


def test_a_run_that_diverges_stops_and_keeps_its_checkpoint(
    tiny: TrainConfig, quiet: Console
) -> None:
    with pytest.raises(HeadwayError, match=r"smaller --lr"):
        train(replace(tiny, lr=1e6, head_lr=1e6), console=quiet)
    run = Run.find(tiny.runs, "tiny")
    state = load_checkpoint(run.newest_checkpoint())
    assert all(t.isfinite().all() for t in state.model.values())


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file of this process can grow beyond `limit` bytes: a write then fails like on a full disk
    (as EFBIG, where a disk says ENOSPC)."""
    usual, signalled = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        signal.signal(signal.SIGXFSZ, signalled)


def options(config: TrainConfig) -> list[str]:
    default = TrainConfig()
    given = {k: v for k, v in vars(config).items() if v != getattr(default, k)}
    return [part for k, v in given.items() for part in ("--" + k.replace("_", "-"), str(v))]


def test_a_full_disk(
    tiny: TrainConfig, quiet: Console, unbroken: Trained, finished: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Half way, no file can be written any more. The checkpoint that was there is whole, the
    message says which and the way out, and with room the run is finished as if nothing was."""
    for path in list_checkpoints(finished.checkpoints)[1:]:
        path.unlink()  # back to step 8
    size = finished.newest_checkpoint().stat().st_size
    with full_disk(size - 1):
        assert cli.main(["train", *options(tiny), "--resume"]) == 2
    error = capsys.readouterr().err
    assert "could not write" in error
    assert "step-000012.safetensors" in error
    assert "free some space" in error
    assert [p.name for p in finished.checkpoints.iterdir()] == ["step-000008.safetensors"]
    assert losses(train(tiny, resume=True, console=quiet).run) == losses(unbroken.run)


def test_ctrl_c_in_a_terminal(tiny: TrainConfig, quiet: Console) -> None:
    """The whole command: interrupted while it trains, it saves, says how to go on, and goes on."""
    config = replace(tiny, steps=4000, eval_every=4000)
    command = [sys.executable, "-m", "headway.cli", "train", *options(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        metrics = tiny.runs / "tiny" / "metrics.jsonl"
        deadline = time.monotonic() + 600
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT, error
    assert "headway train --name tiny --resume" in out
    run = Run.find(tiny.runs, "tiny")
    assert load_checkpoint(run.newest_checkpoint()).step == len(run.read_metrics()) >= 1


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_depth_alone_makes_a_run(depth: int) -> None:
    settings = TrainConfig(depth=depth).resolved()
    assert settings.heads % settings.kv_heads == 0
    assert settings.kv_heads < settings.heads or depth == 1
    assert from_json(json.loads(json.dumps(to_json(settings)))) == settings
    assert settings.resolved() == settings


def test_processes_share_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    for given, threads in [
        ({}, 12), ({"devices": 4}, 3), ({"devices": 16, "batch": 16}, 1), ({"device": "cuda"}, 4),
        ({"threads": 7, "devices": 4}, 7),
    ]:  # fmt: skip
        assert TrainConfig(**given).resolved().threads == threads


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"depth": 0}, "--depth 0"),
        ({"width": 0}, "--width 0"),
        ({"width": 130}, "--width 130"),
        ({"width": 12, "heads": 4}, "even"),
        ({"heads": 6, "width": 192, "kv_heads": 4}, "--kv-heads 4"),
        ({"heads": -1}, "--heads"),
        ({"steps": 0}, "--steps 0"),
        ({"batch": -3}, "--batch -3"),
        ({"context": 0}, "--context 0"),
        ({"threads": 0}, "--threads 0"),
        ({"lr": 0.0}, "--lr"),
        ({"lr": float("nan")}, "--lr"),
        ({"head_lr": float("inf")}, "--head-lr"),
        ({"weight_decay": -1.0}, "--weight-decay"),
        ({"warmup": 1.5}, "--warmup"),
        ({"cooldown": -0.1}, "--cooldown"),
        ({"seed": -1}, "--seed"),
        ({"save_every": 0}, "--save-every"),
        ({"eval_every": 0}, "--eval-every"),
        ({"sample_bytes": -1}, "--sample-bytes"),
        ({"softcap": 0.0}, "--softcap"),
        ({"implementation": "sdpa"}, "sdpa with --mask documents"),
        ({"implementation": "sdpa", "mask": "causal", "softcap": 30.0}, "sdpa with --softcap"),
        ({"implementation": "sdpa", "mask": "causal", "qk_clip_tau": 9.0}, "sdpa with --qk-clip"),
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any], named: str, tiny: TrainConfig) -> None:
    config = replace(tiny, width=None, heads=None) if "heads" not in wrong else tiny
    refused(ArgumentError, named, replace(config, **wrong), resume=False)
    assert not tiny.runs.exists()


def test_no_cuda(tiny: TrainConfig) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    refused(ArgumentError, "--device cuda", replace(tiny, device="cuda"), resume=False)


def test_the_learning_rate_rises_stays_and_falls() -> None:
    settings = TrainConfig(steps=100, warmup=0.1, cooldown=0.5).resolved()
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[:11] == pytest.approx([0.1 * n for n in range(1, 11)] + [1.0])
    assert rates[10:51] == [1.0] * 41
    assert rates[99] == pytest.approx(1 / 50)
    assert all(a >= b for a, b in pairwise(rates[50:]))


def test_bfloat16(tiny: TrainConfig, quiet: Console) -> None:
    """Weights and optimizer stay in float32; the losses are near those of float32."""
    half, full = (
        train(replace(tiny, dtype=dtype, name=dtype), console=quiet).run
        for dtype in ("bfloat16", "float32")
    )
    state = load_checkpoint(half.newest_checkpoint())
    kept = (state.model | state.optimizer).values()
    assert {t.dtype for t in kept if t.is_floating_point()} == {torch.float32}
    for a, b in zip(half.read_metrics(), full.read_metrics(), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.05)
    assert losses(half) != losses(full)


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    path.with_name("file.partial").mkdir()  # so that writing beside fails
    with pytest.raises(CheckpointError, match=r"could not write.*was saved before"):
        write_text(path, "new")
    assert path.read_text() == "old"
