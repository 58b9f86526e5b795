"""Bad input: the message names the argument, the values seen and the way out, before any work."""

import inspect
import math
import re

import pytest
import torch

import headway as hw
from headway import backends
from headway.errors import (
    ArgumentError,
    BackendRefused,
    CapturedIndexError,
    HeadwayError,
    ModError,
)

B, HQ, HK, LENGTH, D = 2, 4, 2, 33, 8


def _qkv(length: int = LENGTH) -> list[torch.Tensor]:
    return [torch.randn(B, h, length, D) for h in (HQ, HK, HK)]


def _raises(error: type, *words: str):
    """The error, with every one of these in its message."""
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{re.escape(w)})" for w in words))


# -- tensors --------------------------------------------------------------------------------------

Q, K, V = "(2, 4, 33, 8)", "(2, 2, 33, 8)", "(2, 2, 33, 8)"
TENSORS = {
    "rank of q": (lambda q, k, v: (q[0], k, v), ("q", "(4, 33, 8)", "unsqueeze")),
    "rank of k": (lambda q, k, v: (q, k[None], v), ("k", "(1, 2, 2, 33, 8)", "length, width")),
    "rank of v": (lambda q, k, v: (q, k, v[0, 0]), ("v", "(33, 8)")),
    "no tensor": (lambda q, k, v: (q.numpy(), k, v), ("q must be a tensor", "ndarray")),
    "None": (lambda q, k, v: (q, k, None), ("v must be a tensor", "NoneType")),
    "width": (lambda q, k, v: (q, k[..., :4], v), ("q and k", "width", Q, "(2, 2, 33, 4)")),
    "heads": (lambda q, k, v: (q[:, :3], k, v), ("multiple", "hq = 3", "hk = 2")),
    "no key heads": (lambda q, k, v: (q, k[:, :0], v[:, :0]), ("hq = 4", "hk = 0")),
    "heads of k and v": (lambda q, k, v: (q, k, v[:, :1]), ("k and v", "heads", "(2, 1, 33, 8)")),
    "lengths": (lambda q, k, v: (q, k, v[:, :, :5]), ("k and v", "length", "(2, 2, 5, 8)")),
    "batch": (lambda q, k, v: (q, k[:1], v[:1]), ("batch", "(1, 2, 33, 8)", ".expand()")),
    "dtypes": (lambda q, k, v: (q, k.double(), v), ("one dtype", "torch.float64", ".to()")),
    "whole numbers": (lambda *x: [t.long() for t in x], ("q is torch.int64", "float32")),
    "complex": (lambda q, k, v: (q.cfloat(), k, v), ("q is torch.complex64", "bfloat16")),
    "devices": (lambda q, k, v: (q, k.to("meta"), v), ("one device", "cpu, meta, cpu", ".to()")),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors(what):
    change, words = TENSORS[what]
    for call in (hw.attention, hw.attention_with_stats):
        with _raises(ArgumentError, *words):
            call(*change(*_qkv()))


# -- numbers --------------------------------------------------------------------------------------

OPTIONS = {
    "scale, a tensor": ({"scale": torch.tensor(1.0)}, ("scale", "tensor", "multiply q")),
    "scale, a text": ({"scale": "1"}, ("scale='1'", "number")),
    "scale, not a number": ({"scale": math.nan}, ("scale=nan", "number")),
    "sink, shape": ({"sink": torch.zeros(3)}, ("sink", "(hq,) = (4,)", "(3,)")),
    "sink, a number": ({"sink": 1.0}, ("sink", "(hq,) = (4,)", "1.0")),
    "sink, dtype": ({"sink": torch.zeros(4, dtype=torch.int64)}, ("sink", "int64")),
    "sink, device": ({"sink": torch.zeros(4, device="meta")}, ("sink is on meta", "cpu", ".to()")),
    "dropout, large": ({"dropout": 1.5}, ("dropout=1.5", "0 to 1")),
    "dropout, negative": ({"dropout": -0.1}, ("dropout=-0.1", "0 to 1")),
    "dropout, not a number": ({"dropout": math.nan}, ("dropout=nan", "0 to 1")),
    "dropout, a text": ({"dropout": "0.1"}, ("dropout='0.1'", "0 to 1")),
    "dropout, a yes": ({"dropout": True}, ("dropout=True", "0 to 1")),
    "seed, a fraction": ({"dropout": 0.5, "seed": 1.5}, ("seed", "1.5", "number")),
    "seed, a text": ({"dropout": 0.5, "seed": "x"}, ("seed", "'x'", "number")),
    "seed, too large": ({"dropout": 0.5, "seed": 2**64}, ("seed", str(2**64))),
    "seed, shape": ({"dropout": 0.5, "seed": torch.tensor([1])}, ("seed", "0-d", "(1,) int64")),
    "seed, dtype": (
        {"dropout": 0.5, "seed": torch.tensor(1, dtype=torch.int32)}, ("seed", "() int32")
    ),
    "backend": ({"backend": "cuda"}, ("backend='cuda'", "'auto'", "'cpu'", "'reference'")),
    "mask, a tensor": ({"mask": torch.ones(33, 33) > 0}, ("mask is a tensor", "(33, 33)", "m[q_i")),
    "score, a tensor": ({"score": torch.ones(33, 33)}, ("score is a tensor", "(33, 33)", "bias(")),
    "mask, a text": ({"mask": "causal"}, ("mask must be a function", "'causal'")),
    "score, a number": ({"score": 3.0}, ("score must be a function", "3.0")),
}  # fmt: skip


@pytest.mark.parametrize("what", OPTIONS)
def test_options(what):
    options, words = OPTIONS[what]
    with _raises(ArgumentError, *words):
        hw.attention(*_qkv(), **options)


# -- functions ------------------------------------------------------------------------------------

table = torch.randn(HQ, LENGTH)
flags = torch.rand(LENGTH, LENGTH) < 0.5
wave = torch.randn(HQ, dtype=torch.cfloat)


def _branch(score, b, h, q_idx, kv_idx):
    if q_idx > kv_idx:  # here
        return score
    return -score


def _loop(score, b, h, q_idx, kv_idx):
    for _ in range(q_idx):  # here
        score = score * 0.9
    return score


def _item(score, b, h, q_idx, kv_idx):
    return score * h.item()  # here


def _and(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx and kv_idx > 3  # here


def _number(b, h, q_idx, kv_idx):  # here
    return q_idx - kv_idx


def _nothing(b, h, q_idx, kv_idx):  # here
    pass


def _boolean(score, b, h, q_idx, kv_idx):  # here
    return q_idx > kv_idx


def _random(score, b, h, q_idx, kv_idx):
    return score + torch.rand_like(score)  # here


def _fresh_random(score, b, h, q_idx, kv_idx):
    return score + torch.rand(())  # here


def _reduction(score, b, h, q_idx, kv_idx):
    return score + table.sum()  # here


def _row(score, b, h, q_idx, kv_idx):
    return score + table[h]  # here


def _slice(score, b, h, q_idx, kv_idx):
    return score + table[h, :3]  # here


def _three(score, b, h, q_idx, kv_idx):
    return score + table[b, h, q_idx]  # here


def _fraction(score, b, h, q_idx, kv_idx):
    return score + table[h, (q_idx - kv_idx) / 2]  # here


def _complex(score, b, h, q_idx, kv_idx):
    return score + wave[h].real  # here


def _undefined(score, b, h, q_idx, kv_idx):
    return score + no_such_name  # here


def _arity(score, b, h, q_idx):  # here
    return score


def _write(score, b, h, q_idx, kv_idx):
    table[0, 0] = 1.0  # here
    return score


FUNCTIONS = {
    _branch: ("score", "if", "torch.where"),
    _loop: ("score", "Python decision", "torch.where"),
    _item: ("score", ".item()"),
    _and: ("mask", "& | ~"),
    _number: ("mask", "returned a torch.int64", "boolean"),
    _nothing: ("mask", "returned NoneType", "boolean"),
    _boolean: ("score", "returned a boolean", "mask="),
    _random: ("score", "calls rand_like", "pointwise"),
    _fresh_random: ("score", "rand"),
    _reduction: ("score", "sum", "outside the function"),
    _row: ("score", "shape (33,)", "table[h, q_idx - kv_idx]"),
    _slice: ("score", "slice", "every dimension"),
    _three: ("score", "2-d tensor of shape (4, 33)", "3 indices"),
    _fraction: ("score", "torch.float32", ".long()"),
    _complex: ("score", "torch.complex64"),
    _undefined: ("score", "NameError", "no_such_name"),
    _arity: ("score", "takes 4 positional arguments", "score, b, h, q_idx, kv_idx"),
    _write: ("score", "captured tensor"),
}


def _place(fn) -> str:
    """The line marked in the function."""
    lines, first = inspect.getsourcelines(fn)
    (at,) = (n for n, line in enumerate(lines) if "# here" in line)
    return f'File "{__file__}", line {first + at}'


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_functions(fn):
    words = FUNCTIONS[fn]
    before = table.clone()
    with _raises(ModError, fn.__name__, _place(fn), *words):
        hw.attention(*_qkv(), **{words[0]: fn})
    assert torch.equal(table, before)


def test_in_a_block_mask_as_well():
    for fn in (_and, _number):
        with _raises(ModError, fn.__name__, _place(fn), *FUNCTIONS[fn]):
            hw.block_mask(fn, 1, 1, 10, 10)


def test_mask_and_score_swapped():
    with _raises(ModError, "score function causal()", "score, b, h, q_idx, kv_idx"):
        hw.attention(*_qkv(), hw.causal())
    with _raises(ModError, "mask function softcap", "b, h, q_idx, kv_idx"):
        hw.attention(*_qkv(), None, hw.softcap(3.0))


def test_captured_on_another_device():
    elsewhere = torch.zeros(HQ, device="meta")
    with _raises(ArgumentError, "score", "(4,)", "meta", "cpu", ".to()"):
        hw.attention(*_qkv(), lambda s, b, h, i, j: s + elsewhere[h])


def test_a_mask_learns_nothing():
    learned = torch.zeros(HQ, requires_grad=True)
    with _raises(ArgumentError, "mask", "requires grad", "detach"):
        hw.attention(*_qkv(), None, lambda b, h, i, j: learned[h] >= 0)


# -- out of range ---------------------------------------------------------------------------------


def _far_right(score, b, h, q_idx, kv_idx):
    return score + table[h, q_idx + kv_idx]  # here


def _far_left(score, b, h, q_idx, kv_idx):
    return score + table[h, q_idx - kv_idx - 40]  # here


def _far_head(score, b, h, q_idx, kv_idx):
    return score + table[h + 1, q_idx]  # here


def _far_mask(b, h, q_idx, kv_idx):
    return flags[q_idx, kv_idx + 1]  # here


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("stats", [False, True], ids=["out", "stats"])
@pytest.mark.parametrize(
    ("kind", "fn", "words"),
    [
        ("score", _far_right, ("index 33 ", "dimension 1", "(4, 33)")),
        ("score", _far_left, ("index -7 ", "dimension 1", "(4, 33)")),
        ("score", _far_head, ("index 4 ", "dimension 0", "(4, 33)")),
        ("mask", _far_mask, ("index 33 ", "dimension 1", "(33, 33)")),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_indices_out_of_range(backend, stats, kind, fn, words):
    call = hw.attention_with_stats if stats else hw.attention
    with _raises(CapturedIndexError, kind, "# here", "clamp", *words):
        call(*_qkv(), backend=backend, **{kind: fn})


@pytest.mark.parametrize(("kind", "fn"), [("score", _far_right), ("mask", _far_mask)])
def test_indices_out_of_range_name_the_line(kind, fn):
    with _raises(CapturedIndexError, f'{__file__}", line {_place(fn).split()[-1]}'):
        hw.attention(*_qkv(), **{kind: fn})


@pytest.mark.parametrize("length", [LENGTH, 300])
def test_indices_may_leave_where_the_mask_does_not_keep_the_pair(length):
    short = torch.randn(HQ, 5)
    window = lambda b, h, i, j: (i >= j) & (i - j < 5)
    score = lambda s, b, h, i, j: s + short[h, i - j]
    assert hw.attention(*_qkv(length), score, window).isfinite().all()
    wider = lambda b, h, i, j: (i >= j) & (i - j < 6)
    with _raises(CapturedIndexError, "index 5 ", "(4, 5)"):
        hw.attention(*_qkv(length), score, wider)


ids = lambda *shape: torch.zeros(shape, dtype=torch.int64)
LIBRARY = {
    "document, short": (lambda: hw.document(ids(30)), ("ids", "30", "33")),
    "document, long": (lambda: hw.document(ids(40)), ("ids", "40", "33")),
    "document, batch": (lambda: hw.document(ids(1, 33)), ("ids", "(1, 33)", "2")),
    "document, keys": (lambda: hw.document(ids(33), ids(30)), ("kv_ids", "30", "33")),
    "padding, few": (lambda: hw.padding(ids(1)), ("lengths", "(1,)", "2")),
    "padding, many": (lambda: hw.padding(ids(3)), ("lengths", "(3,)", "2")),
    "prefix": (lambda: hw.causal() | hw.prefix(ids(1)), ("length", "(1,)", "2")),
    "alibi, few": (lambda: hw.alibi(2), ("slopes", "(2,)", "4")),
    "alibi, many": (lambda: hw.alibi(8), ("slopes", "(8,)", "4")),
    "relative_bias": (lambda: hw.relative_bias(torch.zeros(3, 5)), ("table", "(3, 5)", "4")),
    "bias": (lambda: hw.bias(torch.zeros(7, 33)), ("bias", "(7, 33)", "33")),
    "bias, batch": (lambda: hw.bias(torch.zeros(3, 1, 1, 33)), ("bias", "(3, 1, 1, 33)", "2")),
}


@pytest.mark.parametrize("what", LIBRARY)
def test_sizes_of_library_values(what):
    """Too many are as wrong as too few: ids of 40 tokens do not belong to 33."""
    make, words = LIBRARY[what]
    value = make()
    kind = "mask" if isinstance(value, hw.Mask) else "score"
    with _raises(HeadwayError, *words):
        hw.attention(*_qkv(), **{kind: value})


# -- values of the library ------------------------------------------------------------------------

VALUES = {
    "sliding_window(0)": ("sliding_window(window=0)", ">= 1"),
    "sliding_window(2.5)": ("sliding_window(window=2.5)", "whole number"),
    "prefix(-1)": ("prefix(length=-1)", ">= 0"),
    "global_tokens(True)": ("global_tokens(count=True)", "whole number"),
    "document([0, 1])": ("document(ids=", "int tensor"),
    "document(torch.zeros(3))": ("ids", "int tensor", "torch.float32"),
    "document(torch.zeros(1, 2, 3, dtype=torch.int64))": ("ids", "(1, 2, 3)"),
    "padding(3)": ("padding(lengths=", "int tensor (batch,)"),
    "softcap(0)": ("softcap(cap=0)", "above 0"),
    "softcap('a')": ("softcap(cap='a')", "above 0"),
    "alibi(0)": ("alibi", "0", "number of heads"),
    "alibi(torch.zeros(2, 2))": ("slopes", "(2, 2)"),
    "relative_bias(torch.zeros(4, 6))": ("table", "2m + 1", "(4, 6)"),
    "relative_bias(3)": ("relative_bias(table=3)",),
    "bias(3.0)": ("bias(tensor=3.0)",),
    "bias(torch.zeros(2, 2, 2, 2, 2))": ("bias", "at most 4"),
    "bias(torch.zeros(2, dtype=torch.int64))": ("bias", "torch.int64"),
    "causal() & torch.ones(3, 3)": ("&", "f32[3, 3]", "lambda b, h"),
    "causal() & True": ("&", "True"),
    "softcap(3.0) >> 2": (">>", "2"),
    "causal() and sliding_window(3)": ("and", "&"),
    "not causal()": ("not", "~"),
}


@pytest.mark.parametrize("text", VALUES)
def test_values(text):
    names = {n: getattr(hw, n) for n in dir(hw) if n.islower()}
    with _raises(HeadwayError, *VALUES[text]):
        eval(text, {**names, "torch": torch})


# -- block masks ----------------------------------------------------------------------------------


def test_block_masks_for_other_sizes():
    with _raises(ArgumentError, "(32, 33)", "(33, 33)", "block_mask("):
        hw.attention(*_qkv(), None, hw.block_mask(hw.causal(), 1, 1, 32, 33))
    by_head = lambda b, h, i, j: i >= j + h
    with _raises(ArgumentError, "heads 2", "(2, 4)", "equal or 1"):
        hw.attention(*_qkv(), None, hw.block_mask(by_head, 1, 2, 33, 33))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1, 1, -1, 33), ("q_len=-1", "whole number")),
        ((1, 1.5, 3, 33), ("h=1.5", "whole number")),
        ((True, 1, 3, 33), ("b=True", "whole number")),
    ],
    ids=str,
)
def test_block_masks_of_bad_sizes(arguments, words):
    with _raises(ArgumentError, *words):
        hw.block_mask(hw.causal(), *arguments)


