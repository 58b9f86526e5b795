"""The shared table over ranks: every layout and every plan gives what one process does."""

import itertools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import headway as hw
from cases import CASES, Case, problem
from headway.arguments import seed_of
from headway.blocks import from_dense
from headway.distributed import Layout
from headway.distributed.exchange import collective, query_shards, run
from headway.distributed.exchange.global_mask import are_contiguous
from headway.distributed.exchange.headwise import HeadwiseAllGather
from headway.errors import ArgumentError
from processes import run_ranks

PLANS = ("heads", "gather", "ulysses", "auto")


def uneven(length: int, ranks: int, seed: int) -> Layout:
    """Random cuts, dealt at random; the last of three ranks and more holds nothing."""
    g = torch.Generator().manual_seed(seed)
    pieces = min(length, 2 * ranks)
    cuts = torch.randperm(length - 1, generator=g)[: max(0, pieces - 1)].add(1).sort().values
    cuts = [0, *cuts.tolist(), length]
    holders = max(1, ranks - (ranks > 2))
    who = torch.randint(holders, (len(cuts) - 1,), generator=g).tolist()
    return Layout(length, list(zip(who, cuts[:-1], cuts[1:], strict=True)), dist.group.WORLD)


def layout_of(name: str, length: int, ranks: int, seed: int) -> Layout:
    group = dist.group.WORLD
    if name == "contiguous":
        return Layout.contiguous(length, group)
    if name == "zigzag":
        return Layout.zigzag(length, group)
    if name == "balanced":
        return Layout.balanced(length, group, hw.causal() & hw.sliding_window(50), tile=16)
    return uneven(length, ranks, seed)


NAMES = "contiguous", "zigzag", "balanced", "uneven"  # of layouts
# 20, and so that neighbours in the table differ in both.
COMBINATIONS = list(itertools.product(NAMES, PLANS))


def one_case(
    case: Case, dtype: torch.dtype, layouts: tuple[Layout, Layout | None], problem=problem
) -> None:
    """out, lse, max_logit and all gradients of this rank, beside those of one process. Without a
    layout of the keys every rank has all of them.

    - `problem`: makes the inputs.
    """
    q_layout, kv_layout = layouts
    whole = problem(case, dtype)
    options = {"scale": case.scale, "dropout": case.dropout}
    if case.dropout:
        options["seed"] = whole.seed
    results, grads = [], []
    for cut in (False, True):
        p = problem(case, dtype)
        leaves = list(p.leaves().values())
        q, k, v, dout, dlse = p.q, p.k, p.v, p.dout, p.dlse
        if cut:
            q, dout, dlse = (q_layout.shard(x, 2) for x in (q, dout, dlse))
            if kv_layout is not None:
                k, v = (kv_layout.shard(x, 2) for x in (k, v))
        layout = {"layout": layouts} if cut else {}
        found = hw.attention_with_stats(
            q, k, v, p.score(), p.mask(), sink=p.sink, **options, **layout
        )
        seen = found.lse.isfinite()
        loss = (found.out * dout).sum() + (found.lse.masked_fill(~seen, 0) * dlse).sum()
        grads.append(torch.autograd.grad(loss, leaves, allow_unused=True))
        results.append(found)
    one, here = results
    tight = {"rtol": 1e-11, "atol": 1e-11, "equal_nan": True}
    torch.testing.assert_close(here.out, q_layout.shard(one.out, 2), **tight)
    torch.testing.assert_close(here.lse, q_layout.shard(one.lse, 2), **tight)
    torch.testing.assert_close(here.max_logit, one.max_logit, **tight)
    for a, b in zip(grads[1], grads[0], strict=True):
        if a is None or b is None:
            assert a is b
            continue
        dist.all_reduce(a)  # each rank has its share, of q, k and v too
        size = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11 * size, equal_nan=True)


