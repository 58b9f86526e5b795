"""Where the backend runs, what it says where it does not, and what asking costs other machines."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import headway as hw
from headway import backends
from headway.backends import first_use, hopper
from headway.backends.base import CapabilityKey, capability_key
from headway.resolve import prepare

# Forks of a process that has loaded PyTorch, and nothing of this library.
ASK = """
import json, os, sys
import torch

def ask(capability, hip):
    if capability:
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 1
        torch.cuda.get_device_capability = lambda index: tuple(capability)
        torch.version.hip = hip
    import headway as hw
    q = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16)
    hw.attention(q, q, q, mask=hw.causal())
    row = next(r for r in hw.backends.table() if r.name == "hopper")
    print(json.dumps([row.available, row.reason, str(hw.explain(q, q, q)),
                      [m for m in sys.modules if "gluon" in m]]), flush=True)

torch.set_num_threads(1)
for machine in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        ask(*machine)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
MACHINES = {
    (None, None): "PyTorch",
    ((8, 0), None): r"compute capability \(8, 0\); the instructions are those of \(9, 0\)",
    ((10, 0), None): r"compute capability \(10, 0\)",
    ((9, 0), "7.0"): "the GPU is AMD's",
}


def test_other_machines_load_nothing_of_gluon():
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps([*MACHINES])], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for reason, line in zip(MACHINES.values(), done.stdout.splitlines(), strict=True):
        available, said, explained, loaded = json.loads(line)
        assert not available
        assert re.search(reason, said), said
        assert "not hopper: the tensors are on cpu" in explained
        assert loaded == []


@pytest.fixture
def card(monkeypatch):
    """A Hopper GPU, as far as asking goes."""
    if find_spec("triton") is None or hopper.wrong_triton():
        pytest.skip("no Triton that compiles the kernels")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)


def row():
    return next(r for r in backends.table() if r.name == "hopper")


@pytest.mark.parametrize("wrong", ["", "a small case came out wrong"])
def test_on_a_hopper_gpu_the_small_case_decides(card, monkeypatch, wrong):
    monkeypatch.setattr(first_use, "failure_reason", lambda *asked: wrong)
    assert row().available is (not wrong)
    assert (wrong or "default for bfloat16 and float16") in row().reason


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_a_triton_that_it_is_not_written_for_is_named(card, monkeypatch, version):
    import triton

    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(first_use, "failure_reason", lambda *asked: pytest.fail("nothing to check"))
    assert row().reason == f"Triton {version}: the kernels are written for 3.6 to 3.9"


def test_a_gluon_that_lacks_a_name_is_no_crash(card, monkeypatch):
    import triton.experimental.gluon.language.nvidia.hopper as names

    monkeypatch.delattr(names, "warpgroup_mma")
    monkeypatch.delitem(sys.modules, "headway.backends.hopper.device.gluon_compat", raising=False)
    monkeypatch.delattr("headway.backends.hopper.device.gluon_compat", raising=False)
    assert re.match(
        r"Triton .* has another Gluon than the kernels know: .*warpgroup_mma", row().reason
    )


def test_it_goes_before_triton():
    order = backends.NAMES
    assert order.index("hopper") < order.index("triton")
    assert hopper.name in backends._SELF_TESTED


BIAS = hw.relative_bias(torch.randn(2, 15))
LEARNED = hw.relative_bias(torch.randn(2, 15).requires_grad_())
DISTANCES = torch.arange(16)


@pytest.mark.parametrize(
    ("first", "score", "options"),
    [
        ("hopper", BIAS, {}),
        ("hopper", LEARNED, {"width": 128}),
        ("triton", LEARNED, {"width": 192}),
        ("hopper", LEARNED, {"width": 256}),
        ("hopper", hw.t5_bias(torch.randn(32, 2)), {}),
        ("triton", lambda s, b, h, i, j: s + DISTANCES[i - j + 8], {}),
        ("hopper", hw.softcap(30.0), {}),
        ("hopper", None, {}),
        ("hopper", None, {"deterministic": True, "width": 64, "mask": hw.causal()}),
        ("triton", None, {"deterministic": True, "width": 64, "mask": hw.sliding_window(5)}),
        ("triton", hw.softcap(30.0), {"deterministic": True, "width": 64}),
        ("hopper", None, {"deterministic": True, "width": 80}),
        ("hopper", None, {"deterministic": True, "width": 64, "trained": False}),
    ],
)
def test_what_triton_is_faster_at_goes_there(first, score, options):
    """Unless the backend is asked for by name."""
    width, trained = options.pop("width", 16), options.pop("trained", True)
    q = torch.randn(1, 2, 8, width, dtype=torch.bfloat16).requires_grad_(trained)
    spec, call = prepare(q, q, q, score, backend="reference", **options)
    kind = CapabilityKey(*capability_key(call, spec.score_tensors))
    names = backends.order("auto", spec, kind)
    assert next(n for n in names if n in ("hopper", "triton")) == first
    assert sorted(names) == sorted(backends.NAMES)
    assert names[-1] == "reference"
    assert backends.order("hopper", spec, kind) == ("hopper",)


ROWS, KEYS = (torch.randn(2, 8).requires_grad_() for _ in range(2))
FIXED = ROWS.detach()


@pytest.mark.parametrize(
    ("score", "widths", "refused"),
    [
        (lambda s, b, h, i, j: s + ROWS[h, i], (192, 128), True),
        (lambda s, b, h, i, j: s + ROWS[h, i] * KEYS[h, j], (129, 8), True),
        (lambda s, b, h, i, j: s + KEYS[h, j], (192, 128), False),
        (lambda s, b, h, i, j: s + FIXED[h, i], (192, 128), False),
        (lambda s, b, h, i, j: s + ROWS[h, i], (128, 128), False),
        (lambda s, b, h, i, j: s + ROWS[h, i], (192, 192), False),
    ],
)
def test_gradients_that_do_not_fit_in_shared_memory_are_refused(score, widths, refused):
    q, k, v = (torch.randn(1, 2, 8, widths[x == 2], dtype=torch.bfloat16) for x in range(3))
    spec, call = prepare(q, k, v, score, backend="reference")
    reasons = hopper.reasons_against(spec, CapabilityKey(*capability_key(call, spec.score_tensors)))
    assert any("a number for each query" in reason for reason in reasons) is refused
