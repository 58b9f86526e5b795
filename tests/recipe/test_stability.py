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
