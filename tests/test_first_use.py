"""The check of a backend's first use on a card, with backends that need none."""

import re
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import headway as hw
from headway import backends
from headway.backends import first_use, reference
from headway.backends.base import CapabilityKey, capability_key
from headway.errors import BackendRefused

CPU = torch.device("cpu")


def like_reference(**changes):
    """A backend that rounds the definition to bfloat16, but for `changes`; it counts forwards."""
    made = SimpleNamespace(**{n: getattr(reference, n) for n in dir(reference)}, forwards=0)
    made.name, made.accumulates = "tested", lambda dtype: torch.float32
    made.proof = lambda device: None

    def forward(spec, call):
        made.forwards += 1
        return reference.forward(spec, call)

    vars(made).update({"forward": forward} | changes)
    return made


@pytest.fixture(autouse=True)
def forgetful():
    first_use.forget()
    yield
    first_use.forget()


def test_a_right_backend_is_checked_once():
    tested = like_reference()
    for _ in range(3):
        assert first_use.failure_reason(tested, reference, CPU) == ""
    assert tested.forwards == 1


def kept(folder, **changes):
    """A backend whose check is written down, in another process."""
    first_use.forget()
    facts = {"card": "A", "driver": "1", "compiler": "2"} | changes
    return like_reference(proof=lambda device: (folder, facts))


def test_that_it_came_out_right_is_written_down(tmp_path):
    for forwards in (1, 0, 0):
        tested = kept(tmp_path)
        assert first_use.failure_reason(tested, reference, CPU) == ""
        assert tested.forwards == forwards


@pytest.mark.parametrize("what", ["card", "driver", "compiler"])
def test_where_anything_is_different_it_is_checked_again(tmp_path, what):
    assert first_use.failure_reason(kept(tmp_path), reference, CPU) == ""
    other = kept(tmp_path, **{what: "another"})
    assert first_use.failure_reason(other, reference, CPU) == ""
    assert other.forwards == 1


@pytest.mark.parametrize("damage", ["cut short", "of something else", "gone"])
def test_what_is_written_down_has_to_say_all_of_it(tmp_path, damage):
    first_use.failure_reason(kept(tmp_path), reference, CPU)
    (file,) = tmp_path.iterdir()
    if damage == "gone":
        file.unlink()
    else:
        text = file.read_text()
        file.write_text(text[:-5] if damage == "cut short" else text.replace('"A"', '"B"'))
    tested = kept(tmp_path)
    assert first_use.failure_reason(tested, reference, CPU) == ""
    assert tested.forwards == 1


def test_that_it_came_out_wrong_is_not_written_down(tmp_path):
    wrong = like_reference(proof=lambda device: (tmp_path, {}), backward=one_row_wrong)
    assert first_use.failure_reason(wrong, reference, CPU)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_no_reason_against_it(tmp_path):
    (tmp_path / "file").touch()
    tested = kept(tmp_path / "file")
    assert first_use.failure_reason(tested, reference, CPU) == ""


def test_meanwhile_the_kernels_of_the_call_are_compiled_unless_nothing_is_checked(tmp_path):
    seen = []

    def meanwhile():
        seen.append(threading.get_ident())
        raise RuntimeError("the call raises it")

    for _ in range(2):
        assert first_use.failure_reason(kept(tmp_path), reference, CPU, meanwhile) == ""
    assert len(seen) == 1
    assert seen[0] != threading.get_ident()


def one_row_wrong(spec, call, *rest):
    grads = reference.backward(spec, call, *rest)
    grads.k[0, 0, 17] *= 1.05
    return grads


def lost(spec, call):
    out, lse, *rest = reference.forward(spec, call)
    lse[0, 1, 332] = float("nan")
    return type(reference.forward(spec, call))(out, lse, *rest)


def broken(spec, call):
    raise RuntimeError("ptxas died\nof old age")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"backward": one_row_wrong}, r"\(dk is off by 3\.\de-02 where 1\.6e-02 would be rounding\)"),
        ({"forward": lost}, r"\(lse is off by nan"),
        ({"forward": broken}, r"\(RuntimeError: ptxas died\) with Triton"),
    ],
    ids=["one row", "nan", "exception"],
)  # fmt: skip
def test_a_wrong_backend_says_what_differs_and_with_which_versions(changes, says):
    said = first_use.failure_reason(like_reference(**changes), reference, CPU)
    assert re.search(f"{says}.*PyTorch {torch.__version__[:4]}.*, cpu", said), said