@pytest.mark.parametrize("tile", [64, (0, 64), (64,), (64, 64.0), (64, 64, 64)], ids=str)
def test_block_masks_of_bad_tiles(tile):
    with _raises(ArgumentError, f"tile={tile!r}", "two whole numbers"):
        hw.block_mask(hw.causal(), 1, 1, 33, 33, tile=tile)


# -- backends -------------------------------------------------------------------------------------


def test_a_named_backend_never_falls_back(monkeypatch):
    """All of its reasons, each with its way out; and "auto" tells those of every backend."""

    class Picky:
        name = "picky"
        reasons_against = staticmethod(lambda spec, kind: ["d = 8: use 64", "no sink: drop it"])

    with monkeypatch.context() as patch:
        patch.setitem(backends._BACKENDS, "picky", Picky())
        words = "backend='picky'", "d = 8: use 64", "no sink: drop it", f"q {Q} float32 on cpu"
        with _raises(BackendRefused, *words):
            hw.attention(*_qkv(), backend="picky")


def test_errors_are_pythons_own_kinds_too():
    with pytest.raises(ValueError, match="width"):
        hw.attention(*(x[..., :n] for x, n in zip(_qkv(), (8, 4, 8), strict=True)))
    with pytest.raises(IndexError, match="dimension 1"):
        hw.attention(*_qkv(), _far_right)
