"""Bad input: the message names the argument, the values seen and the way out, before any work."""

import functools
import inspect
import math
import re

import numpy as np
import pytest
import torch

import headway as hw
import headway.nn
from headway import backends
from headway.errors import ArgumentError, BackendRefused, CapturedIndexError, HeadwayError, ModError

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
    "integers": (lambda *x: [t.long() for t in x], ("q is torch.int64", "float32")),
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
    "scale, a yes": ({"scale": True}, ("scale=True", "number")),
    "scale, NumPy's infinity": ({"scale": np.float32("inf")}, ("scale=", "inf", "number")),
    "sink, shape": ({"sink": torch.zeros(3)}, ("sink", "(hq,) = (4,)", "(3,)")),
    "sink, a number": ({"sink": 1.0}, ("sink", "(hq,) = (4,)", "1.0")),
    "sink, dtype": ({"sink": torch.zeros(4, dtype=torch.int64)}, ("sink", "int64")),
    "sink, device": ({"sink": torch.zeros(4, device="meta")}, ("sink is on meta", "cpu", ".to()")),
    "dropout, large": ({"dropout": 1.5}, ("dropout=1.5", "0 to 1")),
    "dropout, negative": ({"dropout": -0.1}, ("dropout=-0.1", "0 to 1")),
    "dropout, not a number": ({"dropout": math.nan}, ("dropout=nan", "0 to 1")),
    "dropout, a text": ({"dropout": "0.1"}, ("dropout='0.1'", "0 to 1")),
    "dropout, a yes": ({"dropout": True}, ("dropout=True", "0 to 1")),
    "seed, a fraction": ({"dropout": 0.5, "seed": 1.5}, ("seed", "1.5", "integer")),
    "seed, a yes": ({"dropout": 0.5, "seed": True}, ("seed=True", "integer")),
    "seed, a text": ({"dropout": 0.5, "seed": "x"}, ("seed", "'x'", "integer")),
    "seed, too large": ({"dropout": 0.5, "seed": 2**64}, ("seed", str(2**64))),
    "seed, shape": ({"dropout": 0.5, "seed": torch.tensor([1])}, ("seed", "0-d", "(1,) int64")),
    "seed, dtype": (
        {"dropout": 0.5, "seed": torch.tensor(1, dtype=torch.int32)}, ("seed", "() int32")
    ),
    "backend": ({"backend": "cuda"}, ("backend='cuda'", "'auto'", "'cpu'", "'reference'")),
    "mask, a text": ({"mask": "causal"}, ("mask='causal' is a string", "mask=headway.causal()")),
    "mask, a score's name": ({"mask": "alibi"}, ("mask='alibi'", "score=headway.alibi(slopes)")),
    "mask, another text": ({"mask": "causal & x"}, ("mask='causal & x'", "(b, h, q_idx, kv_idx)")),
    "mask, a yes": ({"mask": True}, ("mask=True", "is_causal=True is mask=headway.causal()")),
    "score, a number": ({"score": 3.0}, ("score=3.0", "(score, b, h, q_idx, kv_idx)")),
    "score, a list": ({"score": [0.0] * 999}, ("score=[0.0, 0.0", "...", "softcap(30.0)")),
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
    _random: ("score", "calls rand_like", "drawn once"),
    _fresh_random: ("score", "rand"),
    _reduction: ("score", "sum", "outside the function"),
    _row: ("score", "shape (33,)", "table[h, q_idx - kv_idx]"),
    _slice: ("score", "shape (3,)", "reduce it, such as x.any(-1)"),
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


# -- something else in place of a score or mask ----------------------------------------------------


class OwnMask:
    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx >= kv_idx


