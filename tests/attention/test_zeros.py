"""Sizes of nothing, drawn at random, through every public call: next to the dense definition."""

import random

import pytest
import torch

import headway as hw
import oracle
from headway import inference
from headway.compat import flash, flex, torch_sdpa

MASKS = {
    "none": (None, None),
    "causal": (hw.causal(), lambda b, h, i, j: j <= i),
    "window": (hw.sliding_window(5), lambda b, h, i, j: (i - j).abs() < 5),
    "function": (lambda b, h, i, j: (i + j) % 3 > 0, lambda b, h, i, j: (i + j) % 3 > 0),
}
SCORE = lambda s, b, h, i, j: s * 0.5 + (i - j) * 0.01


class Problem:
    """A call in which one size or two are 0."""

    def __init__(self, rng: random.Random):
        size = {
            "b": rng.choice([1, 2]), "g": rng.choice([1, 2, 3]), "q": rng.choice([1, 2, 5, 16, 17]),
            "k": rng.choice([1, 5, 16, 17, 40, 200]), "d": rng.choice([1, 8]),
            "dv": rng.choice([1, 8]),
        }  # fmt: skip
        size.update(dict.fromkeys(rng.sample(list(size), rng.choice([1, 1, 2])), 0))
        b, g, q, k, d, dv = size.values()
        hk = rng.choice([1, 2])
        self.b, self.hq, self.hk, self.q_len, self.kv_len = b, g * hk, hk, q, k
        self.q, self.k, self.v = (
            torch.randn(b, h, length, width, requires_grad=True)
            for h, length, width in ((g * hk, q, d), (hk, k, d), (hk, k, dv))
        )
        self.sink = torch.randn(g * hk, requires_grad=True) if rng.random() < 0.3 else None
        self.score = SCORE if rng.random() < 0.3 else None
        self.name = rng.choice(list(MASKS))
        self.mask, self.dense_mask = MASKS[self.name]

    @property
    def leaves(self):
        return [x for x in (self.q, self.k, self.v, self.sink) if x is not None]

    def right(self, first=0):
        """The dense results in float64 of queries from position `first` on, and their leaves."""
        q, k, v, *sink = leaves = [x.detach().double().requires_grad_() for x in self.leaves]
        score, mask = self.score, self.dense_mask
        dense = oracle.attention(
            q, k, v,
            score and (lambda s, b, h, i, j: score(s, b, h, i + first, j)),
            mask and (lambda b, h, i, j: mask(b, h, i + first, j)),
            sink=sink[0] if sink else None,
        )  # fmt: skip
        return dense, leaves

    def __repr__(self):
        shapes = ", ".join(str(tuple(x.shape)) for x in self.leaves)
        return f"{shapes}, score: {self.score is not None}, mask: {self.name}"


def compare(found, right):
    right = [x for x in right if x is not None]  # what nobody asked for
    for made, expected in zip(found, right, strict=True):
        torch.testing.assert_close(made.double(), expected.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("seed", range(30))
def test_training(seed, backend):
    problem = Problem(random.Random(seed))
    print(problem)
    right, leaves = problem.right()
    dout, dlse = torch.randn(right.out.shape), torch.randn(right.lse.shape)
    given = problem.q, problem.k, problem.v, problem.score
    masks = [problem.mask]
    if problem.mask is not None:
        sizes = None, None, problem.q_len, problem.kv_len
        masks.append(hw.block_mask(problem.mask, *sizes, tile=(16, 16)))
    for mask in masks:
        out = hw.attention(*given, mask, sink=problem.sink, backend=backend)
        stats = hw.attention_with_stats(*given, mask, sink=problem.sink, backend=backend)
        compare([out, *stats], [right.out, *right])
        compare(
            torch.autograd.grad(out, problem.leaves, dout),
            gradients((right.out * dout).sum(), leaves),
        )
        seen = torch.where(right.lse.isinf(), 0, right.lse)  # others have no gradient
        compare(
            torch.autograd.grad(stats[:2], problem.leaves, (dout, dlse)),
            gradients((right.out * dout).sum() + (seen * dlse).sum(), leaves),
        )
    assert str(hw.explain(*given, problem.mask, sink=problem.sink))


def gradients(loss, leaves):
    return torch.autograd.grad(
        loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True
    )


@torch.no_grad()
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("seed", range(30))
def test_over_caches(seed, backend):
    """A cache in one piece, in pages with heads before and after the keys of a page, and packed."""
    problem = Problem(random.Random(seed))
    print(problem)
    b, q, k, v = problem.b, problem.q, problem.k, problem.v
    rest = max(problem.q_len - problem.kv_len, 0)  # queries are among the keys
    q = q[:, :, rest:]
    problem.q, q_len = q, q.shape[2]
    right, _ = problem.right(problem.kv_len - q_len)
    lengths = torch.full((b,), problem.kv_len, dtype=torch.int32)
    options = {"sink": problem.sink, "backend": backend}
    given = problem.score, problem.mask

    def attend(q, k, v, **more):
        return inference.attention_with_stats(q, k, v, *given, lengths=lengths, **options, **more)

    compare(attend(q, k, v), right)
    count = -(-problem.kv_len // 4)
    table = torch.arange(b * count, dtype=torch.int32).view(b, count)
    by_page = [
        torch.cat((x, x.new_zeros(b, problem.hk, 4 * count - x.shape[2], x.shape[3])), 2)
        .unflatten(2, (count, 4)).transpose(1, 2).flatten(0, 1).contiguous()
        for x in (k, v)
    ]  # fmt: skip
    compare(attend(q, *by_page, page_table=table), right)
    heads_last = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in by_page]
    compare(attend(q, *heads_last, page_table=table), right)
    packed = q.transpose(0, 1).reshape(1, problem.hq, b * q_len, q.shape[3])
    cu_q = torch.arange(b + 1, dtype=torch.int32) * q_len
    out, lse, largest = attend(packed, k, v, cu_q=cu_q, max_q=q_len)
    apart = [x[0].unflatten(1, (b, q_len)).transpose(0, 1) for x in (out, lse)]
    compare((*apart, largest), right)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(30))
def test_drop_ins(seed):
    problem = Problem(random.Random(seed))
    print(problem)
    problem.sink = problem.score = None
    q, k, v = problem.q, problem.k, problem.v
    right, _ = problem.right()
    blocks = None
    if problem.mask is not None:
        blocks = flex.create_block_mask(problem.mask, None, None, q.shape[2], k.shape[2], "cpu")
    made = flex.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True, return_lse=True)
    compare(made, right[:2])
    is_causal = problem.name == "causal"
    if not is_causal and problem.mask is not None:
        return
    made = torch_sdpa.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    compare([made], right[:1])
    right, _ = problem.right(k.shape[2] - q.shape[2])  # the corner is bottom-right
    of_flash = [x.transpose(1, 2) for x in (q, k, v)]
    made = [
        flash.flash_attn_func(*of_flash, causal=is_causal),
        flash.flash_attn_with_kvcache(*of_flash, causal=is_causal),
    ]
    if problem.b:
        cu_q, cu_k = (torch.arange(problem.b + 1, dtype=torch.int32) * x.shape[2] for x in (q, k))
        packed = [x.flatten(0, 1) for x in of_flash]
        out = flash.flash_attn_varlen_func(
            *packed, cu_q, cu_k, q.shape[2], k.shape[2], causal=is_causal
        )
        made.append(out.unflatten(0, (problem.b, q.shape[2])))
    for out in made:
        compare([out.transpose(1, 2)], right[:1])
