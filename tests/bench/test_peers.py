"""Peers that need a card or a package, played on the CPU: what they are asked, and that it is right."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import headway
from headway_lab.bench import cute_mods, measure, peers, timing
from headway_lab.bench.case import FORWARD, Case, Unavailable, make_inputs, tilted
from headway_lab.bench.cases import GPU_CASES
from headway_lab.bench.peers import PEERS

CASE = Case("four", b=2, hq=4, hk=2, length=150, d=16, dv=8, mask=headway.causal, by_rows=True)
IDS = torch.arange(150) // 40
MASKS = {
    "none": None,
    "causal": headway.causal,
    "window": lambda: headway.causal() & headway.sliding_window(70),
    "both sides": lambda: headway.sliding_window(9),
    "documents": lambda: headway.causal() & headway.document(IDS),
}
ODD = {
    "prefix": lambda: headway.causal() | headway.prefix(20),
    "nothing": lambda: lambda b, h, i, j: (i > 30) & (j < 20) | (j > 40) & (j < i),
    "strided": lambda: headway.strided(7),
}


@pytest.fixture
def quick(monkeypatch):
    """A bench in no time, in which every package is installed."""
    monkeypatch.setattr(peers.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(measure, "roof", lambda dtype, device: 1e9)
    monkeypatch.setattr(timing, "SHORTEST", 1e-6)
    for name, peer in PEERS.items():
        monkeypatch.setitem(PEERS, name, replace(peer, backward=("cpu",)))


def timed(name: str, **changes):
    """The peer's lines of a case; every one is checked against float64."""
    results = measure.measure_time(replace(CASE, peers=(name,), **changes), "cpu", 1)
    theirs = [r for r in results if r.contestant == name]
    assert all(r.error <= r.limit for r in theirs if not r.verdict)
    return theirs


def keys_of(ends: torch.Tensor, n: int) -> torch.Tensor:
    """Which keys a query attends to, from the words of cuDNN's documentation."""
    (columns,) = ends
    assert len(columns) % 2 == 1
    assert (columns.diff(dim=0) >= 0).all()
    j = torch.arange(n)
    seen = j < columns[0][:, None]
    for start, stop in zip(columns[1::2], columns[2::2], strict=True):
        seen |= (j >= start[:, None]) & (j < stop[:, None])
    return seen


@pytest.mark.parametrize("name", [*MASKS, *ODD])
def test_intervals_are_the_mask(name):
    make = (MASKS | ODD)[name]
    mask = None if make is None else make()
    ends = peers.interval_ends(mask, 150, torch.device("cpu"))
    assert ends.dtype == torch.int32
    assert ends.is_contiguous()
    i, j = torch.arange(150)[:, None], torch.arange(150)
    zero = torch.zeros((), dtype=torch.int64)
    expected = torch.ones(150, 150, dtype=torch.bool)
    if mask is not None:
        expected &= mask(zero, zero, i, j)
    assert torch.equal(keys_of(ends, 150), expected)
    if name in ("none", "causal", "prefix"):
        assert ends.shape[1] == 1  # no empty interval before the first


@pytest.mark.parametrize("name", MASKS)
def test_cudnn_gets_a_plan_and_tensors_of_its_layout(quick, monkeypatch, name):
    def create_mask_plan(table, q, k, v, build_backward):
        assert build_backward
        assert table.shape[2] == 2 * 150
        assert q.shape == (2, 150, 4, 16)
        return table[:, :, :150]

    def flex_attn_func(q, k, v, mask_plan):
        assert all(x.is_contiguous() for x in (q, k, v))
        seen = keys_of(mask_plan, 150)
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return headway.attention(*turned, mask=headway.dense(seen)).transpose(1, 2)

    module = SimpleNamespace(create_mask_plan=create_mask_plan, flex_attn_func=flex_attn_func)
    monkeypatch.setitem(sys.modules, "cudnn", module)
    assert len(timed("cudnn flex", mask=MASKS[name])) == 2


