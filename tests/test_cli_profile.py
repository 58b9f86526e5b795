"""`headway profile`: the parts of a step add up to the step, and each is what it says."""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from headway.cli import main, profile

STEP = """
import time
import torch
import headway as hw

x = torch.randn(1, 300, 32)
linear = torch.nn.Linear(32, 96)
table = torch.zeros(2, 65, requires_grad=True)
window = 100

def score(score, b, h, q_idx, kv_idx):
    return score + table[h, (q_idx - kv_idx).clamp(0, 64)]

def step(rounds=1):
    q, k, v = linear(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    out = sum(hw.attention(q, k, v, score, hw.causal() & hw.sliding_window(window)) for _ in range(rounds))
    (out + hw.attention(q, k, v, mask=hw.causal())).sum().backward()
    time.sleep(0.05)

def growing():
    global window
    window += 1
    step(1)

def nothing():
    linear(x).sum().backward()

def takes(batch): ...

def fails():
    raise ValueError("no data")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(STEP)
    return tmp_path / "train.py"


def parts(out: str, column: int) -> dict[str, float]:
    """Milliseconds, of the first step (0) or the mean of the others (1)."""
    found = {}
    for name, *cells in re.findall(
        r"^(\w[\w: ]*?) +([\d.]+) +[\d.]+% +([\d.]+) +[\d.]+%", out, re.M
    ):
        found[name.removeprefix("attention: ")] = float(cells[column])
    return found


def test_a_step_is_told_in_parts(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = file.with_name("trace.json")
    start = time.perf_counter()
    assert main(["profile", f"{file}:step", "--steps", "2", "--trace", str(trace)]) == 0
    wall = 1e3 * (time.perf_counter() - start)
    out = capsys.readouterr().out
    for column in (0, 1):
        ms = parts(out, column)
        assert list(ms) == [*profile.PARTS, "everything else", "all"]
        assert sum(ms.values()) - ms["all"] == pytest.approx(ms["all"], abs=0.05)
        assert min(ms["forward"], ms["backward"], ms["host"]) > 0
        assert ms["everything else"] > 50  # where it sleeps
        assert ms["all"] < wall
    assert parts(out, 0)["block masks"] > 0
    assert parts(out, 1)["block masks"] == 0  # remembered
    assert re.findall(r"^attention: (\w+) .* (\d+)$", out, re.M) == [
        ("forward", "2"),
        ("backward", "2"),
    ]
    (bare,) = re.findall(r"Without the profiler a step takes ([\d.]+) ms", out)
    assert 50 < float(bare) < wall
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"headway::attention", "headway::forward", "headway::backward"} <= names


def test_masks_that_are_built_at_every_step_show(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", f"{file}:growing", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert parts(out, 1)["block masks"] > 0
    assert re.search(r"^attention: block masks .* 1$", out, re.M)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["{}:nothing"], "made no call of headway's attention"),
        (["{}:takes"], "takes batch; write a function without arguments"),
        (["{}:fails"], "failed: ValueError: no data"),
        (["{}:x"], "is not callable, but of type Tensor"),
        (["{}:no"], "has no 'no'; there are"),
        (["{}"], "is a file; write"),
        (["{}:step", "--steps", "0"], "--steps 0"),
        (["{}:step", "--trace", "t.txt"], "must end in .json"),
    ],
)
def test_mistakes(
    arguments: list[str], named: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *(text.format(file) for text in arguments)]) == 2
    assert named in capsys.readouterr().err


def event(name: str, self_us: float, *children, kernels: tuple = ()) -> SimpleNamespace:
    made = SimpleNamespace(
        name=name, self_cpu_time_total=self_us, cpu_children=list(children), cpu_parent=None,
        cpu_time_total=self_us + sum(c.cpu_time_total for c in children), device_type=DeviceType.CPU,
        kernels=[SimpleNamespace(name=n, duration=us) for n, us in kernels],
    )  # fmt: skip
    for child in children:
        child.cpu_parent = made
    return made


def tree(*roots: SimpleNamespace) -> list[SimpleNamespace]:
    return [x for root in roots for x in (root, *tree(*root.cpu_children))]


def test_a_gpu_is_told_by_its_kernels() -> None:
    """Events as of a card, which this machine has not: the backward is on another thread."""
    mask = event("headway::block_mask", 100, event("aten::sort", 200, kernels=(("sort", 50),)))
    forward = event(
        "headway::forward", 1000, mask, event("aten::empty", 30), kernels=(("attend", 4000),)
    )
    call = event("headway::attention", 70, forward, kernels=(("headway::attention", 9999),))
    linear = event("aten::addmm", 500, kernels=(("gemm", 2000),))
    step = event(profile._STEP, 12000, call, linear)
    node = event("_AttentionBackward", 40, event(
        "headway::backward", 600, event("aten::sum", 5, kernels=(("reduce", 300),)),
        kernels=(("attend_dq", 3000), ("attend_dkv", 2500)),
    ))  # fmt: skip
    times = profile.times_of(SimpleNamespace(events=lambda: tree(step, node)))
    assert times.on_device() == pytest.approx(
        {"forward": 4.0, "backward": 5.8, "block masks": 0.05, "host": 0.0, "everything else": 2.0,
         "idle": 13.9 - 11.85}
    )  # fmt: skip
    assert times.on_host() == pytest.approx(
        {"forward": 0.03, "backward": 0.005, "block masks": 0.3, "host": 0.07 + 1.0 + 0.04 + 0.6,
         "everything else": 13.9 - 2.045}
    )  # fmt: skip
    assert times.calls == {"forward": 1, "backward": 1, "block masks": 1, "host": 0}
    assert "kernels" in profile.table(times, times, 1)


def test_a_compiler_has_pytorchs_operators_in_place_of_ours() -> None:
    flash = profile._NATIVE
    inside = event("headway::forward", 10, event(flash, 400))
    events = tree(
        event(profile._STEP, 100, inside, event(flash, 300), event(f"{flash}_backward", 700))
    )
    times = profile.times_of(SimpleNamespace(events=lambda: events))
    assert times.host == pytest.approx(
        {"forward": 0.7, "backward": 0.7, "block masks": 0.0, "host": 0.01}
    )
    assert times.calls == {"forward": 2, "backward": 1, "block masks": 0, "host": 0}
