"""The command line: every command explains itself; a mistake is one message, not a traceback."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from headway import cli
from headway.cli.mask import parse
from headway.errors import ArgumentError

COMMANDS = cli.find_commands()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    try:
        status = cli.main(list(arguments))
    except SystemExit as stop:  # the parser of options exits by itself
        status = int(stop.code or 0)
    out, error = capsys.readouterr()
    return status, out, error


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    for name, (_, line) in COMMANDS.items():
        assert f"  {name} " in out
        assert line in out


@pytest.mark.parametrize("name", list(COMMANDS))
def test_each_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(importlib.import_module(COMMANDS[name][0]).main)
    status, out, _ = run(capsys, name, "--help")
    assert status == 0
    assert f"headway {name}" in out


def test_help_of_train_says_what_defaults_mean(capsys: pytest.CaptureFixture[str]) -> None:
    out = " ".join(run(capsys, "train", "--help")[1].replace("│", " ").split())
    for text in ("--depth INT", "(default: 18 * depth²)", "--resume", "(default: run-1, run-2"):
        assert text in out
    assert "None" not in out


@pytest.mark.parametrize("installed", [True, False])
def test_the_workshop_is_found_with_and_without_metadata(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its entry point, or in a checkout on PYTHONPATH; another package's commands are beside."""
    table = {"fly": "away"}
    monkeypatch.setitem(sys.modules, "birds", SimpleNamespace(COMMANDS=table))
    points = [importlib.metadata.EntryPoint("birds", "birds:COMMANDS", cli._GROUP)]
    monkeypatch.setattr(cli, "entry_points", lambda group: [*points, *[cli._WORKSHOP] * installed])
    commands = cli.find_commands()
    assert commands["fly"] == ("birds.fly", "away")
    assert commands["train"][0] == "headway_lab.cli.train"
    assert {"mask", "train", "sample", "bench", "experiment"} <= set(commands)


