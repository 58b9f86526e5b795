"""Each entry of the gallery: its code gives what its formula says, output and gradients."""

import math

import pytest
import torch

import gallery

ENTRIES = [pytest.param(e, id=e.key) for e in gallery.MASKS + gallery.SCORES]


def dense(entry: gallery.Entry, names: dict) -> torch.Tensor:
    """What the formulas of an entry say, over all pairs, in float64."""
    q, k, v = (names[x].double() for x in "qkv")
    q = q[:, :, -names["out"].shape[2] :]
    lengths = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    b, h, i, j = (
        torch.arange(n).view([-1 if at == axis else 1 for at in range(4)])
        for axis, n in enumerate(lengths)
    )
    s = q @ k.mT / math.sqrt(q.shape[-1])
    known = names | entry.names | {"s": s, "b": b, "h": h, "i": i, "j": j}
    known |= {
        n: x.double()
        for n, x in names.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    kept = eval(entry.kept, known) if entry.kept else torch.tensor(True)
    if entry.weight:
        weights = torch.where(kept, eval(entry.weight, known), 0.0)
    else:
        score = eval(entry.score, known) if entry.score else s
        seen = kept | ~kept.any(-1, keepdim=True)  # a query that sees nothing gets 0
        weights = torch.where(kept, torch.where(seen, score, -math.inf).softmax(-1), 0.0)
    return weights @ v


@pytest.mark.parametrize("entry", ENTRIES)
def test_code_is_its_formula(entry: gallery.Entry):
    names = gallery.run(entry, seed=len(entry.key))
    inputs = [names[x] for x in "qkv"]
    inputs += [
        x for n, x in names.items()
        if n not in ("q", "k", "v") and isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf
    ]  # fmt: skip
    expected = dense(entry, names)
    torch.testing.assert_close(names["out"].double(), expected, atol=2e-5, rtol=1e-4)
    sent = torch.randn_like(expected)
    ours = torch.autograd.grad(names["out"], inputs, sent.to(names["out"].dtype), retain_graph=True)
    theirs = torch.autograd.grad(expected, inputs, sent)
    for mine, true in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, true, atol=5e-4, rtol=1e-3)


def test_every_value_of_the_library_is_shown():
    import headway as hw

    code = " ".join(e.about + e.code for e in gallery.MASKS + gallery.SCORES)
    values = [
        name for name, x in vars(hw).items()
        if isinstance(x, type) and issubclass(x, hw.Mask | hw.Score) and x not in (hw.Mask, hw.Score)
    ]  # fmt: skip
    assert [name for name in values if f"hw.{name}" not in code] == []


def test_keys_are_different():
    keys = [e.key for e in gallery.MASKS + gallery.SCORES]
    assert len(set(keys)) == len(keys)
