"""Muon in float32 against PyTorch's, which works in bfloat16."""

import pytest
import torch

from headway_lab.recipe import TrainConfig
from headway_lab.recipe.model import Transformer
from headway_lab.recipe.optim import Muon, Optimizers, orthogonalise


@pytest.mark.parametrize("shape", [(16, 16), (64, 16), (16, 64), (1, 8), (48, 33)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    x = torch.randn(3, *shape)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    got = orthogonalise(x)
    near_one = torch.einsum("nir,nij,nrj->nr", u, got, v)
    large = (
        s / s.norm(dim=-1, keepdim=True) > 0.02
    )  # five steps do not lift the smallest all the way
    assert near_one[large].min() > 0.6
    assert near_one.max() < 1.3
    torch.testing.assert_close(got, (u * near_one[:, None]) @ v, atol=1e-3, rtol=1e-3)


def test_the_update_is_that_of_torch() -> None:
    shapes = [(32, 32), (32, 32), (64, 32), (16, 48)]
    mine = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    start = [p.detach().clone() for p in mine]
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    both = (Muon(mine, **settings), torch.optim.Muon(theirs, **settings))
    for _ in range(4):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in both:
            optimizer.step()
    for a, b, before in zip(mine, theirs, start, strict=True):
        moved = (b - before).norm()
        assert (a - b).norm() < 0.03 * moved  # bfloat16 rounds to 1 part in 256 at every product
        assert moved > 0.1


def test_a_parameter_without_gradient_stays() -> None:
    p = torch.nn.Parameter(torch.randn(4, 4))
    before = p.detach().clone()
    Muon([p], lr=1.0).step()
    assert torch.equal(p, before)


def test_state_goes_out_and_comes_back(tiny: TrainConfig) -> None:
    """A model trained on from saved state takes the same next step, to the bit."""
    settings = tiny.resolved()
    tokens = torch.randint(0, 256, (2, 24))

    def step(model: Transformer, optimizers: Optimizers) -> None:
        model(tokens, torch.zeros_like(tokens)).logsumexp(-1).sum().backward()
        optimizers.step(1.0)

    model = Transformer(settings.model())
    optimizers = Optimizers(model, settings)
    step(model, optimizers)
    other = Transformer(settings.model())
    other.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    others = Optimizers(other, settings)
    others.load({k: v.clone() for k, v in optimizers.state().items()})
    assert set(others.state()) == set(optimizers.state())
    for m, o in ((model, optimizers), (other, others)):
        step(m, o)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