@pytest.mark.parametrize("name", MASKS)
def test_varlen_gets_packed_tokens(quick, monkeypatch, name):
    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa):
        assert enable_gqa
        assert max_q == max_k == cu_q.diff().max()
        left, right = (float("inf") if size < 0 else size for size in window_size)
        ids = torch.repeat_interleave(cu_q.diff())
        mask = headway.document(ids) & (lambda b, h, i, j: (i - j <= left) & (j - i <= right))
        turned = (x.transpose(0, 1)[None] for x in (q, k, v))
        return headway.attention(*turned, mask=mask)[0].transpose(0, 1)

    module = SimpleNamespace(varlen_attn=varlen_attn)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    assert len(timed("varlen", mask=MASKS[name])) == 2
    (line,) = timed("varlen", score=lambda: headway.softcap(5.0))
    assert line.note == "it has no score"


def test_flash_of_flex_is_asked_for_by_name(quick, monkeypatch):
    asked = []

    def flex_attention(q, k, v, score_mod, block_mask, enable_gqa, kernel_options):
        asked.append(kernel_options)
        return headway.attention(q, k, v, mask=headway.causal())

    monkeypatch.setattr(peers.flex, "flex_attention", flex_attention)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    assert timed("flex flash")
    assert {str(options) for options in asked} == {"{'BACKEND': 'FLASH'}"}
    asked.clear()
    assert timed("flex")
    assert set(asked) == {None}


# -- FlashAttention-4's score functions: CuTe DSL, played by PyTorch ------------------------------


class Fragment(list):
    """What `cute.make_rmem_tensor` returns, of one element."""

    def store(self, x):
        self[0] = x

    def load(self):
        return self[0]


class Table:
    """A captured tensor, as FlashAttention-4 hands it to a score."""

    def __init__(self, values):
        self.values, self.element_type = values, values.dtype

    def __getitem__(self, at):
        return self.values[at]


@pytest.fixture
def cute(monkeypatch):
    played = SimpleNamespace(
        jit=lambda f: f, full_like=torch.full_like, make_rmem_tensor=lambda n, of: Fragment([0])
    )
    monkeypatch.setattr(cute_mods, "cute", played)
    types = SimpleNamespace(Float32=torch.float32, Int32=torch.int32)
    monkeypatch.setattr(cute_mods, "cutlass", types)


def flash_attn_func(q, k, v, causal, score_mod, score_mod_bwd, aux_tensors=()):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    n = q.shape[2]
    h, i, j = torch.arange(4)[:, None, None], torch.arange(n)[:, None], torch.arange(n)
    rest = (torch.zeros(()), h, i, j, None, [Table(x) for x in aux_tensors])
    logits = q @ k.mT / 4
    score = score_mod(logits, *rest)
    grad, leaf = torch.randn_like(score), logits.detach().requires_grad_()
    with torch.enable_grad():
        (right,) = torch.autograd.grad(score_mod(leaf, *rest), leaf, grad)
    torch.testing.assert_close(score_mod_bwd(grad, leaf, *rest), right)
    if causal:
        score = score.masked_fill(j > i, -torch.inf)
    return (score.softmax(-1) @ v).transpose(1, 2), None


SCORES = {
    "identity": None, "tilted": tilted, "alibi": lambda: headway.alibi(torch.rand(4)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_its_own_scores_are_the_cases_scores(quick, cute, monkeypatch, name):
    module = SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    assert len(timed("flash-attention-4 scored", score=SCORES[name])) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"score": lambda: headway.softcap(5.0)},
        {"score": lambda: headway.alibi(4), "mask": None},
        {"score": lambda: headway.alibi(torch.ones(4, requires_grad=True))},
        {"mask": MASKS["window"]},
    ],
)
def test_what_its_scores_are_not_timed_with_is_said(changes):
    case = replace(CASE, **changes)
    with pytest.raises(Unavailable, match=r"of the scores|score functions"):
        peers._flash4_scored(case, make_inputs(case))