_four = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
_five = lambda score, b, h, q_idx, kv_idx: score * 2
SWAPPED = {
    "a mask": ({"score": hw.causal()}, "score=causal() is a mask; pass it as mask=causal()"),
    "masks": (
        {"score": hw.causal() & hw.prefix(3)},
        "score=causal() & prefix(3) is a mask; pass it as mask=causal() & prefix(3)",
    ),
    "a mask with a function": (
        {"score": hw.causal() & _four}, "score=causal() & <lambda> is a mask; pass it as mask="
    ),
    "a score": (
        {"mask": hw.softcap(3.0)}, "mask=softcap(3.0) is a score; pass it as score=softcap(3.0)"
    ),
    "a bias": ({"mask": hw.bias(torch.zeros(33, 33))}, "mask=bias(f32[33, 33]) is a score; pass"),
    "scores": ({"mask": hw.softcap(3.0) >> hw.alibi(4)}, "is a score; pass it as score=softcap("),
    "uncalled": ({"mask": hw.causal}, "mask=causal is a class; pass mask=causal()"),
    "uncalled, with a number": (
        {"mask": hw.sliding_window}, "mask=sliding_window is a class; pass mask=sliding_window(window)"
    ),
    "uncalled and swapped": (
        {"score": hw.causal}, "score=causal is the class of a mask; pass mask=causal()"
    ),
    "another class": (
        {"mask": OwnMask}, "mask=OwnMask is a class; pass mask=OwnMask(...), an object of it"
    ),
    "a block mask": (
        {"score": hw.block_mask(hw.causal(), 1, 1, 33, 33)},
        "score is a block mask; pass it as mask=",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SWAPPED)
def test_mask_and_score_swapped(what):
    options, words = SWAPPED[what]
    module = headway.nn.Attention(16, HQ, HK)
    for call in (hw.attention, hw.attention_with_stats, hw.explain):
        with _raises(ArgumentError, words):
            call(*_qkv(), **options)
    with _raises(ArgumentError, words):
        module(torch.randn(B, LENGTH, 16), **options)
    if "mask" in options:
        with _raises(ArgumentError, words):
            hw.block_mask(options["mask"], 1, 1, 33, 33)
        with _raises(ArgumentError, words.split(" ")[0].removeprefix("mask="), "& combines masks"):
            hw.causal() & options["mask"]
    else:
        with _raises(ArgumentError, ">> combines scores"):
            hw.softcap(3.0) >> options["score"]


@pytest.mark.parametrize("what", ["a mask", "a bias", "uncalled"])
def test_swapped_in_a_compiled_call(what):
    options, words = SWAPPED[what]
    for whole, error in ((False, HeadwayError), (True, Exception)):
        torch.compiler.reset()
        with _raises(error, words):
            torch.compile(hw.attention, backend="eager", fullgraph=whole)(*_qkv(), **options)
    torch.compiler.reset()
    with _raises(Exception, "'is_causal'; write mask=headway.causal()"):
        torch.compile(hw.attention, backend="eager", fullgraph=True)(*_qkv(), is_causal=True)


@pytest.mark.parametrize(
    ("kind", "fn", "words"),
    [
        (
            "score",
            _four,
            ("takes 4 positional arguments but 5", "if it is a mask, pass it as mask="),
        ),
        ("score", OwnMask(), ("takes 5 positional", "if it is a mask, pass it as mask=")),
        ("score", hw.softcap(3.0) >> _four, ("takes 4", "if it is a mask, pass it as mask=")),
        ("mask", _five, ("missing 1 required", "if it is a score, pass it as score=")),
        ("mask", hw.causal() | _five, ("missing 1", "if it is a score, pass it as score=")),
    ],
    ids=["score of 4", "score object of 4", "score >> of 4", "mask of 5", "mask | of 5"],
)
def test_functions_of_other_arguments(kind, fn, words):
    both = "a score takes (score, b, h, q_idx, kv_idx), a mask (b, h, q_idx, kv_idx)"
    place = fn in (_four, _five)
    for call in (hw.attention, hw.explain):
        with _raises(ModError, kind, both, *words, *([__file__] if place else [])):
            call(*_qkv(), **{kind: fn})
    if kind == "mask":
        with _raises(ModError, kind, both, *words):
            hw.block_mask(fn, 1, 1, 33, 33)


def test_a_type_error_inside_a_function_is_no_matter_of_its_arguments():
    with _raises(ModError, "failed on symbols: TypeError", "# wrong"):
        hw.attention(*_qkv(), lambda s, b, h, i, j: _four(s, b, h, i, j))  # wrong


def test_block_masks_of_block_masks():
    blocks = hw.block_mask(hw.causal(), 1, 1, 33, 33)
    with _raises(ArgumentError, "mask is a block mask; its .mask"):
        hw.block_mask(blocks, 1, 1, 33, 33)
    with _raises(ArgumentError, "& combines masks, but this is a block mask", "its .mask"):
        hw.prefix(3) & blocks


# -- keywords of other libraries -------------------------------------------------------------------

KEYWORDS = {
    "is_causal": "write mask=headway.causal()",
    "attn_mask": "mask=headway.dense(m), a float one score=headway.bias(m)",
    "attention_mask": "mask=headway.dense(m[:, None, None].bool())",
    "key_padding_mask": "mask=headway.dense(~m[:, None, None])",
    "window_size": "mask=headway.causal() & headway.sliding_window(n)",
    "score_mod": "write score=",
    "block_mask": "write mask=",
    "dropout_p": "write dropout=",
    "enable_gqa": "leave it out",
    "softmax_scale": "write scale=",
    "softcap": "score=headway.softcap(cap)",
    "return_lse": "headway.attention_with_stats",
    "return_weights": "call headway.attention_weights(q, k, ...)",
    "deterministc": "did you mean deterministic=?",
    "out": "it returns a new tensor",
    "xyz": "it takes q, k, v, score, mask, scale, sink, dropout, seed, deterministic, backend",
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_of_other_libraries(name):
    """Still a TypeError, in Python's words, with the way out."""
    for call in (hw.attention, hw.attention_with_stats, hw.explain):
        start = f"{call.__name__}() got an unexpected keyword argument {name!r}; "
        with _raises(TypeError, start, KEYWORDS[name]) as caught:
            call(*_qkv(), **{name: None})
        assert isinstance(caught.value, HeadwayError)


def test_keywords_of_block_masks_and_modules():
    for name, way in {
        "BLOCK_SIZE": "write tile=",
        "Q_LEN": "write q_len=",
        "is_causal": "write mask=headway.causal()",
        "dropout_p": "it takes mask, b, h, q_len, kv_len, device, tile",
    }.items():
        with _raises(TypeError, "block_mask() got an unexpected", repr(name), way):
            hw.block_mask(hw.causal(), 1, 1, 33, 33, **{name: 1})
    small = {"kv_lora_rank": 8, "nope_width": 8, "rope_width": 4, "value_width": 6}
    for module in (headway.nn.Attention(16, HQ, HK), headway.nn.MLA(16, HQ, **small)):
        for name, way in {
            "is_causal": "write mask=headway.causal()",
            "key_padding_mask": "headway.dense(~m[:, None, None])",
            "position_ids": "angles=module.rotary.angles(position_ids)",
            "past_key_value": "past=headway.nn.Past()",
            "dropout_p": "it takes x, mask, score, angles, past",
        }.items():
            with _raises(TypeError, "forward() got an unexpected", repr(name), way):
                module(torch.randn(B, LENGTH, 16), **{name: None})


def test_the_ways_out_of_keywords():
    """What they say to write does what the keyword did."""
    q, k, v = _qkv()
    kept = torch.rand(B, LENGTH) < 0.8
    kept[:, 0] = True
    sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    expected = sdpa(q, k, v, attn_mask=kept[:, None, None])
    by_names = {"attention_mask": kept.long(), "key_padding_mask": ~kept}
    for name, m in by_names.items():
        expression = re.search(r"mask=(headway.*)", _message(name))[1]
        mask = eval(expression, {"headway": hw, "m": m})
        torch.testing.assert_close(hw.attention(q, k, v, mask=mask), expected)
    assert "call headway.attention_weights(q, k, ...)" in _message("need_weights")
    weights = hw.attention_weights(q, k, mask=hw.causal())
    expected = sdpa(q, k, v, is_causal=True)
    torch.testing.assert_close(weights @ v.repeat_interleave(HQ // HK, 1), expected)


def _message(name: str) -> str:
    with pytest.raises(TypeError) as caught:
        hw.attention(*_qkv(), **{name: None})
    return str(caught.value)


# -- tensors in place of a score or mask -----------------------------------------------------------

# By shape, for queries (2, 4, 5, 8) and keys (2, 2, 7, 8): the axes that are told, and how the
# tensor then broadcasts to (b, h, q_len, kv_len); None where it can't.
SHAPES = {
    (2, 7): ("(batch, kv_len)", lambda m: m[:, None, None]),
    (5, 7): ("(q_len, kv_len)", lambda m: m),
    (1, 7): ("(1, kv_len)", lambda m: m),
    (7,): ("(kv_len,)", lambda m: m),
    (5, 1): ("(q_len, 1)", lambda m: m),
    (2, 5, 7): ("(batch, q_len, kv_len)", lambda m: m[:, None]),
    (2, 1, 7): ("(batch, 1, kv_len)", lambda m: m[:, None]),
    (4, 5, 7): ("(heads, q_len, kv_len)", lambda m: m),
    (8, 5, 7): ("(batch * heads, q_len, kv_len)", lambda m: m.view(2, 4, 5, 7)),
    (1, 5, 7): ("(1, q_len, kv_len)", lambda m: m),
    (2, 1, 1, 7): ("(batch, 1, 1, kv_len)", lambda m: m),
    (2, 1, 5, 7): ("(batch, 1, q_len, kv_len)", lambda m: m),
    (1, 4, 5, 7): ("(1, heads, q_len, kv_len)", lambda m: m),
    (2, 4, 5, 7): ("(batch, heads, q_len, kv_len)", lambda m: m),
    (2, 5): None,
    (7, 5): None,
    (3, 7): None,
    (2, 7, 5): None,
    (2, 2, 5, 7): None,
    (1, 2, 4, 5, 7): None,
}
HINT = re.compile(r"(mask|score)=(headway\.\w+\(.*?\))(?= if |,|;|$| or )")
KEPT = (torch.bool, torch.int64, torch.uint8)


def _small() -> list[torch.Tensor]:
    return [torch.randn(2, *size, 8, dtype=torch.float64) for size in ((4, 5), (2, 7), (2, 7))]


@pytest.mark.parametrize("numpy", [False, True], ids=["tensor", "array"])
@pytest.mark.parametrize("kind", ["mask", "score"])
@pytest.mark.parametrize("dtype", [*KEPT, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_ways_out_of_tensors(shape, dtype, kind, numpy):
    """Each expression that the message shows runs, and means what the axes say."""
    q, k, v = _small()
    kept = torch.rand(shape) < 0.7
    m = kept.to(dtype) if dtype in KEPT else torch.randn(shape, dtype=dtype)
    given = m.numpy() if numpy else m
    with pytest.raises(ArgumentError) as caught:
        hw.attention(q, k, v, **{kind: given})
    message = str(caught.value)
    name = "NumPy array" if numpy else "tensor"
    assert message.startswith(f"{kind} is a {name} {shape} {str(dtype)[6:]}")
    if SHAPES[shape] is None:
        assert "(b, h, q_len, kv_len) = (2, 4, 5, 7)" in message
        assert not HINT.search(message)
        return
    axes, whole = SHAPES[shape]
    assert f"; as {axes} pass " in message
    hints = HINT.findall(message)
    by_lengths = [text for _, text in hints if "padding" in text]
    assert len(by_lengths) == (shape == (2, 7) and dtype in KEPT)
    assert {argument for argument, _ in hints} == (
        {"mask"} if dtype in KEPT else {"score"} if kind == "score" else {"mask", "score"}
    )
    for argument, text in hints:
        if text in by_lengths:
            m = torch.arange(7) < torch.tensor([[3], [6]])
            given, m = (m.numpy() if numpy else m), m.to(dtype)
        mod = eval(text, {"headway": hw, "torch": torch, "m": given})
        value = whole(m if argument == "score" else m.bool())
        out = hw.attention(q, k, v, **{argument: mod})
        if argument == "score":
            value = value.to(q.dtype)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=value.expand(2, 4, 5, 7), enable_gqa=True
        )
        seen = value.expand(2, 4, 5, 7).any(-1) if argument == "mask" else torch.ones(1) > 0
        torch.testing.assert_close(out, torch.where(seen[..., None], expected, 0.0))


def test_a_tensor_of_two_meanings_is_told_both():
    q, k, v = (torch.randn(3, h, 3, 8) for h in (4, 2, 2))
    with _raises(
        ArgumentError,
        "as (q_len, kv_len) pass mask=headway.dense(m), "
        "as (batch, kv_len) pass mask=headway.dense(m[:, None, None]); or, where",
    ):
        hw.attention(q, k, v, mask=torch.ones(3, 3) > 0)


def test_tensors_in_block_masks_and_operands():
    m = torch.rand(2, 7) < 0.5
    with _raises(ArgumentError, "as (batch, kv_len) pass mask=headway.dense(m[:, None, None])"):
        hw.block_mask(m, 2, None, 5, 7)
    with _raises(ArgumentError, "& combines masks", "as (batch, kv_len) write headway.dense(m[:, "):
        hw.causal() & m
    with _raises(ArgumentError, "& combines masks", "broadcast to (b, h, q_len, kv_len); headway"):
        hw.causal() & torch.ones(1, 1, 1, 2, 7)
    with _raises(ArgumentError, "| combines masks", "pass score=headway.bias(m)"):
        m.float() | hw.causal()
    with _raises(ArgumentError, ">> combines scores", "write headway.bias(m)"):
        hw.softcap(3.0) >> m.float()
    q, k, v = _small()
    for argument, mod in (("mask", hw.dense(m)), ("score", hw.bias(m.float()))):
        with _raises(
            ArgumentError, f"as (batch, kv_len) write {type(mod).__name__}(m[:, None, Non"
        ):
            hw.attention(q, k, v, **{argument: mod})


def test_complex_and_strange_tensors():
    with _raises(ArgumentError, "complex64", "bool or float tensor"):
        hw.attention(*_qkv(), mask=torch.zeros(33, 33, dtype=torch.cfloat))
    with _raises(ArgumentError, "mask=array(", "not callable"):
        hw.attention(*_qkv(), mask=np.array(["a"]))
    with _raises(ArgumentError, "as (q_len, kv_len) pass mask=headway.dense(torch.from_numpy(m))"):
        hw.attention(*_qkv(), mask=np.ones((33, 33), dtype=bool)[::-1])


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
        ("score", _far_left, ("index -40 ", "dimension 1", "(4, 33)")),
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
    "document, offsets": (
        lambda: hw.document(torch.tensor([0, 10, 33])),
        ("ids", "(3,)", "from offsets, write document.from_cu_seqlens(cu_seqlens)", "from_lengths"),
    ),
    "padding, keys": (lambda: hw.padding(ids(2, 30) == 0), ("lengths", "(2, 30)", "(2, 33)")),
    "padding, rows": (lambda: hw.padding(ids(1, 33) == 0), ("lengths", "(1, 33)", "(2, 33)")),
    "t5_bias": (lambda: hw.t5_bias(torch.zeros(32, 8)), ("(32, 8)", "4 heads", "(32, 4)")),
    "t5_bias, transposed": (lambda: hw.t5_bias(torch.zeros(4, 32)), ("(32, 4)", "pass table.T")),
    "window_bias": (
        lambda: hw.window_bias(torch.zeros(25, 3), (3, 3)),
        ("(25, 3)", "4 heads", "(25, 4)"),
    ),
    "padding, many": (lambda: hw.padding(ids(3)), ("lengths", "(3,)", "2")),
    "prefix": (lambda: hw.causal() | hw.prefix(ids(1)), ("length", "(1,)", "2")),
    "alibi, few": (lambda: hw.alibi(2), ("slopes", "(2,)", "4")),
    "alibi, many": (lambda: hw.alibi(8), ("slopes", "(8,)", "4")),
    "relative_bias": (lambda: hw.relative_bias(torch.zeros(3, 5)), ("table", "(3, 5)", "4")),
    "bias": (lambda: hw.bias(torch.zeros(7, 33)), ("bias", "(7, 33)", "33")),
    "bias, batch": (lambda: hw.bias(torch.zeros(3, 1, 1, 33)), ("bias", "(3, 1, 1, 33)", "2")),
}


def test_documents_of_fewer_queries_than_keys():
    q, k, v = _qkv()
    with _raises(ArgumentError, "ids, which is of the keys too without kv_ids", "(3,)", "(33,)"):
        hw.attention(q[:, :, :3], k, v, mask=hw.document(ids(3)))


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
    "sliding_window(2.5)": ("sliding_window(window=2.5)", "an integer"),
    "prefix(-1)": ("prefix(length=-1)", ">= 0"),
    "global_tokens(True)": ("global_tokens(count=True)", "an integer"),
    "document([0, 1])": ("document(ids=", "int tensor"),
    "document(torch.zeros(3))": ("ids", "int tensor", "torch.float32"),
    "document(torch.zeros(1, 2, 3, dtype=torch.int64))": ("ids", "(1, 2, 3)"),
    "document([64, 64])": ("from lengths, document.from_lengths",),
    "padding(torch.ones(2, 5).long())": ("lengths", "int64", "(2, 5)", "padding(m.bool())"),
    "window_bias(torch.zeros(8, 13, 13), (7, 7))": ("(169, heads)", "(172, heads)", "(8, 13, 13)"),
    "window_bias(torch.zeros(8, 169), (7, 7))": ("(8, 169)", "(169, heads)", "pass table.T"),
    "tiled(causal, 4, 2)": ("tiled: mask=causal is a class; pass mask=causal()",),
    "tiled(softcap(3.0), 4, 2)": ("tiled: mask=softcap(3.0) is a score",),
    "tiled('causal', 4, 2)": ("tiled: mask='causal' is a string",),
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
    "causal() & torch.ones(3, 3)": ("&", "(3, 3) float32", "headway.dense(m.bool())"),
    "causal() & sliding_window": ("&", "sliding_window is a class; write sliding_window(window)"),
    "causal() & alibi": ("&", "alibi is the class of a score; pass score=alibi(slopes)"),
    "causal() & softcap(3.0)": ("&", "softcap(3.0) is a score; pass it as score=softcap(3.0)"),
    "softcap(3.0) | causal()": ("|", "softcap(3.0) is a score"),
    "softcap(3.0) >> causal()": (">>", "causal() is a mask; pass it as mask=causal()"),
    "causal() >> softcap(3.0)": (">>", "causal() is a mask"),
    "causal() & 'causal'": ("&", "'causal' is a string; write headway.causal()"),
    "sliding_window(torch.tensor(3))": ("sliding_window(window=tensor(3))", "an integer"),
    "causal(1.0)": ("causal(offset=1.0)", "an integer"),
    "causal(True)": ("causal(offset=True)", "an integer"),
    "neighborhood(2.5, 1)": ("neighborhood(shape=2.5)", "an integer"),
    "neighborhood((8, 8), (True, 3))": ("neighborhood(kernel=True)", "an integer"),
    "document.from_lengths([3], q_len=4.5)": ("q_len=4.5", "an integer"),
    "softcap(True)": ("softcap(cap=True)", "number above 0"),
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
    with _raises(ArgumentError, "batch 1 and 2 heads", "batch 2 and 4 query heads", "or for 1"):
        hw.attention(*_qkv(), None, hw.block_mask(by_head, 1, 2, 33, 33))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1, 1, -1, 33), ("q_len=-1", "an integer")),
        ((1, 1.5, 3, 33), ("h=1.5", "an integer")),
        ((True, 1, 3, 33), ("b=True", "an integer")),
    ],
    ids=str,
)
def test_block_masks_of_bad_sizes(arguments, words):
    with _raises(ArgumentError, *words):
        hw.block_mask(hw.causal(), *arguments)


@pytest.mark.parametrize(
    "tile", [0, 64.0, True, None, (0, 64), (64,), (64, 64.0), (64, 64, 64)], ids=str
)
def test_block_masks_of_bad_tiles(tile):
    with _raises(ArgumentError, f"tile={tile!r}", "one or two positive integers"):
        hw.block_mask(hw.causal(), 1, 1, 33, 33, tile=tile)
    with _raises(ArgumentError, f"tile={tile!r}", "one or two positive integers"):
        hw.block_mask(hw.causal(), 1, 1, 33, 33).retile(tile)


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


def test_explain_says_which_backend_was_asked_for():
    given = _qkv()
    assert "lower priority" in str(hw.explain(*given))
    asked = hw.explain(*given, backend="cpu")
    assert asked.reasons["reference"] == ["backend='cpu' excludes it"]
    assert "lower priority" not in str(asked)
