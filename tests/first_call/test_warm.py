"""Kernels compiled ahead, for a card that is named: what calls need later, and nothing of it twice."""

import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import headway as hw
from headway import cli
from headway.errors import ArgumentError, BackendRefused

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton.runtime import driver

from headway.backends import hopper
from headway.backends.gpu.named_card import card_of, compiling_for, named_card
from headway.backends.gpu.runtime import call_plan, kernel_cache, parallel_compile
from headway.backends.hopper import launch_plan
from headway.backends.triton import kernel_backward, kernel_forward
from tools.assembler import up_to_ptx
from tools.compile_hopper import _Driver as HopperDriver
from tools.compile_triton import launching

warm_module = sys.modules["headway.warm"]
KERNELS = kernel_forward.forward, kernel_backward.backward_q, kernel_backward.backward_kv
GAIN = torch.tensor(0.5)
IDS = torch.arange(48) // 20


def score(score, b, h, q_idx, kv_idx):
    return score * GAIN


def small() -> dict:
    q = torch.empty(1, 48, 2, 16, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    mask = hw.causal() & hw.document(IDS)
    return {"q": q, "score": score, "mask": mask, "backend": "triton"}


@pytest.fixture
def forgetful(monkeypatch):
    """This process has no kernels, as a new one."""
    monkeypatch.setattr(kernel_cache, "log", [])

    def forget():
        call_plan.clear()
        kernel_cache.log.clear()
        for fn in KERNELS:
            fn.device_caches.clear()

    forget()
    yield forget
    forget()


def test_what_was_compiled_without_a_card_is_found_by_calls_on_one(tmp_path, forgetful):
    """By forward and backward, with a user's score and what mask and score capture; and `explain`
    knows."""
    with up_to_ptx():
        made = hw.warm(small, device="sm_90", out=tmp_path)
    assert sorted(k.name for k in made if k.compiled) == ["backward_kv", "backward_q", "forward"]
    forgetful()
    x = torch.randn(1, 48, 2, 16, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    given = x, x, x, score, small()["mask"]
    with kernel_cache.use_folder(tmp_path), launching("sm_90") as card:
        told = hw.explain(*given, backend="triton")
        assert told.kernels == [f"{fn.__name__}: compiled, on disk" for fn in KERNELS]
        assert "kernel forward: compiled, on disk" in str(told)
        out = hw.attention(*given, backend="triton")
        out.backward(torch.randn_like(x))
        assert [name for name, _ in card.launches] == [fn.__name__ for fn in KERNELS]
        told = hw.explain(*given, backend="triton")
        assert told.kernels == [f"{fn.__name__}: compiled in this process" for fn in KERNELS]
    assert {k.name for k in kernel_cache.log} == {fn.__name__ for fn in KERNELS}
    assert not any(k.compiled for k in kernel_cache.log)


def test_explain_compiles_nothing_and_calls_are_rehearsed_all_the_same(tmp_path, forgetful):
    x = torch.randn(1, 2, 48, 16, dtype=torch.bfloat16, requires_grad=True)
    with kernel_cache.use_folder(tmp_path), launching("sm_90"):
        told = hw.explain(x, x, x, backend="triton")
        assert told.kernels == [f"{fn.__name__}: to be compiled" for fn in KERNELS]
        assert not list(tmp_path.iterdir())
        hw.attention(x, x, x, backend="triton")
    assert len([k for k in kernel_cache.log if k.compiled]) == 3  # the backward's, too


def test_a_cpu_has_no_kernels_to_explain():
    q = torch.randn(1, 2, 8, 16)
    assert hw.explain(q, q, q).kernels == []


def keys_of(given: dict, card) -> list[str]:
    """The keys of all kernels of a call of the Hopper backend, on a card of one kind or another."""
    request = warm_module._request_of(given, card_of("sm_90"))
    spec, call = hw.resolve.resolve(request._replace(backend="cpu"))
    steps = parallel_compile.steps_of(spec, call, hopper.forward, hopper.backward)
    found: list[str] = []
    files, kernel_cache.Entry.files = (
        kernel_cache.Entry.files,
        lambda self, name: found.append(self.key),
    )
    try:
        with card, torch.no_grad(), parallel_compile.no_garbage_collected:
            for kernel in parallel_compile.inspect_launches(steps):
                kernel_cache.state_of(kernel.fn, kernel.args, kernel.options)
    finally:
        kernel_cache.Entry.files = files
    return found


@pytest.mark.skipif(bool(hopper.wrong_triton()), reason=hopper.wrong_triton() or "there is Gluon")
@pytest.mark.parametrize("length", [640, 2048])
def test_kernels_of_the_hopper_backend_are_those_of_the_card(forgetful, monkeypatch, length):
    given = {"q": (1, 4, length, 128), "k": (1, 2, length, 128), "mask": hw.causal()}
    named = keys_of(given, compiling_for(card_of("sm_90")))
    call_plan.clear()
    monkeypatch.setattr(launch_plan, "_processors", lambda device: 132)
    monkeypatch.setattr(driver, "_active", HopperDriver())
    assert keys_of(given, nullcontext()) == named
    assert len(set(named)) == 4  # forward, preprocess, backward, postprocess


def test_the_check_at_first_use_is_compiled_ahead_too(forgetful, monkeypatch):
    if hopper.wrong_triton():
        pytest.skip(hopper.wrong_triton())
    seen = []
    monkeypatch.setattr(warm_module, "_compile", lambda steps, *rest: seen.append(steps))
    hw.warm({"q": (1, 2, 128, 64), "train": False}, device="sm_90")
    hw.warm({"q": (1, 2, 128, 64), "backend": "triton"}, device="sm_90")
    hw.warm({"q": (1, 2, 128, 64)}, device="sm_80")
    assert [len(steps) for steps in seen] == [2, 1, 1]


def test_where_a_tile_has_no_room_the_smaller_one_is_compiled_too(tmp_path, forgetful, monkeypatch):
    given = {"q": (1, 2, 256, 64), "backend": "triton", "train": False}
    monkeypatch.setattr(warm_module, "_shared_memory", lambda card: 20_000)
    with up_to_ptx():
        made = hw.warm(given, device="sm_80", out=tmp_path)
    assert len([k for k in made if k.compiled]) > 1
    assert {k.name for k in made} == {"forward"}


def test_nothing_of_the_card_is_left(tmp_path, monkeypatch):
    before = driver._active
    monkeypatch.setattr(warm_module, "_compile", lambda *given: None)
    hw.warm(small, device="sm_80", out=tmp_path)
    assert driver._active is before
    assert named_card() is None
    assert kernel_cache.folder() != tmp_path
    q = torch.randn(1, 2, 48, 16)
    with pytest.raises(BackendRefused, match="the tensors are on cpu"):
        hw.attention(q, q, q, backend="triton")


@pytest.mark.parametrize(
    ("calls", "options", "says"),
    [
        ({"q": (1, 2, 8, 16)}, {"device": "h100"}, r"device='h100' is not a known GPU.*sm_90"),
        ({"q": (1, 2, 8, 16)}, {"device": "sm_90:0"}, r"is not a known GPU"),
        ({"q": (1, 2, 8, 16)}, {"jobs": 0}, r"jobs=0 must be"),
        ({"k": (1, 2, 8, 16)}, {}, r"has no 'q'"),
        ({"q": (1, 2, 8, 16), "length": 3}, {}, r"a call has 'length'; it may have q, k"),
        ({"q": "many"}, {}, r"q='many'"),
        ([3], {}, r"3 is neither a dict"),
        ({"q": (1, 2, 8)}, {}, r"q must be \(batch, heads"),
        ({"q": (1, 2, 8, 16), "backend": "fastest"}, {}, r"backend='fastest' is not known"),
    ],
)
def test_a_mistake_is_told(calls, options, says):
    with pytest.raises(ArgumentError, match=says):
        hw.warm(calls, **{"device": "sm_80"} | options)


def test_a_call_that_has_no_kernels_is_refused():
    wide = {"q": (1, 2, 8, 600), "dtype": torch.float64}
    with pytest.raises(
        BackendRefused, match=r"(?s)triton: torch.float64 is not.*reference: it comp"
    ):
        hw.warm(wide, device="sm_80")
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentError, match="name the GPU"):
            hw.warm(wide)


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    seen: list = []

    def warm(calls, **options):
        seen.append((calls, options))
        return [warm_module.Kernel("forward", True, 3.5), warm_module.Kernel("backward", False, 0)]

    monkeypatch.setattr(hw, "warm", warm)
    return seen


def test_the_command_compiles_a_score_and_a_mask_of_some_size(asked, capsys):
    arguments = "--heads 4 --kv-heads 2 --length 512 --width 64 --device sm_90 --output kernels"
    assert cli.main(["warm", "causal()", "softcap(30.0)", *arguments.split()]) == 0
    (((call,), options),) = asked
    assert options == {"device": "sm_90", "out": Path("kernels"), "jobs": None}
    assert call["q"] == (1, 4, 512, 64)
    assert call["v"] == (1, 2, 512, 64)
    assert call["mask"] == hw.causal()
    assert call["score"] == hw.softcap(30.0)
    assert "1 compiled, 1 there already" in capsys.readouterr().out


def test_the_command_compiles_the_calls_of_a_file(asked, tmp_path):
    file = tmp_path / "calls.py"
    file.write_text("one = {'q': (1, 2, 8, 16)}\ndef many():\n    return [one, one]\n")
    assert cli.main(["warm", f"{file}:one", f"{file}:many", "--device", "sm_80"]) == 0
    (((one, many), _),) = asked
    assert many() == [one, one]
    assert cli.main(["warm", f"{file}:one", "causal()", "--device", "sm_80"]) == 2


# -- the line on a terminal -----------------------------------------------------------------------


class Terminal:
    def __init__(self, is_one: bool) -> None:
        self.is_one, self.said = is_one, ""

    def isatty(self) -> bool:
        return self.is_one

    def write(self, text: str) -> None:
        self.said += text

    def flush(self) -> None:
        pass


@pytest.fixture
def announced(monkeypatch, tmp_path):
    """Compile a kernel for some seconds, and return what a terminal, or a pipe, shows of it."""

    def compile_slowly(seconds: float, is_terminal: bool = True, cached: bool = False) -> str:
        def compile(src, **options):
            time.sleep(seconds)
            return SimpleNamespace(hash="00")

        def patched(key, entry_of):
            entry = entry_of("00")
            if cached:
                monkeypatch.setattr(kernel_cache.Entry, "files", lambda self, name: {name: "there"})
            entry.get_group("metadata")
            return compile

        terminal = Terminal(is_terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(kernel_cache, "_patched", patched)
        with kernel_cache.use_folder(tmp_path):
            kernel_cache.compile_kernel(SimpleNamespace(name="forward"))
        return terminal.said

    return compile_slowly


def test_after_a_second_a_line_says_which_kernel_is_compiled(announced, monkeypatch):
    assert kernel_cache._SILENT_SECONDS == 1.0
    monkeypatch.setattr(kernel_cache, "_SILENT_SECONDS", 0.01)
    line = "headway: compiling the kernel forward, once for calls like this\n"
    assert announced(0.5) == line


def test_what_takes_less_than_a_second_says_nothing(announced):
    assert announced(0.0) == ""


def test_a_kernel_that_is_read_says_nothing(announced, monkeypatch):
    monkeypatch.setattr(kernel_cache, "_SILENT_SECONDS", 0.0)
    assert announced(0.05, cached=True) == ""


def test_in_a_pipe_nothing_is_said(announced, monkeypatch):
    monkeypatch.setattr(kernel_cache, "_SILENT_SECONDS", 0.0)
    assert announced(0.05, is_terminal=False) == ""