def test_without_the_workshop_the_library_has_its_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert set(cli.find_commands()) == set(cli.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[:2] == (
        0,
        f"headway {importlib.import_module('headway').__version__}\n",
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tain"], "no command 'tain'; there are: mask"),
        (["train", "--depht", "2"], "--depht"),
        (["train", "--depth", "two"], "two"),
        (["train", "--depth", "0"], "--depth 0"),
        (["train", "--corpus", "/nowhere"], "/nowhere"),
        (["train", "--name", "nothing", "--resume", "--runs", "/nowhere"], "no run 'nothing'"),
        (["sample", "nothing", "--runs", "/nowhere"], "no run 'nothing'"),
        (["sample"], "RUN"),
        (["mask", "causal("], "not an expression"),
        (["mask", "causal()", "--length", "0"], "--length 0"),
        (["mask", "causal()", "--tile", "-1"], "--tile -1"),
        (["mask", "alibi(2)", "--out", "score.html"], "is of a mask alone"),
        (["mask", "causal()", "--out", "mask.txt"], "must end in .svg, .png, .pdf or .html"),
        (["explain", "causal()", "--backend", "cuda"], "backend='cuda' is not known"),
        (["train", "--devices", "3", "--context-parallel", "2"], "must divide --devices 3"),
        (["mask", "causal()", "--score", "causal()"], "--score takes a score"),
        (["mask", "alibi(2)", "--score", "alibi(2)"], "goes with a mask"),
        (["mask", "window_bias([[1]], (1, 1))", "--score", "alibi(2)"], "goes with a mask"),
        (["mask", "t5_bias([[1, 2]])"], "1 rows"),
        (["mask", "document([0, 0])"], "ids has shape (2,)"),
        (["explain", "/nowhere.py:f"], "no file '/nowhere.py'"),
        (["explain", "mods.py"], "write mods.py:NAME"),
        (["explain", "causal()", "prefix(3)"], "a second mask"),
        (["explain", "--length", "0"], "--length 0"),
        (["explain", "--device", "nowhere"], "--device nowhere"),
        (["doctor", "--jsn"], "--jsn"),
        (["bench", "--repeats", "0"], "headway bench: --repeats 0 must be 1 or more\n"),
        (["bench", "--seconds", "-1"], "headway bench: --seconds -1 must be 0 or more\n"),
        (["train", "--context", "1"], "--context 1 must be an integer, 8 or more"),
        (["train", "--attention", "mla", "--kv-heads", "2"], "keys of its own; leave it out"),
    ],
)
def test_a_mistake_is_one_message(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, error = run(capsys, *arguments)
    assert status == 2
    assert named in error
    assert out == ""
    assert "Traceback" not in error


def test_listing_commands_loads_none_of_them() -> None:
    """Nor the libraries that only commands use."""
    code = (
        "import sys; from headway.cli import main; main(['--help']); main(['--version'])\n"
        "heavy = {'tyro', 'rich', 'matplotlib', 'triton', 'headway_lab.recipe', 'headway_lab.cli.train'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# -- train and sample -----------------------------------------------------------------------------


def test_train_then_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(99):
        (tmp_path / f"m{n}.py").write_text(f"x = {n}\n" * 9)
    runs = ["--runs", str(tmp_path / "runs")]
    small = ["--depth", "1", "--steps", "4", "--batch", "1", "--context", "16", "--threads", "1"]
    train = ["train", "--name", "small", "--corpus", str(tmp_path), *small, *runs]
    status, out, _ = run(capsys, *train)
    assert status == 0
    assert "step 4/4  loss" in out
    assert "done:" in out
    assert "bits per byte on the" in out
    # Again: refused, with the way out; that way leads on.
    status, out, error = run(capsys, *train)
    assert status == 2
    assert "--name small --resume" in error
    assert run(capsys, *train, "--resume")[0] == 0
    assert run(capsys, "train", "--name", "small", "--resume", *runs)[0] == 0
    # A setting that is given and differs, be it the default, is refused.
    status, _, error = run(capsys, "train", "--name", "small", "--resume", "--depth", "4", *runs)
    assert status == 2
    assert "--depth 4 (the run has 1)" in error
    first, again, other = (
        run(capsys, "sample", "small", "--prompt", "né ", "--length", "20", "--seed", seed, *runs)
        for seed in ("1", "1", "2")
    )
    assert first[0] == 0
    assert first[1].startswith("né ")
    assert first[1] == again[1] != other[1]
    assert "a second" in first[2]
    many = run(capsys, "sample", "small", "--prompt", "x", "né ", "--length", "20", *runs)[1]
    assert "--- prompt: 'x'\nx" in many
    assert "--- prompt: 'né '\nné " in many
    weights = tmp_path / "runs" / "small" / "model.safetensors"
    assert run(capsys, "sample", str(weights), "--length", "3")[0] == 0
    weights.write_bytes(b"damaged")
    status, _, error = run(capsys, "sample", "small", *runs)
    assert status == 2
    assert str(weights) in error


def test_hints_name_the_folder_of_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `train` says to type next is typed: also where runs lie elsewhere, under an odd name."""
    for n in range(40):
        (tmp_path / f"m{n}.py").write_text(f"x = {n}\n" * 9)
    small = ["--depth", "1", "--steps", "2", "--batch", "1", "--context", "16", "--threads", "1"]
    runs = tmp_path / "my runs"
    given = ["--corpus", str(tmp_path), "--runs", str(runs), "--name", "z"]
    status, out, _ = run(capsys, "train", *small, *given)
    assert status == 0
    program, *hint = shlex.split(out.rpartition("let it write: ")[2])
    assert program == "headway"
    assert run(capsys, *hint, "--length", "3")[0] == 0
    status, _, error = run(capsys, "sample", "z", "--runs", str(runs), "--seed", "-1")
    assert (status, error.count("\n")) == (2, 1)
    assert "--seed -1" in error
    status, _, error = run(capsys, "sample", "y", "--runs", str(runs))
    assert (status, "--resume" in error) == (2, False)
    (runs / "z" / "config.json").unlink()
    status, _, error = run(capsys, "sample", "z", "--runs", str(runs))
    assert "z is no run: config.json" in error


# -- doctor ---------------------------------------------------------------------------------------


def test_doctor_names_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    from headway.backends import table

    status, out, _ = run(capsys, "doctor", "--json")
    assert status == 0
    found = json.loads(out)
    assert set(found) == {
        "versions", "machine", "devices", "backends", "tuned tiles", "environment",
    }  # fmt: skip
    assert {"commit", "numpy", "tyro", "flash-attn-4"} <= set(found["versions"])
    for row in table():
        assert row.reason in found["backends"][row.name]
    status, text, _ = run(capsys, "doctor")
    assert status == 0
    for section, entries in found.items():
        assert section in text
        for name, value in (entries if isinstance(entries, dict) else {"": entries}).items():
            assert name in text
            assert value in text


def test_doctor_survives_what_it_examines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    def broken(*_: object) -> None:
        raise RuntimeError("no driver [here]")

    monkeypatch.setattr(torch.cuda, "device_count", broken)
    monkeypatch.setattr(importlib.import_module("headway.backends"), "table", broken)
    for option in ([], ["--json"]):
        status, out, _ = run(capsys, "doctor", *option)
        assert status == 0
        assert out.count("RuntimeError: no driver [here]") == 2
        assert torch.__version__ in out


def test_doctor_names_the_commit_that_pip_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor = importlib.import_module("headway.cli.doctor")
    home = doctor._home()
    said = json.dumps({"url": "git", "vcs_info": {"vcs": "git", "commit_id": "0123abc"}})

    def installed(place: Path, text: str | None) -> str:
        package = SimpleNamespace(locate_file=lambda name: place, read_text=lambda name: text)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: package)
        return doctor._installed_commit()

    assert installed(home, said) == "0123abc"
    assert installed(home, None) == ""
    assert installed(home.parent, said) == ""  # another installation


# -- mask -----------------------------------------------------------------------------------------


def test_mask_draws(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys,
        "mask",
        "causal() & sliding_window(33) | prefix(1)",
        "--length",
        "128",
        "--tile",
        "32",
    )
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "causal() & sliding_window(33) | prefix(1)"
    assert lines[1:5] == ["▒▒······", "▒▒▒▒····", "▒▒▒▒▒▒··", "▒▒··▒▒▒▒"]
    assert "full 0" in out
    assert "partial 9" in out
    assert "empty 7" in out


def test_mask_writes_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    status, out, _ = run(capsys, "mask", "causal()", "--out", str(tmp_path / "mask.png"))
    assert status == 0
    assert out.splitlines()[-1].startswith("wrote ")
    assert (tmp_path / "mask.png").read_bytes()[:4] == b"\x89PNG"
    status, out, error = run(capsys, "mask", "causal()", "--out", str(tmp_path / "no/folder.png"))
    assert (status, out) == (2, "")
    assert "cannot draw to" in error


def test_mask_writes_its_files_for_a_reader_that_stops(tmp_path: Path) -> None:
    """As in `headway mask ... | head -1`: the pipe is closed before anything is printed."""
    read, write = os.pipe()
    os.close(read)
    path = tmp_path / "mask.svg"
    command = [sys.executable, "-m", "headway.cli", "mask", "causal()", "--out", str(path)]
    subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    ElementTree.parse(path)


def test_mask_writes_a_page_and_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    paths = [str(tmp_path / name) for name in ("mask.html", "mask.svg")]
    status, out, _ = run(capsys, "mask", "causal()", "--out", *paths)
    assert status == 0
    assert out.splitlines()[-2:] == [f"wrote {path}" for path in paths]
    page, picture = (Path(path).read_text(encoding="utf-8") for path in paths)
    assert page.startswith("<!doctype html>")
    assert picture.startswith("<svg")


def test_mask_draws_batches_and_heads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mask.svg"
    status, out, _ = run(
        capsys, "mask", "causal() & padding([32, 128, 0, 1, 1])", "--length", "128",
        "--out", str(path),
    )  # fmt: skip
    assert status == 0
    lines = out.splitlines()
    assert lines[1:6] == ["batch 0", "▒▒······", "██······", "██······", "██······"]
    assert lines[6:11] == ["batch 1", "▒▒······", "██▒▒····", "████▒▒··", "██████▒▒"]
    assert "and 1 more; --out draws up to 16" in out
    drawn = ElementTree.parse(path).getroot()
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text.startswith("batch")] == [f"batch {n}" for n in range(5)]


def test_mask_draws_scores(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "score.svg"
    command = ["mask", "causal()", "--score", "alibi([1.0, 0.5])", "--length", "5"]
    status, out, _ = run(capsys, *command, "--out", str(path))
    assert status == 0
    lines = out.splitlines()
    assert lines[:3] == ["alibi(f32[2]), where causal()", "of logits of 0", "head 0"]
    assert lines[3:8] == [
        "██········", "▓▓██······", "▒▒▓▓██····", "░░▒▒▓▓██··", "  ░░▒▒▓▓██"
    ]  # fmt: skip
    assert lines[8:11] == ["head 1", "██········", "████······"]  # -0.5 is nearer to 0
    assert lines[-2] == "·· not kept     -4  ░░ -3  ▒▒ -2  ▓▓ -1  ██ 0"
    assert "-4" in path.read_text()
    status, out, _ = run(capsys, "mask", "softcap(3.5) >> log_sigmoid(0)", "--length", "4")
    assert status == 0
    assert out.splitlines()[-1].split()[-1] == "-0.693"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("alibi(4) >> softcap(30)", "alibi(f32[4]) >> softcap(30.0)"),
        ("relative_bias([[1, 2.5, -3]])", "relative_bias(f32[1, 3])"),
        ("t5_bias([[0]] * 4, max_distance=9)", "t5_bias(f32[4, 1])"),
        ("window_bias([[0]]*9, (2, 2))", "window_bias(f32[9, 1], (2, 2))"),
        ("bias([1, 2])", "bias(f32[2])"),
        ("spans([0, -1])", "spans(i64[2])"),
        ("chunked(4) & block_causal(2)", "chunked(4) & block_causal(2)"),
        ("block_table([[1, 0]], (4, 8))", "block_table(bool[1, 2], (4, 8))"),
    ],
)
def test_expressions_of_scores_and_tables(text: str, shown: str) -> None:
    assert repr(parse(text)) == shown


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("causal()", "causal(0)"),
        ("causal(offset=-2)", " causal ( - 2 ) "),
        (
            "~causal() | causal() & sliding_window(4)",
            "(~causal()) | (causal() & sliding_window(4))",
        ),
        ("document([0]*3 + 2*[1])", "document([0, 0, 0, 1, 1])"),
        ("document.from_lengths([3] + [2])", "document.from_cu_seqlens([0, 3, 5])"),
        ("document([0]*3 + 2*[1])", "document.from_lengths(q_len=5, lengths=[3, 2])"),
        ("padding([7 - 2])", "padding([5])"),
        ("prefix(2*3)", "prefix(length=6)"),
        ("dilated(2, step=2) | strided(3)", "strided(stride=3) | dilated(2, 2)"),
        ("neighborhood((2, 2), (1, 2))", "neighborhood(kernel=(1, 2), shape=(2, 4 - 2))"),
        ("tiled(causal() & prefix(9), (2, 4), (2, 2))", "tiled(~~causal(), (2, 4), (2, 2))"),
    ],
)
def test_expressions(text: str, same: str) -> None:
    import torch

    i, j = torch.arange(5)[:, None], torch.arange(5)
    kept = [parse(t)(torch.tensor(0), torch.tensor(0), i, j) for t in (text, same)]
    assert torch.equal(*kept)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "causal",
        "1",
        "[1]",
        "causal() and causal()",
        "causal() >> causal()",
        "~softcap(3)",
        "softcap(3) & causal()",
        "softcap(3) | softcap(3)",
        "softcap('3')",
        "block_table([[2]], 4)",
        "document([0]*1.5)",
        "relative_bias([[0], [0, 0]])",
        "causal() + causal()",
        "causal().offset",
        "causal(*[1])",
        "causal(**{})",
        "causal(offset=True)",
        "causal(1.5)",
        "causal((1, 2))",
        "prefix(causal())",
        "neighborhood((4, 4), ((1, 2), 3))",
        "tiled(3, (4,), (2,))",
        "causal(1, 2)",
        "causal(of=1)",
        "causal(lambda: 0)",
        "sliding_window()",
        "sliding_window(0)",
        "sliding_window(10**9)",
        "document(3)",
        "document([0.5])",
        "document([[0], 1])",
        "document([0]*-1)",
        "document.from_lengths([3, -1])",
        "document.from_file([3])",
        "(document).ids([3])",
        "document([0]*10000000000)",
        "document([99999999999999999999])",
        "document([0] - [0])",
        "prefix('a')",
        "__import__('os').system('true')",
        "(lambda: causal())()",
        "[causal() for _ in [1]]",
        "print(1)",
        "causal(); print()",
        "open('x')",
        "headway.causal()",
        "causal(\0)",
    ],
)
def test_what_is_no_mask_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        parse(text)


# -- explain --------------------------------------------------------------------------------------

MODS = """
import neighbour
import torch
import headway as hw

table = torch.zeros(8, 33, requires_grad=True)
window = hw.causal() & hw.sliding_window(9)


def score(score, b, h, q_idx, kv_idx):
    return score + table[h, (q_idx - kv_idx).clamp(-16, 16) + 16]


def mask(b, h, q_idx, kv_idx, w=100):
    return (q_idx - kv_idx).abs() < w * neighbour.factor


def other(a, b):
    return a


number = 3
if __name__ == "__main__":
    raise SystemExit("not this")
"""


def test_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mods.py"
    file.write_text(MODS)
    (tmp_path / "neighbour.py").write_text("factor = 1")
    before = list(sys.path)
    options = ["--length", "256", "--dtype", "bfloat16", "--device", "cpu", "--train"]
    status, out, _ = run(capsys, "explain", f"{file}:score", f"{file}:mask", *options)
    assert status == 0
    assert sys.path == before
    lines = out.splitlines()
    assert lines[0].startswith("q (1, 8, 256, 64) bfloat16, k (1, 8, 256, 64) bfloat16, ")
    assert lines[0].endswith("score = score, mask = mask")
    assert "backend: cpu" in lines
    assert "return score + table[h" in out
    options = ["--heads", "4", "--kv-heads", "2", "--kv-length", "90", "--value-width", "8"]
    status, out, _ = run(capsys, "explain", "alibi(4)", f"{file}:window", *options)
    assert status == 0
    assert "k (1, 2, 90, 64) float32, v (1, 2, 90, 8)" in out
    assert "mask = causal() & sliding_window(9)" in out
    assert "entropy" not in out
    options = ["--entropy", "--sink-mass", "--train", "--device", "cpu"]
    _, out, _ = run(capsys, "explain", "causal()", *options)
    assert "  entropy: in the forward\n" in out
    assert "  sink_mass: a pass of its own, one forward with values of one column; its" in out
    assert run(capsys, "explain", "--backend", "triton", "--device", "cpu")[0] == 1
    for name, words in {
        "other": "takes 2 arguments",
        "number": "is not a callable object",
        "none": "there are window, score, mask, other",
    }.items():
        status, out, error = run(capsys, "explain", f"{file}:{name}")
        assert status == 2
        assert words in error
    file.write_text("1 / 0")
    assert "could not be run: ZeroDivisionError" in run(capsys, "explain", f"{file}:score")[2]