def table(world: int, rank: int, half: int = 0) -> None:
    cases = CASES[world - 2 :: {2: 4, 3: 9, 4: 19}[world]]
    for n, case in enumerate(cases):
        if n // len(COMBINATIONS) % 2 != half:
            continue
        name, plan = COMBINATIONS[(7 * n) % len(COMBINATIONS)]
        q = layout_of(name, case.q_len, world, n).using(plan)
        kv = layout_of(name, case.kv_len, world, n)
        kv = q if case.q_len == case.kv_len else kv
        try:
            one_case(case, torch.float64, (q, kv))
        except Exception as error:
            raise AssertionError(f"{case.name} over {world} ranks, {name}, {plan}") from error


def in_pieces(world: int, rank: int) -> None:
    """A kernel for each straight piece of a rank's queries, as on GPUs where there is a score."""

    def everywhere(inputs, kv_ranges):
        mask = inputs.mask
        split = len(inputs.q.ranges_of(inputs.rank)) > 1 and (mask is None or mask.has_whole_tiles)
        seen.append(split and are_contiguous(kv_ranges))
        return split

    seen: list[bool] = []
    run._plans.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(query_shards, "splits_queries", everywhere)
        for n, case in enumerate(CASES[world :: {2: 12, 3: 25}[world]]):
            name, plan = ("zigzag", "balanced")[n % 2], ("heads", "gather")[n // 2 % 2]
            q = layout_of(name, case.q_len, world, n).using(plan)
            kv = q if case.q_len == case.kv_len else layout_of(name, case.kv_len, world, n)
            try:
                one_case(case, torch.float64, (q, kv))
            except Exception as error:
                raise AssertionError(f"{case.name} over {world} ranks, {name}, {plan}") from error
        n = 256 * world  # in whole tiles
        long = Case(
            "long", b=2, hq=4, hk=2, q_len=n, kv_len=n, score="alibi_softcap", mask="causal"
        )
        layout = Layout.zigzag(n, dist.group.WORLD)
        one_case(long, torch.float64, (layout, layout))
        assert any(seen) or rank == world - 1  # whose pieces touch
    run._plans.clear()


def few_tokens(world: int, rank: int) -> None:
    """Fewer tokens than ranks, none at all, a prime number."""
    for length, name, plan in itertools.product((0, 1, 3, 61), ("zigzag", "contiguous"), PLANS):
        case = Case(f"few_{length}", b=1, hq=4, hk=2, q_len=length, kv_len=length, mask="causal")
        layout = layout_of(name, length, world, 0).using(plan)
        one_case(case, torch.float64, (layout, layout))


def same_bits(world: int, rank: int) -> None:
    """Head by head, rows are those of one call over the same keys in the same tiles, to the bit."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 700, 16) for h in (4, 2, 2))
    mask = hw.causal() & hw.document.from_lengths([300, 17, 383])
    layout = Layout.balanced(700, dist.group.WORLD, mask).using("heads")
    run._plans.clear()
    out = _over(layout, q, k, v, mask)
    whole = hw.attention(q, k, v, mask=hw.block_mask(mask, 1, 1, 700, 700))
    torch.testing.assert_close(out, layout.shard(whole, 2), rtol=0, atol=2e-6)
    (plan, *_) = run._plans.values()[-1]
    assert isinstance(plan, HeadwiseAllGather)
    chunk = plan.chunks[0]
    (part,) = chunk.shards
    read = chunk.comm.tokens_read[rank]
    keys = part.coords.positions(layout.local, read, q.device)[1][0]
    spec, call = hw.resolve.prepare(
        layout.shard(q, 2), k[:, :, keys], v[:, :, keys], mask=mask,
        keys=part.coords._replace(q_pos=layout.positions, kv_pos=keys),
    )  # fmt: skip
    spec, call = replace(spec, tiles=part.tile_info), call.replace(tiles=part.tiles)
    assert torch.equal(hw.backends.get(spec.backend).forward(spec, call).out, out)


def narrow(world: int, rank: int) -> None:
    """bfloat16: errors are those of one process, and sums over ranks lose nothing."""
    torch.manual_seed(0)
    exact = [torch.randn(1, h, 600, 32, dtype=torch.float64) for h in (4, 2, 2)]
    dout = torch.randn(1, 4, 600, 32, dtype=torch.float64).bfloat16()
    layout = Layout.zigzag(600, dist.group.WORLD)
    errors: dict[str, list[float]] = {}
    truth = None
    for name in ("truth", "one", *PLANS):
        leaves = [
            x.bfloat16().to(torch.float64 if name == "truth" else torch.bfloat16) for x in exact
        ]
        leaves = [x.requires_grad_() for x in leaves]
        given, grad, extra = leaves, dout.to(leaves[0].dtype), {}
        if name in PLANS:
            given = [layout.shard(x, 2) for x in leaves]
            grad, extra = layout.shard(grad, 2), {"layout": layout.using(name)}
        out = hw.attention(*given, mask=hw.causal(), **extra)
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        found = [x.double() for x in found]
        if name in PLANS:
            found[0] = layout.unshard(found[0], 2)
            for x in found[1:]:
                dist.all_reduce(x)
        if truth is None:
            truth = found
        errors[name] = [
            ((a - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True)
        ]
    for name in PLANS:
        for mine, one in zip(errors[name], errors["one"], strict=True):
            assert mine <= 1.1 * one, (name, errors)


def bytes_sent(world: int, rank: int) -> None:
    """What is sent is what the plan says, and no more than the tiles that masks need."""
    sent = []
    usual = collective.all_to_all

    def counted(out, given, to_get, to_give, group):
        sent.append(sum(to_get))  # numbers
        return usual(out, given, to_get, to_give, group)

    length, tile = 2000, 128
    mask = hw.causal() & hw.sliding_window(200)
    q, k, v = (torch.randn(1, h, length, 8) for h in (4, 2, 2))
    collective.all_to_all = counted
    try:
        for layout in (Layout.contiguous(length, dist.group.WORLD), uneven(length, world, 3)):
            sent.clear()
            run._plans.clear()
            _over(layout.using("heads"), q, k, v, mask)
            ((plan, *_),) = run._plans.values()
            assert sum(sent) == plan.received
            i = layout.positions
            needed = torch.zeros(length, dtype=torch.bool)
            for first in i.tolist():
                needed[max(0, first - 199) // tile * tile : first // tile * tile + tile] = True
            needed[i] = False
            assert sum(sent) <= int(needed.sum()) * 2 * 16
    finally:
        collective.all_to_all = usual


def documents_apart(world: int, rank: int) -> None:
    """A token of one document changes no row of another, to the bit; a window is not forgotten."""
    torch.manual_seed(0)
    lengths = [70, 131, 1, 99]
    mask = hw.causal() & hw.document.from_lengths(lengths)
    layout = Layout.of_lengths(lengths, dist.group.WORLD, tile=16)
    q, k, v = (torch.randn(1, 2, 301, 8) for _ in range(3))
    before = layout.unshard(_over(layout, q, k, v, mask), 2)
    k[:, :, 80] += 1
    v[:, :, 80] += 1
    after = layout.unshard(_over(layout, q, k, v, mask), 2)
    changed = (before != after).any(-1).any(1)[0].nonzero().flatten()
    assert changed.tolist() == list(range(80, 201))
    window = hw.causal() & hw.sliding_window(20)
    before = layout.unshard(_over(layout, q, k, v, window), 2)
    v[:, :, 40] += 1
    after = layout.unshard(_over(layout, q, k, v, window), 2)
    changed = (before != after).any(-1).any(1)[0].nonzero().flatten()
    assert changed.tolist() == list(range(40, 60))


def drawn_seed(world: int, rank: int) -> None:
    """Of the first rank, forward and backward, whatever the others' generators are at."""
    torch.manual_seed(7)
    q, k, v = (torch.randn(1, 2, 200, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    torch.manual_seed(0)
    seed = seed_of(None, q.device)
    one = hw.attention(q, k, v, dropout=0.5, seed=seed)
    right = torch.autograd.grad(one.sum(), (q, k, v))
    layout = Layout.zigzag(200, dist.group.WORLD)
    torch.manual_seed(rank)
    out = hw.attention(*(layout.shard(x, 2) for x in (q, k, v)), dropout=0.5, layout=layout)
    torch.testing.assert_close(out, layout.shard(one, 2), rtol=1e-11, atol=1e-12)
    for grad, expected in zip(torch.autograd.grad(out.sum(), (q, k, v)), right, strict=True):
        dist.all_reduce(grad)
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)


def _over(layout: Layout, q, k, v, mask):
    return hw.attention(*(layout.shard(x, 2) for x in (q, k, v)), mask=mask, layout=layout)


def block_masks(world: int, rank: int) -> None:
    """A block mask of the whole, at any cuts; lists of blocks where pieces are whole tiles."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 300, 8, dtype=torch.float64) for _ in range(3))
    mask = hw.block_mask(lambda b, h, i, j: i - j >= 3 * h + b, 2, 2, 300, 300, tile=32)
    kept = torch.rand(1, 2, 10, 10) < 0.5
    kept = kept.to(torch.uint8)
    own = from_dense(
        kept * 2, lambda b, h, i, j: kept[0, h, i // 32, j // 32] > 0, (300, 300), (32, 32)
    )
    for given, name, plan in itertools.product((mask, own), ("balanced", "uneven"), PLANS):
        layout = layout_of(name, 300, world, 5).using(plan)
        if given is own and name == "balanced":
            layout = Layout.balanced(300, dist.group.WORLD, hw.causal(), tile=32).using(plan)
        expected = hw.attention(q, k, v, mask=given)
        if given is own and name == "uneven":
            with pytest.raises(ArgumentError, match="its own"):
                _over(layout, q, k, v, given)
            continue
        found = _over(layout, q, k, v, given)
        what = f"{'own' if given is own else 'decided'} tiles, {name}, {plan}"
        torch.testing.assert_close(
            found, layout.shard(expected, 2), rtol=1e-11, atol=1e-12, msg=lambda m, w=what: w + m
        )


RING = Path(__file__).parents[2] / "docs/recipes/own-ring.md"


def ring_of_the_recipe(world: int, rank: int) -> None:
    """The ring of docs/recipes/own-ring.md, next to one process."""
    names: dict = {"torch": torch, "hw": hw}
    code = re.findall(r"^```python\n(.*?)^```$", RING.read_text("utf-8"), re.M | re.S)
    exec(next(block for block in code if "class Ring" in block), names)
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 4, 20 * world, 8, dtype=torch.float64)
    k, v = k[:, :2], v[:, :2]
    dlse = torch.randn(q.shape[:3], dtype=torch.float64)
    whole = [x.requires_grad_() for x in (q, k, v)]
    right = hw.attention_with_stats(*whole, mask=hw.causal())
    right_grads = torch.autograd.grad(right[:2], whole, (dout, dlse))
    here = slice(20 * rank, 20 * rank + 20)
    mine = [x[:, :, here].detach().requires_grad_() for x in whole]
    out, lse = names["Ring"].apply(*mine)
    torch.testing.assert_close(out, right.out[:, :, here])
    torch.testing.assert_close(lse, right.lse[:, :, here])
    grads = torch.autograd.grad((out, lse), mine, (dout[:, :, here], dlse[:, :, here]))
    for ours, theirs in zip(grads, right_grads, strict=True):
        torch.testing.assert_close(ours, theirs[:, :, here], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_over_ranks(world, tmp_path):
    more = (
        in_pieces, drawn_seed, same_bits, narrow, bytes_sent, documents_apart, block_masks,
        ring_of_the_recipe,
    )  # fmt: skip
    run_ranks(world, (table, few_tokens, *(more if world < 4 else ())), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3, 4])
def test_more_of_the_table(world, tmp_path):
    run_ranks(world, (partial(table, half=1),), tmp_path)
