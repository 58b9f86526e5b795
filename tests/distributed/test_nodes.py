"""Ranks that form nodes: the plan of two dimensions gives what one process does."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import headway as hw
from cases import BY_NAME, CASES, Case
from headway.blocks import from_dense
from headway.distributed import Layout
from headway.distributed.exchange import collective, run
from headway.distributed.exchange.cost import cheapest
from headway.errors import ArgumentError
from processes import run_ranks

from .test_cost import set_on_cards
from .test_exact import NAMES, _over, layout_of, one_case, uneven

PLAN = "ulysses*heads"


def mesh_of(*shape: int) -> DeviceMesh:
    """Nodes, and the ranks of a node."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("between", "inside"))


def table(world: int, rank: int) -> None:
    """2 x 2 ranks: cases of the shared table, each with another layout."""
    mesh = mesh_of(2, 2)
    cases = [*CASES[::11], BY_NAME["captured_relative"], BY_NAME["dropout_0.5_all"]]
    for n, case in enumerate(cases):
        name = NAMES[n % 4]
        q = layout_of(name, case.q_len, world, n).on(mesh).using(PLAN)
        kv = q
        if case.q_len != case.kv_len:
            kv = layout_of(name, case.kv_len, world, n).on(mesh)
        try:
            one_case(case, torch.float64, (q, kv))
        except Exception as error:
            raise AssertionError(f"{case.name}, {name}") from error


def heads_and_lengths(world: int, rank: int) -> None:
    """Heads that do not divide, a key/value head for several ranks, none for some; few tokens, a
    prime number of them, and a node that has none."""
    mesh = mesh_of(2, 2)
    sizes = itertools.product(((6, 2), (5, 5), (3, 1), (1, 1)), (0, 1, 3, 61))
    for n, ((hq, hk), length) in enumerate(sizes):
        case = Case("heads", b=2, hq=hq, hk=hk, q_len=length, kv_len=length, mask="causal")
        layout = layout_of(NAMES[n % 3], length, world, n).on(mesh).using(PLAN)
        one_case(case, torch.float64, (layout, layout))
    alone = Layout(61, [(3, 0, 20), (2, 20, 61)], mesh).using(PLAN)
    one_case(case, torch.float64, (alone, alone))


