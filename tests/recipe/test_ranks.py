"""A run on several processes over gloo: the losses of one, and checkpoints that any number reads."""

import math
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console

from headway.errors import ArgumentError
from headway_lab.cli import train as command
from headway_lab.recipe import TrainConfig, plots, train
from headway_lab.recipe.errors import RunError
from headway_lab.recipe.run import Run
from processes import run_ranks

QUIET = Console(quiet=True)
TINY = TrainConfig(
    depth=2, width=32, heads=2, kv_heads=1, context=48, batch=4, steps=6, save_every=3,
    eval_every=3, threads=1,
)  # fmt: skip


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A corpus that is read in no time; the name of a folder that forks find as well."""
    folder = tmp_path / "text"
    folder.mkdir()
    g = torch.Generator().manual_seed(0)
    for n in range(30):
        size = int(torch.randint(10, 120, (), generator=g))
        letters = torch.randint(97, 105, (size,), generator=g).tolist()
        (folder / f"{n}.py").write_bytes(bytes(letters))
    return folder


def losses(runs: Path, name: str) -> list[float]:
    return [r["loss"] for r in Run.find(runs, name).read_metrics()]


def config(texts: Path, **fields) -> TrainConfig:
    return replace(TINY, corpus=texts, runs=texts.parent / "runs", **fields)


def ranks(texts: Path, world: int, *cases) -> None:
    run_ranks(world, tuple(_Case(case, str(texts)) for case in cases), texts.parent)


@contextmanager
def exactly():
    """Models are made in float64, in which sums hardly depend on their order. Pictures are left
    out: a fork that draws loads Matplotlib first."""
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.object(plots, "draw"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


class _Case:
    """A case that is told where the texts are."""

    def __init__(self, case, texts: str):
        self.case, self.texts = case, texts

    def __call__(self, world: int, rank: int) -> None:
        with exactly():
            self.case(Path(self.texts), world)


def trained_together(texts: Path, world: int) -> None:
    for optimizer in ("muon", "muonclip"):
        given = {"optimizer": optimizer, "devices": world}
        train(config(texts, name=f"{optimizer}-{world}", **given), console=QUIET)
    train(config(texts, name="rows", devices=world, context_parallel=1), console=QUIET)


def data_and_context(texts: Path, world: int) -> None:
    train(config(texts, name="dp", devices=world, context_parallel=2), console=QUIET)


def resumed(texts: Path, world: int) -> None:
    train(config(texts, name="other", devices=world), resume=True, console=QUIET)


def close(a: list[float], b: list[float], within: float = 1e-10) -> None:
    assert len(a) == len(b) == TINY.steps
    assert all(math.isclose(x, y, rel_tol=within) for x, y in zip(a, b, strict=True)), (a, b)


def test_losses_are_those_of_one_process(texts):
    runs = texts.parent / "runs"
    for optimizer in ("muon", "muonclip"):
        with exactly():
            train(config(texts, name=optimizer, optimizer=optimizer), console=QUIET)
    ranks(texts, 2, trained_together)
    for optimizer in ("muon", "muonclip"):
        # PyTorch's Muon, which is MuonClip's, multiplies in bfloat16.
        within = 1e-3 if optimizer == "muonclip" else 1e-10
        close(losses(runs, optimizer), losses(runs, f"{optimizer}-2"), within)
        one, both = (Run.find(runs, n).read_metrics()[-1] for n in (optimizer, f"{optimizer}-2"))
        bits = [r["held_out_bits_per_byte"] for r in (one, both)]
        assert math.isclose(*bits, rel_tol=within)
        for a, b in zip(one["max_logit"], both["max_logit"], strict=True):
            assert torch.tensor(a).allclose(torch.tensor(b), rtol=max(within, 1e-6))
    close(losses(runs, "muon"), losses(runs, "rows"))
    one, both = (Run.find(runs, name).read_metrics()[0] for name in ("muon", "rows"))
    for name in ("max_logit", "entropy", "sink_mass"):
        assert torch.tensor(one[name]).allclose(torch.tensor(both[name]), rtol=1e-5), name
    assert (runs / "muon-2" / "checkpoints" / "step-000006").is_dir()
    assert (runs / "muon-2" / "model.safetensors").exists()


def test_resumed_on_another_number(texts):
    runs = texts.parent / "runs"
    with exactly():
        train(config(texts, name="other"), console=QUIET)
    whole = losses(runs, "other")
    ranks(texts, 4, data_and_context)
    close(whole, losses(runs, "dp"))
    _cut(runs / "dp")  # four wrote it, one goes on
    with exactly():
        train(config(texts, name="dp"), resume=True, console=QUIET)
    close(whole, losses(runs, "dp"))
    _cut(runs / "other")  # one wrote it, two go on
    (texts.parent / "store").unlink()
    ranks(texts, 2, resumed)
    close(whole, losses(runs, "other"))


def _cut(run: Path) -> None:
    """As if it had been stopped after its third step."""
    last = run / "checkpoints" / "step-000006"
    shutil.rmtree(last) if last.is_dir() else last.with_name("step-000006.safetensors").unlink()


def test_the_command_starts_processes(texts, capfd):
    arguments = [
        "--devices", "2", "--depth", "1", "--width", "32", "--context", "32", "--batch", "2",
        "--steps", "2", "--name", "started", "--corpus", str(texts), "--threads", "1",
        "--runs", str(texts.parent / "runs"),
    ]  # fmt: skip
    assert command.main(arguments) == 0
    assert len(losses(texts.parent / "runs", "started")) == 2
    assert capfd.readouterr().out.count("done: ") == 1  # the first process speaks for all
    with pytest.raises(RunError, match="exists and is not overwritten"):
        command.main(arguments)
    assert "Traceback" not in capfd.readouterr().err


def test_what_cannot_be_shared_out():
    for fields in ({"devices": 3, "context_parallel": 2}, {"devices": 8, "context_parallel": 1}):
        with pytest.raises(ArgumentError, match="--context-parallel"):
            replace(TINY, **fields).resolved()
    with pytest.raises(ArgumentError, match="--devices 2"):
        train(replace(TINY, devices=2), console=QUIET)