def test_auto_passes_over_it_and_by_name_it_is_refused(monkeypatch):
    monkeypatch.setattr(backends, "_SELF_TESTED", ("wrong",))
    wrong = like_reference(backward=one_row_wrong)
    others = {"wrong": wrong, **backends._BACKENDS}
    monkeypatch.setattr(backends, "_BACKENDS", others)
    monkeypatch.setattr(backends, "NAMES", tuple(others))
    q = torch.randn(1, 2, 8, 16)
    spec, call = hw.resolve.prepare(q, q, q)
    assert backends.choose("auto", spec, CapabilityKey(*capability_key(call, 0))) == "cpu"
    with pytest.raises(BackendRefused, match=r"wrong: a small case .*dk is off .*please report"):
        hw.attention(q, q, q, backend="wrong")
    assert wrong.forwards == 1


def test_no_mode_of_the_caller_reaches_it_and_it_reaches_nothing_of_the_callers():
    """Inside autocast, inference mode, fake tensors: and the caller's random numbers stay."""
    from torch._subclasses import FakeTensorMode

    seen = []

    def look(spec, call):
        seen.append((type(call.q), torch.is_inference_mode_enabled(), threading.get_ident()))
        return reference.forward(spec, call)

    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu"), FakeTensorMode():
        assert first_use.failure_reason(like_reference(forward=look), reference, CPU) == ""
    assert torch.equal(before, torch.get_rng_state())
    ((kind, inference, thread),) = seen
    assert (kind, inference) == (torch.Tensor, False)
    assert thread != threading.get_ident()


def test_while_a_graph_is_captured_it_waits():
    tested, card = like_reference(), torch.device("cuda", 0)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        assert "make the call once before" in first_use.failure_reason(tested, reference, card)
    assert tested.forwards == 0
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(torch.cuda, "current_stream"),
        mock.patch.object(first_use, "_verdict", return_value=""),
    ):
        assert first_use.failure_reason(tested, reference, card) == ""


def test_kernels_of_the_call_that_asks_are_compiled_beside_those_of_the_check(monkeypatch):
    """Once: with the spec that is run, and outside of the caller's modes."""
    monkeypatch.setattr(backends, "_SELF_TESTED", ("wrong",))
    monkeypatch.setattr(
        hw.resolve, "needs_self_test", lambda device: not first_use.has_verdict(tested, device)
    )
    ahead = []

    def compile_ahead(spec, call):
        ahead.append((spec.backend, call.q, torch.is_grad_enabled()))

    tested = like_reference(compile_ahead=compile_ahead)
    monkeypatch.setitem(backends._BACKENDS, "wrong", tested)
    q = torch.randn(1, 2, 9, 16, requires_grad=True)
    for _ in range(2):
        hw.attention(q, q, q, backend="wrong")
    ((name, given, grad),) = ahead
    assert (name, grad) == ("wrong", False)
    assert given is q


def test_nothing_is_compiled_ahead_for_a_part_of_a_sequence(monkeypatch):
    """A rank's call has its own queries and the tiles of all: kernels for both would read past the
    tiles' ends."""
    monkeypatch.setattr(backends, "_SELF_TESTED", ("wrong",))
    tested = like_reference(compile_ahead=lambda spec, call: pytest.fail("compiled ahead"))
    monkeypatch.setitem(backends._BACKENDS, "wrong", tested)
    q = torch.randn(1, 2, 9, 16)
    spec, call = hw.resolve.prepare(q, q, q)
    kind = CapabilityKey(*capability_key(call, 0))._replace(scattered=True)
    assert backends.choose("wrong", spec, kind, call) == "wrong"
    assert tested.forwards == 1


def test_a_cpu_is_never_unchecked():
    assert not backends.needs_self_test(CPU)


def test_compiled_programs_are_checked_while_they_are_traced(monkeypatch):
    monkeypatch.setattr(backends, "_SELF_TESTED", ("wrong",))
    tested = like_reference()
    monkeypatch.setitem(backends._BACKENDS, "wrong", tested)
    q = torch.randn(1, 2, 8, 16)
    run = torch.compile(lambda q: hw.attention(q, q, q, backend="wrong"), backend="eager", fullgraph=True)  # fmt: skip
    assert run(q).shape == q.shape
    assert tested.forwards == 2  # the small case, and the call