def bytes_sent(world: int, rank: int) -> None:
    """What is sent is what the plan says; between nodes only tiles that a node's queries need."""
    sent: list[tuple[object, int]] = []
    usual = collective.all_to_all

    def counted(out, given, to_get, to_give, group):
        sent.append((group, sum(to_get) - to_get[dist.get_rank(group)]))  # numbers
        return usual(out, given, to_get, to_give, group)

    mesh, length, tile = mesh_of(2, 2), 2000, 128
    between = mesh.get_group("between")
    mask = hw.causal() & hw.sliding_window(200)
    q, k, v = (torch.randn(1, h, length, 8) for h in (4, 2, 2))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(collective, "all_to_all", counted)
        for layout in (Layout.zigzag(length, mesh), uneven(length, world, 3).on(mesh)):
            sent.clear()
            run._plans.clear()
            _over(layout.using(PLAN), q, k, v, mask)
            ((plan, *_),) = run._plans.values()
            assert sum(n for _, n in sent) == plan.received
            node = [p for p in layout.pieces if p[0] // 2 == rank // 2]
            i = torch.cat([torch.arange(a, b) for _, a, b in node])
            needed = torch.zeros(length, dtype=torch.bool)
            for first in i.tolist():
                needed[max(0, first - 199) // tile * tile : first // tile * tile + tile] = True
            needed[i] = False
            # One of two key/value heads, of width 8 + 8.
            assert sum(n for of, n in sent if of is between) == int(needed.sum()) * 16


def block_masks(world: int, rank: int) -> None:
    """A block mask of the whole, one per head; lists of blocks where pieces are whole tiles."""
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 300, 8, dtype=torch.float64) for _ in range(3))
    mask = hw.block_mask(lambda b, h, i, j: i - j >= 3 * h + b, 2, 2, 300, 300, tile=32)
    kept = (torch.rand(1, 2, 10, 10) < 0.5).to(torch.uint8)
    own = from_dense(
        kept * 2, lambda b, h, i, j: kept[0, h, i // 32, j // 32] > 0, (300, 300), (32, 32)
    )
    cut = Layout.balanced(300, mesh, hw.causal(), tile=32)
    for given, layout in ((mask, cut), (mask, uneven(300, world, 5).on(mesh)), (own, cut)):
        found = _over(layout.using(PLAN), q, k, v, given)
        expected = layout.shard(hw.attention(q, k, v, mask=given), 2)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    with pytest.raises(ArgumentError, match="its own"):
        _over(Layout.zigzag(300, mesh).using(PLAN), q, k, v, own)


def one_dimension(world: int, rank: int) -> None:
    """One node is "ulysses", nodes of one rank are "heads": in float64, and in bfloat16 to the
    rounding of their results."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, h, 300, 16, dtype=torch.float64) for h in (4, 2, 2)]
    dout, mask = torch.randn_like(leaves[0]), hw.causal() & hw.sliding_window(120)
    for shape, plan in (((1, 2), "ulysses"), ((2, 1), "heads")):
        layout = Layout.zigzag(300, mesh_of(*shape))
        for dtype, off in ((torch.float64, 1e-12), (torch.bfloat16, 2**-7)):
            found = []
            for name in (plan, PLAN):
                given = [x.to(dtype).requires_grad_() for x in leaves]
                out = _over(layout.using(name), *given, mask)
                grads = torch.autograd.grad(out, given, layout.shard(dout.to(dtype), 2))
                found.append((out, *grads))
            for one, two in zip(*found, strict=True):
                torch.testing.assert_close(two, one, rtol=off, atol=off)


def refused(world: int, rank: int) -> None:
    """Meshes that are no nodes, each with the way out; ranks whose nodes differ."""
    q = torch.randn(1, 2, 48, 8)
    with pytest.raises(ArgumentError, match="needs to know which ranks form a node"):
        hw.attention(q, q, q, layout=Layout.zigzag(96, dist.group.WORLD).using(PLAN))
    names = ("a", "b", "c")
    for mesh, word in (
        (init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=names), "3 dimensions"),
        (init_device_mesh("cpu", (1, 2)), "without names"),
        (DeviceMesh("cpu", [[1], [0]], mesh_dim_names=names[:2]), "ascending order"),
    ):
        with pytest.raises(ArgumentError, match=word):
            Layout.zigzag(96, mesh)
    layouts = [Layout.zigzag(96, mesh_of(*shape)).using(PLAN) for shape in ((1, 2), (2, 1))]
    with pytest.raises(ArgumentError, match=r"rank.*the plan"):
        hw.attention(q, q, q, layout=layouts[rank])


def test_two_by_two(tmp_path):
    run_ranks(4, (table, heads_and_lengths, bytes_sent, block_masks), tmp_path)


def test_one_dimension(tmp_path):
    run_ranks(2, (one_dimension, refused), tmp_path)


def test_values():
    """A layout knows its nodes without processes, and `explain` what they save."""
    layout = Layout.zigzag(4096, (5, (2, 4)))
    assert (layout.rank, layout.ranks, layout.node) == (5, 8, 4)
    assert layout == Layout.zigzag(4096, (5, 8))
    q, k, v = (torch.randn(1, h, layout.local, 16) for h in (8, 4, 4))
    found = hw.explain(q, k, v, mask=hw.causal(), layout=layout.using(PLAN))
    assert f"plan: {PLAN}, as named" in str(found)
    assert "nodes: 2 of 4 ranks; one is sent keys of at most" in str(found)
    with pytest.raises(ArgumentError, match="form a node"):
        hw.explain(q, k, v, layout=Layout.zigzag(4096, (5, 8)).using(PLAN))
    for mesh in ((8, (2, 4)), (0, (2, 0)), (0, (2, 2, 2)), (0, ())):
        with pytest.raises(ArgumentError, match="ranks of a node"):
            Layout.zigzag(64, mesh)


def test_chosen():
    """Where a link between nodes would be waited for, and only with nodes."""
    length, zero = 1 << 17, torch.zeros((), dtype=torch.bfloat16)
    whole = [zero.expand(1, h, length, 128) for h in (32, 8, 8)]
    grid = 7, (8, 8)
    inputs, node = set_on_cards(Layout.zigzag(length, grid), hw.causal(), *whole)
    assert cheapest(inputs, node) == PLAN
    assert cheapest(inputs, None) != PLAN
    near = hw.causal() & hw.sliding_window(4096)
    layout = Layout.contiguous(length, grid)
    assert cheapest(*set_on_cards(layout, near, *whole)) == "heads"
