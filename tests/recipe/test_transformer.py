"""The network: what each position may depend on, and that decoding repeats training's forward."""

import math

import pytest
import torch
import torch.nn.functional as F

from headway.errors import ArgumentError
from headway.stability import logit_stats
from headway_lab.recipe import generate, generate_many
from headway_lab.recipe.model import ModelConfig, Past, Transformer

CONFIG = ModelConfig(depth=2, width=32, heads=4, kv_heads=2, context=160)


def drawn(config: ModelConfig) -> Transformer:
    """Nothing zero, logits far from even, and hardly ever the end of a file."""
    model = Transformer(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=p.shape[-1] ** -0.5)
        model.head.weight[256] = 0
    return model


@pytest.fixture
def model() -> Transformer:
    return drawn(CONFIG)


def logits(model: Transformer, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, ids)


def draw(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length))


def test_a_position_sees_its_own_file_before_it_and_nothing_else(model: Transformer) -> None:
    """Files of 50, 60 and 50 bytes in one sequence. Change byte 70, in the second: the logits of
    positions 70 to 109 move, and no others by one bit."""
    ids = torch.repeat_interleave(torch.tensor([4, 9, 2]), torch.tensor([50, 60, 50])).expand(2, -1)
    tokens = draw(160)
    other = tokens.clone()
    other[:, 70] = (other[:, 70] + 1) % 256
    moved = (logits(model, tokens, ids) != logits(model, other, ids)).any(-1)
    expected = torch.zeros_like(moved)
    expected[:, 70:110] = True
    assert torch.equal(moved, expected)


def test_packed_files_are_as_if_alone(model: Transformer) -> None:
    """Wherever a file begins in the sequence: rotary logits depend on differences only."""
    first, second = draw(37), draw(90)
    ids = torch.repeat_interleave(torch.tensor([0, 1]), torch.tensor([37, 90])).expand(2, -1)
    packed = logits(model, torch.cat((first, second), 1), ids)
    alone = [logits(model, part, torch.zeros_like(part)) for part in (first, second)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cuts", [[1] * 12, [5, 1, 1, 5], [12], [3, 9]])
def test_decoding_repeats_the_forward(model: Transformer, cuts: list[int]) -> None:
    tokens = draw(12)
    pasts = [Past() for _ in model.blocks]
    with torch.no_grad():
        parts = [model.decode(part, pasts) for part in tokens.split(cuts, dim=1)]
    whole = logits(model, tokens, torch.zeros_like(tokens))
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)


def test_max_logit_is_the_largest_of_each_layer_and_head(model: Transformer) -> None:
    """Against q and k caught on their way, in the first layer, within each file."""
    tokens, ids = draw(64), torch.tensor([0, 1]).repeat_interleave(32).expand(2, -1)
    attention = model.blocks[0].attention
    seen: dict[str, torch.Tensor] = {}
    for name in ("q_proj", "k_proj"):
        getattr(attention, name).register_forward_hook(
            lambda _, __, out, name=name: seen.__setitem__(name, out)
        )
    model(tokens, ids)
    max_logit = torch.stack(list(logit_stats(model).values()))
    assert max_logit.shape == (2, 4)
    position = torch.arange(64.0)
    frequency = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    turn = torch.polar(torch.ones(64, 4), position[:, None] * frequency)
    q, k = (
        torch.view_as_complex(x.unflatten(-1, (-1, 2, 4)).transpose(-1, -2).contiguous())
        * turn[:, None]
        for x in (seen["q_proj"], seen["k_proj"])
    )  # (B, L, heads, D / 2) complex: the pair (n, n + D/2) turned by its position
    k = k.repeat_interleave(2, dim=2)
    s = torch.einsum("bihd,bjhd->bhij", q, k.conj()).real * 8**-0.5
    kept = (ids[:, :, None] == ids[:, None]) & (position[:, None] >= position)
    expected = s.masked_fill(~kept[:, None], -math.inf).amax((0, 2, 3))
    torch.testing.assert_close(max_logit[0], expected, atol=1e-4, rtol=1e-4)


def test_the_first_loss_is_even_odds() -> None:
    tokens = draw(40)
    out = logits(Transformer(CONFIG), tokens, torch.zeros_like(tokens))
    loss = F.cross_entropy(out.flatten(0, 1), draw(40).flatten())
    assert loss.item() == pytest.approx(math.log(257), rel=1e-6)


def test_every_weight_learns(model: Transformer) -> None:
    tokens = draw(40)
    model(tokens, torch.zeros_like(tokens)).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().max() > 0, name


def test_generation_is_a_function_of_the_seed(model: Transformer) -> None:
    def text(**options: float) -> bytes:
        return bytes(generate(model, b"import ", 12, **options))

    assert text(seed=1) == text(seed=1)
    assert text(seed=1) != text(seed=2)
    assert text(temperature=0, seed=1) == text(temperature=0, seed=2)


def test_generation_past_the_context() -> None:
    """When the bytes no longer fit, the older half is forgotten and the rest read again: against
    the forward over each of these windows."""
    model = drawn(ModelConfig(depth=1, width=16, heads=2, kv_heads=1, context=12))
    prompt = b"x" * 20
    seen = [256, *prompt]
    window = seen[-12:]
    for byte in generate(model, prompt, 25, temperature=0):
        if len(window) > 12:
            window = seen[-6:]
        tokens = torch.tensor([window])
        expected = int(logits(model, tokens, torch.zeros_like(tokens))[0, -1].argmax())
        assert byte == expected
        seen.append(byte)
        window = [*window, byte]
    assert len(seen) > 21 + 12


def test_many_prompts_at_once_are_as_if_alone() -> None:
    """Through the context and beyond it, each at its own length."""
    model = drawn(ModelConfig(depth=2, width=16, heads=2, kv_heads=1, context=12))
    prompts = [b"x" * 20, b"", b"def f"]
    steps = list(generate_many(model, prompts, 25, temperature=0.5, seed=3))
    for row, prompt in enumerate(prompts):
        written = [step[row] for step in steps if step[row] is not None]
        assert written == list(generate(model, prompt, 25, temperature=0.5, seed=3))


def test_greedy_is_the_likeliest_byte(model: Transformer) -> None:
    prompt = b"def f(x):"
    first = next(iter(generate(model, prompt, 1, temperature=0)), None)
    tokens = torch.tensor([[256, *prompt]])
    likeliest = int(logits(model, tokens, torch.zeros_like(tokens))[0, -1].argmax())
    assert first == (None if likeliest == 256 else likeliest)


@pytest.mark.parametrize(
    ("options", "named"), [({"length": -1}, "--length"), ({"temperature": -0.1}, "--temperature")]
)
def test_generation_refuses(model: Transformer, options: dict[str, float], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        list(generate(model, b"", **{"length": 1} | options))