class Blocks(NamedTuple):
    """`BlockSparseTensorsTorch`, with its fields in its order."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None

    def pairs(self, count, index, n):
        """Which pairs lie in the blocks of one of the two lists, `(n, n)`."""
        rows, columns = index.shape[2:]
        blocks = torch.zeros(rows, columns, dtype=torch.bool)
        for row in range(rows):
            blocks[row, index[0, 0, row, : count[0, 0, row]].long()] = True
        return blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :n]


def flash_attn_func_of_blocks(
    q, k, v, mask_mod, block_sparse_tensors, block_sparse_tensors_bwd, aux_tensors=()
):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    n = q.shape[2]
    kept = torch.zeros(n, n, dtype=torch.bool)
    for lists in (block_sparse_tensors, block_sparse_tensors_bwd):
        assert lists.block_size == (128, 128)
        partial = lists.pairs(lists.mask_block_cnt, lists.mask_block_idx, n)
        full = lists.pairs(lists.full_block_cnt, lists.full_block_idx, n)
        if lists is block_sparse_tensors_bwd:  # of queries, for every block of keys
            partial, full = partial.T, full.T
        i, j = torch.arange(n)[:, None], torch.arange(n)
        seen = mask_mod(None, None, i, j, None, [Table(x) for x in aux_tensors])
        now = full | partial & seen
        assert lists is block_sparse_tensors or torch.equal(now, kept)
        kept = now
    return headway.attention(q, k, v, mask=headway.dense(kept)).transpose(1, 2), None


@pytest.mark.parametrize("name", ["window", "documents"])
def test_its_own_masks_with_lists_of_blocks_are_the_cases_masks(quick, cute, monkeypatch, name):
    interface = SimpleNamespace(flash_attn_func=flash_attn_func_of_blocks)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    sparsity = SimpleNamespace(BlockSparseTensorsTorch=Blocks)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", sparsity)
    ids = torch.arange(400) // 90
    masks = {
        "window": lambda: headway.causal() & headway.sliding_window(70),
        "documents": lambda: headway.causal() & headway.document(ids),
    }
    assert len(timed("flash-attention-4 blocks", mask=masks[name], length=400)) == 2


@pytest.mark.parametrize("name", ["none", "causal", "both sides", *ODD])
def test_masks_without_lists_of_blocks_are_named(name):
    case = replace(CASE, mask=(MASKS | ODD)[name])
    with pytest.raises(Unavailable, match="timed with causal windows and documents"):
        peers._flash4_sparse(case, make_inputs(case))


# -- rows, the curve, clocks ----------------------------------------------------------------------


def test_tensors_of_a_case_by_rows_lie_as_a_model_makes_them():
    for x in make_inputs(CASE)[:4]:
        assert x.transpose(1, 2).is_contiguous()
    plain = make_inputs(replace(CASE, by_rows=False))
    assert all(torch.equal(a, b) for a, b in zip(make_inputs(CASE)[:4], plain[:4], strict=True))
    assert make_inputs(CASE).q.requires_grad


def test_rows_and_curve_have_every_peer():
    cases = [case for case in GPU_CASES if {"rows", "curve"} & set(case.tags)]
    assert all(case.by_rows for case in cases)
    assert all(set(case.peers) <= set(PEERS) for case in cases)
    lengths = [case.length >> 10 for case in cases if "curve" in case.tags]
    assert lengths == [1, 2, 4, 8, 16, 32, 64, 128]
    wanted = {"flex flash", "cudnn flex", "varlen", "flash-attention-4 scored"}
    assert all(wanted <= set(case.peers) for case in cases)


def test_clocks_and_power_stand_beside_the_times(monkeypatch):
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda: 1755)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: 640_400)
    clocks = timing.Clocks("cuda")
    clocks.sample()
    assert str(clocks) == "1755 MHz, 640 W"

    def missing():
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "clock_rate", missing)
    for device in ("cuda", "cpu"):
        clocks = timing.Clocks(device)
        clocks.sample()
        assert str(clocks) == ""


def test_a_peer_runs_only_where_it_can(quick):
    """On this machine: a line that says why, and no figure."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    for name in ("cudnn flex", "flash-attention-4 scored", "flash-attention-4 blocks", "varlen"):
        *_, line = timed(name, mask=MASKS["window" if name.endswith("blocks") else "causal"])
        assert (line.direction, line.verdict) in {("", "not run"), (FORWARD, "")}
        assert line.note.startswith("could not run: ")
