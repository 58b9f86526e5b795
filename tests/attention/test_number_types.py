"""Numbers of any kind are taken wherever numbers are: NumPy's, an enum's, a compiler's."""

import enum
import fractions

import numpy as np
import pytest
import torch

import headway as hw
from headway.compat.torch_sdpa import scaled_dot_product_attention
from headway.errors import ArgumentError
from headway.nn import MLA, Attention, Rotary, YaRN
from headway.types import as_int, as_real

WHOLE = [np.int8, np.int32, np.int64, np.uint16, np.uint64, np.array]
REAL = [np.float16, np.float32, np.float64, fractions.Fraction]


class Size(enum.IntEnum):
    WINDOW = 4


def test_whole_and_real():
    for make in WHOLE:
        assert (as_int(make(5)), type(as_int(make(5)))) == (5, int)
    assert type(as_int(Size.WINDOW)) is int
    for make in [*REAL, *WHOLE[:-1]]:
        assert as_real(make(2)) == 2
        assert type(as_real(make(2))) in (int, float)
    for no in (True, np.True_, 2.0, np.float32(2), "2", None, torch.tensor(2), np.ones(2, int)):
        assert as_int(no) is None
    for no in (True, np.True_, "2", None, torch.tensor(2.0), 2j, np.ones(2)):
        assert as_real(no) is None


@pytest.mark.parametrize("n", WHOLE, ids=lambda kind: kind.__name__)
def test_library_values(n):
    """Equal to those of Python's numbers, in every way."""
    table = torch.randn(8, 4)
    pairs = [
        (hw.causal(n(3)), hw.causal(3)),
        (hw.sliding_window(n(4)), hw.sliding_window(4)),
        (hw.sliding_window(Size.WINDOW), hw.sliding_window(4)),
        (hw.dilated(n(3), n(2)), hw.dilated(3, 2)),
        (hw.strided(n(5)), hw.strided(5)),
        (hw.prefix(n(5)), hw.prefix(5)),
        (hw.global_tokens(n(2)), hw.global_tokens(2)),
        (hw.neighborhood((n(4), n(5)), (n(3), n(3))), hw.neighborhood((4, 5), (3, 3))),
        (hw.neighborhood(np.array([4, 5]), [n(3), 3]), hw.neighborhood((4, 5), (3, 3))),
        (hw.softcap(np.float32(30)), hw.softcap(30.0)),
    ]
    for made, plain in pairs:
        assert made == plain
        assert repr(made) == repr(plain)
        assert hash(made) == hash(plain)
        for name in made.fields:
            assert type(getattr(made, name)) is type(getattr(plain, name))
    assert torch.equal(hw.alibi(n(4)).slopes, hw.alibi(4).slopes)
    made, plain = (hw.t5_bias(table, m, False) for m in (n(20), 20))
    assert torch.equal(made._buckets, plain._buckets)
    assert type(made._most) is int
    ids = hw.document.from_lengths(np.array([3, 4]), q_len=n(9)).ids
    assert torch.equal(ids, hw.document.from_lengths([3, 4], q_len=9).ids)
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    out = hw.attention(q, k, v, mask=hw.causal() & hw.sliding_window(n(4)))
    assert torch.equal(out, hw.attention(q, k, v, mask=hw.causal() & hw.sliding_window(4)))


@pytest.mark.parametrize("x", REAL, ids=str)
def test_scales_probabilities_and_seeds(x):
    q, k, v = (torch.randn(2, 2, 20, 8, requires_grad=True) for _ in range(3))
    expected = hw.attention(q, k, v, hw.softcap(2.5), scale=0.25, dropout=0.5, seed=7)
    for n in WHOLE:
        got = hw.attention(q, k, v, hw.softcap(x(2.5)), scale=x(0.25), dropout=x(0.5), seed=n(7))
        assert torch.equal(got, expected)
    assert torch.equal(hw.attention(q, k, v, scale=x(0.25)), hw.attention(q, k, v, scale=0.25))
    grads = torch.autograd.grad(got.sum(), (q, k, v))
    assert all(map(torch.equal, grads, torch.autograd.grad(expected.sum(), (q, k, v))))


@pytest.mark.parametrize("x", REAL[:-1], ids=str)
def test_numbers_of_the_drop_in(x):
    q, k, v = (torch.randn(2, 2, 20, 8) for _ in range(3))
    original = torch.nn.functional.scaled_dot_product_attention
    for scale in (x(0.25), True, np.int64(2)):
        out = scaled_dot_product_attention(q, k, v, dropout_p=x(0.0), scale=scale)
        torch.testing.assert_close(out, original(q, k, v, dropout_p=x(0.0), scale=scale))


