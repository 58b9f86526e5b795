"""`headway train` with every attention, optimizer and scaling: it runs, records, clips, resumes."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from headway.errors import ArgumentError
from headway_lab.recipe import train
from headway_lab.recipe.checkpoint import list_checkpoints

SMALL = 1e-3
CHOICES = [
    {"attention": "mla", "optimizer": "muonclip", "qk_clip_tau": SMALL},
    {"attention": "mla", "optimizer": "adamw", "scaling": "init"},
    {"attention": "gqa", "optimizer": "muon", "qk_clip_tau": SMALL, "scaling": "query"},
    {"attention": "gqa", "optimizer": "adamw", "qk_norm": True, "scaling": "init"},
    {"attention": "gqa", "optimizer": "muonclip"},
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join(map(str, c.values())))
def test_records_clips_and_resumes_to_the_same_bits(choice, tiny_in, tmp_path: Path, monkeypatch):
    module = importlib.import_module("headway_lab.recipe.train")
    monkeypatch.setattr(module.plots, "draw", lambda *_: None)
    config = replace(tiny_in(tmp_path), **choice)
    run = train(config, console=Console(quiet=True)).run
    records = run.read_metrics()
    assert all(len(layer) == 2 for r in records for layer in r["max_logit"])
    tau = choice.get("qk_clip_tau", 100.0 if choice["optimizer"] == "muonclip" else None)
    assert all(("gamma" in r) == (tau is not None) for r in records)
    if tau == SMALL:
        assert sum(r["clipped_heads"] for r in records) > 0
        assert all(0 < g <= 1 for r in records for layer in r["gamma"] for g in layer)
    weights = load_file(run.model)
    list_checkpoints(run.checkpoints)[-1].unlink()  # as if it had ended at the one before
    train(config, resume=True, console=Console(quiet=True))
    again = run.read_metrics()
    assert [(r["loss"], r["max_logit"]) for r in again] == [
        (r["loss"], r["max_logit"]) for r in records
    ]
    assert all(torch.equal(weights[name], t) for name, t in load_file(run.model).items())


def test_statistics_of_heads_are_those_of_the_step_and_change_nothing(tiny_in, tmp_path: Path):
    config = replace(tiny_in(tmp_path), steps=4, mask="causal")
    quiet = Console(quiet=True)
    records = {
        every: train(replace(config, name=str(every), stats_every=every), console=quiet)
        .run.read_metrics()
        for every in (0, 3)
    }  # fmt: skip
    pair = list(zip(*records.values(), strict=True))
    assert all(without["loss"] == measured["loss"] for without, measured in pair)
    assert [("entropy" in a, "entropy" in b) for a, b in pair] == [
        (False, n in (0, 3)) for n in range(4)
    ]
    for _, measured in (pair[0], pair[3]):
        shapes = {name: torch.tensor(measured[name]).shape for name in ("entropy", "sink_mass")}
        assert shapes == {"entropy": (1, 2), "sink_mass": (1, 2)}
    # Of equal weights: log(i + 1) and 1 / (i + 1).
    seen = torch.arange(1, config.context + 1)
    entropy, mass = (torch.tensor(pair[0][1][name]) for name in ("entropy", "sink_mass"))
    assert (entropy < seen.log().mean()).all()
    assert (entropy > seen.log().mean() / 2).all()
    torch.testing.assert_close(mass, (1 / seen).mean().expand(1, 2), rtol=0.5, atol=0)


def test_where_entropies_cannot_be_measured(tiny_in, tmp_path: Path):
    config = tiny_in(tmp_path)
    assert config.resolved().stats_every == 50
    for choice, why in (
        ({"implementation": "sdpa", "mask": "causal"}, "--implementation sdpa"),
        ({"devices": 2}, "2 devices that split one sequence"),
    ):
        assert replace(config, **choice).resolved().stats_every == 0
        with pytest.raises(ArgumentError, match=f"--stats-every 7 with {why}.*: pass --stats-e"):
            replace(config, stats_every=7, **choice).resolved()
    assert replace(config, devices=2, context_parallel=1).resolved().stats_every == 50
    with pytest.raises(ArgumentError, match="--stats-every -1"):
        replace(config, stats_every=-1).resolved()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"attention": "mla", "qk_norm": True}, "--qk-norm is for --attention gqa"),
        ({"qk_norm": True, "qk_clip_tau": 30.0}, "leave out --qk-clip-tau"),
        ({"qk_norm": True, "optimizer": "muonclip"}, "choose --optimizer muon or adamw"),
        ({"qk_clip_tau": 0.0}, "--qk-clip-tau 0.0"),
        ({"attention": "mla", "width": 4, "heads": 2}, "heads of 2"),
    ],
)
def test_settings_that_cannot_be(choice, message, tiny_in, tmp_path: Path):
    with pytest.raises(ArgumentError, match=message):
        replace(tiny_in(tmp_path), **choice).resolved()
