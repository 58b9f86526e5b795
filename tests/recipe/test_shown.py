"""What a run shows and leaves behind: files, lines, pictures."""

import io
from unittest import mock

import pytest
import torch
from rich.console import Console

from headway_lab.recipe import plots
from headway_lab.recipe.checkpoint import load_model, save_model
from headway_lab.recipe.model import ModelConfig, Transformer
from headway_lab.recipe.report import Report


def test_equal_weights_make_equal_files(tmp_path):
    """safetensors writes metadata in an order of its own; here it is sorted."""
    model = Transformer(ModelConfig(depth=1, width=16, heads=2, kv_heads=1, context=12))
    files = set()
    for n in range(12):
        save_model(tmp_path / f"{n}.safetensors", model.config, model.state_dict(), step=3)
        files.add((tmp_path / f"{n}.safetensors").read_bytes())
    assert len(files) == 1
    read = load_model(tmp_path / "0.safetensors").state_dict()
    assert all(torch.equal(read[name], t) for name, t in model.state_dict().items())


def test_a_line_says_when_it_looked_at_the_held_out_files():
    console = Console(file=io.StringIO(), width=200)
    with Report(console, total=40, start=0) as report:
        record = {"loss": 1.0, "bits_per_byte": 2.0, "tokens": 8, "tokens_per_second": 8.0}
        record["max_logit"] = [[1.0]]
        report.step(record | {"step": 2, "held_out_bits_per_byte": 3.25})
        report.step(record | {"step": 4})
    lines = console.file.getvalue().splitlines()
    assert ["held out 3.250 at step 2" in line for line in lines] == [True, True]


def test_the_heads_that_stand_out_have_a_line_of_their_own():
    console = Console(file=io.StringIO(), width=200)
    with Report(console, total=4, start=0) as report:
        record = {"loss": 1.0, "bits_per_byte": 2.0, "tokens": 8, "tokens_per_second": 8.0}
        record["max_logit"] = [[1.0, 1.0]] * 2
        heads = {"entropy": [[1.5, 2.0], [0.25, 1.0]], "sink_mass": [[0.0, 0.5], [0.125, 0.0]]}
        report.step(record | {"step": 1} | heads)
        report.step(record | {"step": 2})
    first, of_heads, second = console.file.getvalue().splitlines()
    assert of_heads.split("  ")[1:] == [
        "entropy 0.25 (layer 1 head 0) to 2.00 (layer 0 head 1)",
        "sink mass up to 0.50 (layer 0 head 1) at step 1",
    ]
    assert first.startswith("step 1/4")
    assert second.startswith("step 2/4")


def test_pictures_carry_the_name_of_the_run(tmp_path):
    pytest.importorskip("matplotlib")
    records = [{"step": n, "bits_per_byte": 8.0 / n, "max_logit": [[1.0 * n]]} for n in (1, 2, 3)]
    figure = plots.loss_figure(records)
    assert all(tick == round(tick) for tick in figure.axes[0].get_xticks())
    titles = []
    with mock.patch.object(plots, "write_beside", lambda path, write: titles.append(write)):
        plots.draw(records, tmp_path / "mine")
    assert [write.__defaults__[0].get_suptitle() for write in titles] == ["mine", "mine"]