@pytest.mark.parametrize("n", WHOLE, ids=lambda kind: kind.__name__)
def test_block_masks(n):
    mask = hw.causal() & hw.sliding_window(50)
    plain = hw.block_mask(mask, 1, 1, 100, 110, tile=(16, 16))
    for made in (
        hw.block_mask(mask, n(1), n(1), n(100), n(110), tile=n(16)),
        hw.block_mask(mask, None, None, 100, 110, tile=[n(16), 16]),
    ):
        assert (made.shape, made.tile) == (plain.shape, plain.tile)
        assert {type(x) for x in (*made.shape, *made.tile)} == {int}
        assert torch.equal(made.to_dense(), plain.to_dense())
        assert made.retile(n(32)).tile == (32, 32)
        assert torch.equal(made.retile(32).to_dense(), plain.retile((32, 32)).to_dense())
        assert made[n(0), 0, n(2)].shape == plain[0, 0, 2].shape
        assert made.picture(n(8)) == plain.picture(8)
    with pytest.raises(
        ArgumentError, match=r"tile=24 must be multiples of the current tile \(16, 16\)"
    ):
        plain.retile(24)


def test_none_for_batch_and_heads_is_one():
    q, k, v = (torch.randn(2, 4, 100, 8) for _ in range(3))
    mask = lambda b, h, i, j: (i >= j) & (i - j < 30)
    blocks = hw.block_mask(mask, None, None, 100, 100, tile=16)
    assert blocks.shape == (1, 1, 100, 100)
    torch.testing.assert_close(hw.attention(q, k, v, mask=blocks), hw.attention(q, k, v, mask=mask))
    with pytest.raises(ArgumentError, match="q_len=None must be an integer"):
        hw.block_mask(mask, None, None, None, 100)


@pytest.mark.parametrize("n", WHOLE[1:4], ids=lambda kind: kind.__name__)
def test_modules(n):
    x = torch.randn(2, 9, 48)
    torch.manual_seed(1)
    plain = Attention(48, 4, 2, 12, rotary=Rotary(12), scale=0.3, qk_norm=True, dropout=0.25)
    torch.manual_seed(1)
    made = Attention(
        n(48), n(4), n(2), n(12), rotary=Rotary(n(12), np.float32(1e4)), scale=np.float32(0.3),
        qk_norm=True, norm_eps=np.float64(1e-6), dropout=np.float32(0.25),
    )  # fmt: skip
    torch.testing.assert_close(made.eval()(x), plain.eval()(x))
    small = {"q_lora_rank": 16, "kv_lora_rank": 8, "nope_width": 8, "rope_width": 4}
    yarn = YaRN(np.float32(2), n(64), mscale=np.float32(1), mscale_all_dim=n(1))
    made = MLA(
        n(48), n(4), **{name: n(size) for name, size in small.items()}, value_width=n(6),
        rotary=Rotary(n(4), interleaved=True, yarn=yarn),
    )  # fmt: skip
    yarn = YaRN(2.0, 64, mscale=1.0, mscale_all_dim=1.0)
    plain = MLA(
        48, 4, **small, value_width=6, rotary=Rotary(4, interleaved=True, yarn=yarn)
    )  # fmt: skip
    plain.load_state_dict(made.state_dict())
    torch.testing.assert_close(made(x), plain(x))
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, hw.causal()), plain(x, hw.causal()))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Attention(48.0, 4), "width=48.0 must be an integer, 1 or more"),
        (lambda: Attention(48, True), "heads=True must be an integer"),
        (lambda: Attention(48, 4, 0), "kv_heads=0 must be an integer, 1 or more"),
        (lambda: Attention(48, 4, dropout=1.5), "dropout=1.5 must be a probability"),
        (lambda: Attention(48, 4, scale=True), "scale=True must be a number"),
        (lambda: Attention(48, 4, scale=float("nan")), "scale=nan must be a positive number"),
        (lambda: Attention(48, 4, rotary=True), "rotary=True must be a Rotary"),
        (lambda: MLA(48, 4, rotary=64), "rotary=64 must be a Rotary"),
        (lambda: MLA(48, 4, kv_lora_rank=8.0), "kv_lora_rank=8.0 must be an integer"),
        (lambda: Rotary(8.0), "width=8.0 must be an integer"),
        (lambda: YaRN("2", 64), "factor='2' must be a number"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_modules_refuse_what_is_no_number(make, words):
    with pytest.raises(ArgumentError, match=f"^{words}"):
        make()


def test_values_made_in_a_compiled_function():
    """Python's numbers stay symbols there; a NumPy number is an array to the compiler, which
    leaves it to Python."""
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    window = lambda q, n: hw.attention(q, k, v, mask=hw.causal() & hw.sliding_window(n))
    torch.compiler.reset()
    for options in ({"fullgraph": True, "dynamic": True}, {}):
        compiled = torch.compile(window, backend="eager", **options)
        for n in (3, 4, 7):
            torch.testing.assert_close(compiled(q, n), window(q, n))
    torch.testing.assert_close(compiled(q, np.int64(5)), window(q, 5))
