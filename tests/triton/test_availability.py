"""Where the backend runs, and what it says where it does not."""

import re

import pytest
import torch

from headway import backends


def row(name="triton"):
    return next(r for r in backends.table() if r.name == name)


def gpu(monkeypatch, *capabilities, hip=None):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda n: capabilities[n])
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(backends.first_use, "failure_reason", lambda *asked: "")
    monkeypatch.setattr(backends.triton.importlib.util, "find_spec", lambda name: "there")


@pytest.mark.parametrize(
    ("capabilities", "hip", "available", "reason"),
    [
        ((), None, False, "PyTorch"),
        (((7, 5),), None, False, r"compute capability \(7, 5\), Triton's kernels need \(8, 0\)"),
        (((7, 5), (9, 0)), None, True, "default elsewhere on a GPU"),
        (((9, 4),), "6.3", True, "default elsewhere on a GPU"),
    ],
)
def test_the_table_says_whether_and_why(monkeypatch, capabilities, hip, available, reason):
    gpu(monkeypatch, *capabilities, hip=hip)
    assert row().available == available
    assert re.search(reason, row().reason)


@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_no_triton(monkeypatch, name):
    gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(backends.triton.importlib.util, "find_spec", lambda name: None)
    assert row(name).reason == "Triton is not installed: pip install triton"
