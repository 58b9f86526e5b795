"""Rotary positions of several coordinates: images, videos, and text with them."""

import pytest
import torch

from headway.errors import ArgumentError
from headway.nn import Attention, Rotary, YaRN

IMAGE = torch.cartesian_prod(torch.arange(5), torch.arange(7)).T  # (2, 35)


def plain(x, rotary, positions, of_pair):
    """Pair by pair, by complex numbers: pair n turns by positions[c] * frequency, of_pair[n] being
    c and the exponent of the frequency."""
    x, w = x.clone(), rotary.width
    for n, (c, exponent) in enumerate(of_pair):
        a, b = (2 * n, 2 * n + 1) if rotary.interleaved else (n, n + w // 2)
        angle = positions[c].double() * rotary.base**-exponent
        z = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones_like(angle), angle)
        x[..., a], x[..., b] = z.real, z.imag
    return x


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("axes", [2, 3])
def test_axial(axes, interleaved):
    rotary = Rotary(12, 100.0, interleaved, axes=axes)
    positions = torch.cat([IMAGE, IMAGE[:1] % 3])[:axes]
    x = torch.randn(2, 3, 35, 16, dtype=torch.float64)
    got = rotary.rotate(x, rotary.angles(positions))
    part = 12 // axes  # channels of an axis
    of_pair = [(n // (part // 2), 2 * (n % (part // 2)) / part) for n in range(6)]
    torch.testing.assert_close(got, plain(x, rotary, positions, of_pair), rtol=1e-4, atol=1e-5)
    assert torch.equal(got[..., 12:], x[..., 12:])
    in_batch = positions[:, None].expand(-1, 2, -1).clone()
    in_batch[:, 1] += 3
    moved = rotary.rotate(x, rotary.angles(in_batch))
    torch.testing.assert_close(moved[0], got[0])
    assert (moved[1] - got[1]).abs().max() > 0.1


def test_logits_depend_on_the_offset_of_two_points():
    rotary = Rotary(16, 100.0, axes=2)
    q, k = torch.randn(2, 1, 1, 1, 16)
    logits = []
    for moved in (0, 2):
        at = torch.tensor([[1, 4], [6, 3]]) + moved
        turned = [rotary.rotate(x, rotary.angles(at[:, n : n + 1])) for n, x in enumerate((q, k))]
        logits.append((turned[0] * turned[1]).sum())
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("interleaved", [False, True])
def test_sections(interleaved):
    rotary = Rotary(16, 100.0, interleaved, sections=(2, 3, 3))
    positions = torch.randint(0, 40, (3, 2, 35))
    x = torch.randn(2, 3, 35, 16, dtype=torch.float64)
    got = rotary.rotate(x, rotary.angles(positions))
    of_pair = [(c, 2 * n / 16) for n, c in enumerate([0, 0, 1, 1, 1, 2, 2, 2])]
    want = plain(x, rotary, positions[:, :, None], of_pair)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_text_has_one_position_in_every_section():
    text, sections = Rotary(16), Rotary(16, sections=(2, 3, 3))
    at = torch.arange(9)
    for given in (at, at.expand(3, 9)):
        for one, other in zip(text.angles(at), sections.angles(given), strict=True):
            assert torch.equal(one, other)
    x = torch.randn(1, 9, 32)
    modules = [Attention(32, 2, rotary=rotary) for rotary in (text, sections)]
    modules[1].load_state_dict(modules[0].state_dict())
    assert torch.equal(modules[0](x), modules[1](x))


def test_an_image_in_a_module():
    module = Attention(32, 2, rotary=Rotary(16, axes=2))
    x = torch.randn(1, 35, 32)
    assert module(x, angles=module.rotary.angles(IMAGE)).shape == x.shape
    with pytest.raises(ArgumentError, match=r"takes \(2, length\) .* torch.cartesian_prod"):
        module(x)


def test_yarn_of_sections_is_yarn():
    yarn = YaRN(4.0, 32)
    one, other = Rotary(16, yarn=yarn), Rotary(16, yarn=yarn, sections=(4, 4))
    at = torch.arange(90)
    assert torch.equal(one.angles(at).cos, other.angles(at.expand(2, -1)).cos)


def test_qwen2_vl():
    """Positions of text with images in it."""
    code = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    configs = pytest.importorskip("transformers.models.qwen2_vl.configuration_qwen2_vl")
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    config = configs.Qwen2VLTextConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, rope_parameters=rope
    )
    positions = torch.randint(0, 90, (3, 2, 35))
    cos, sin = code.Qwen2VLRotaryEmbedding(config)(torch.zeros(1), positions)
    q, k = torch.randn(2, 2, 4, 35, 16)
    theirs = code.apply_rotary_pos_emb(q, k, cos, sin)
    rotary = Rotary(16, 1e6, sections=(2, 3, 3))
    for x, want in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(rotary.rotate(x, rotary.angles(positions)), want)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotary(16, axes=3), "width must be a multiple of 6"),
        (lambda: Rotary(16, axes=0), "axes=0 must be an integer, 1 or more"),
        (lambda: Rotary(16, axes=2, yarn=YaRN(2.0, 8)), "leave one out"),
        (lambda: Rotary(16, axes=2, sections=(4, 4)), "give one"),
        (lambda: Rotary(16, sections=(4, 5)), r"sections=\(4, 5\)\): .* in all 8"),
        (lambda: Rotary(16, sections=8), "sections=8"),
        (lambda: Rotary(16, sections=(4, 4)).angles(torch.zeros(3, 9)), r"shape \(3, 9\), but"),
        (lambda: Rotary(16, axes=2).angles(torch.arange(9)), r"takes \(2, length\)"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()
