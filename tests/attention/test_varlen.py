"""Packed sequences and nested tensors, against attention over every sequence alone."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils._python_dispatch import TorchDispatchMode

import headway as hw
import ragged
from cases import CASES
from headway import packed
from headway.compat.torch_sdpa import scaled_dot_product_attention, use_for_sdpa
from headway.errors import ArgumentError
from headway.mods.evaluation.pointwise import Positions, mask_at
from headway.mods.library.packed import PackedMask
from headway.mods.lowering import lower_mod
from long import long_unless

# -- the shared table, its batch rows as sequences ------------------------------------------------

TABLE = [case for case in CASES if not case.dropout]  # dropped pairs are those of packed tokens
VARIANTS = [
    case for case in TABLE
    if case.name.startswith(("mask_", "score_")) and not case.name.endswith(("_sink", "_masked"))
]  # fmt: skip
EVERY = list(itertools.product(TABLE, ragged.FORMS, ["cpu", "reference"]))
OFTEN = [(case, ragged.FORMS[n // 2 % 2], "cpu") for n, case in enumerate(VARIANTS) if n % 2]


@pytest.mark.parametrize(("case", "form", "backend"), long_unless(OFTEN, EVERY), ids=str)
def test_table(case, form, backend):
    assert ragged.wrong(case, torch.float64, backend, form) == []


# -- random lengths -------------------------------------------------------------------------------

F64 = {"dtype": torch.float64, "requires_grad": True}


class Sequences:
    """Random sequences, some without tokens, and what a score captures of them."""

    def __init__(self, alike: bool) -> None:
        count = int(torch.randint(1, 6, ()))
        self.q_lens = torch.randint(0, 40, (count,)) * (torch.rand(count) > 0.2)
        self.kv_lens = self.q_lens if alike else torch.randint(0, 40, (count,))
        self.cu_q, self.cu_k = map(offsets_of, (self.q_lens, self.kv_lens))
        self.q = torch.randn(int(self.cu_q[-1]), 4, 8, **F64)
        self.k = torch.randn(int(self.cu_k[-1]), 2, 8, **F64)
        self.v = torch.randn(int(self.cu_k[-1]), 2, 6, **F64)
        self.sink, self.table = torch.randn(4, **F64), torch.randn(count, 4, **F64)
        self.by_distance = torch.randn(80, **F64)

    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.sink, self.table, self.by_distance]

    def scores(self) -> dict:
        table, by_distance = self.table, self.by_distance
        return {
            "none": lambda n: None,
            "table": lambda n: lambda s, b, h, i, j: s + table[b + n, h] * torch.cos(i * 0.1 + j),
            "distance": lambda n: lambda s, b, h, i, j: s + by_distance[i - j + 40],
        }

    def masks(self) -> dict:
        kv_lens, q_lens = self.kv_lens, self.q_lens
        return {
            "none": lambda n: None,
            "causal": lambda n: hw.causal() & hw.sliding_window(9),
            "bottom right": lambda n: lambda b, h, i, j: j <= i + (kv_lens[b + n] - q_lens[b + n]),
            "places": lambda n: lambda b, h, i, j: (i % 3 != j % 2) & (j != 1),
        }

    def alone(self, score, mask) -> tuple[Tensor, Tensor, Tensor]:
        """out, lse and max_logit, sequence by sequence."""
        parts = zip(
            *(x.split(n.tolist()) for x, n in (
                (self.q, self.q_lens), (self.k, self.kv_lens), (self.v, self.kv_lens)
            )), strict=True,
        )  # fmt: skip
        results = [
            hw.attention_with_stats(
                *(x.transpose(0, 1)[None] for x in part), score(n), mask(n), sink=self.sink,
                backend="reference",
            )
            for n, part in enumerate(parts)
        ]  # fmt: skip
        out, lse, largest = zip(*results, strict=True)
        return torch.cat(out, 2)[0].transpose(0, 1), torch.cat(lse, 2)[0], torch.cat(largest)

    def packed(self, score, mask) -> tuple[Tensor, Tensor, Tensor]:
        alike = self.kv_lens is self.q_lens
        return hw.varlen_attention_with_stats(
            self.q, self.k, self.v, score(0), mask(0), cu_q=self.cu_q.int(), max_q=40,
            cu_k=None if alike else self.cu_k, max_k=None if alike else 40, sink=self.sink,
        )  # fmt: skip

    def nested(self, score, mask) -> tuple[Tensor, Tensor, Tensor]:
        cu_k = self.cu_q if self.kv_lens is self.q_lens else self.cu_k
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(x.transpose(0, 1), cu, jagged_dim=2)
            for x, cu in ((self.q, self.cu_q), (self.k, cu_k), (self.v, cu_k))
        )
        out, lse, largest = hw.attention_with_stats(q, k, v, score(0), mask(0), sink=self.sink)
        assert out.shape[:3] == q.shape[:3] == lse.shape
        return out.values().transpose(0, 1), lse.values(), largest


def offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "q and k differ"])
def test_sequences_are_attended_to_alone(alike):
    for n in range(4):
        given = Sequences(alike)
        pairs = itertools.product(given.scores().values(), given.masks().values())
        for score, mask in itertools.islice(pairs, n, None, 4):
            right = given.alone(score, mask)
            sent = [torch.randn_like(x) for x in right[:2]]
            grads = gradients_of(right, sent, given.leaves())
            for form in (given.packed, given.nested):
                results = form(score, mask)
                largest = right[2] if form == given.nested else right[2].amax(0)
                for x, y in zip(results, (*right[:2], largest), strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
                for x, y in zip(gradients_of(results, sent, given.leaves()), grads, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)


def gradients_of(results, sent: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    out, lse, _ = results
    kept = torch.where(lse.isinf(), 0.0, lse)
    total = (out * sent[0]).sum() + (kept * sent[1]).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def test_tokens_of_no_sequence_see_nothing_and_are_not_seen():
    x = torch.randn(12, 2, 8, requires_grad=True)
    cu = torch.tensor([0, 4, 9])
    out, lse, _ = hw.varlen_attention_with_stats(x, x, x, cu_q=cu, max_q=5)
    assert (out[9:] == 0).all()
    assert (lse[:, 9:] == -torch.inf).all()
    whole = hw.varlen_attention(x[:9], x[:9], x[:9], cu_q=cu, max_q=5)
    torch.testing.assert_close(out[:9], whole)
    (grad,) = torch.autograd.grad(out.sum() + lse[:, :9].sum(), x)
    assert (grad[9:] == 0).all()
    assert grad.isfinite().all()


def test_nested_tensors_with_holes():
    """`narrow` leaves tokens between the sequences, which belong to none."""
    rows, start, lengths = torch.randn(3, 10, 2, 8), torch.tensor([1, 2, 0]), [3, 0, 6]
    narrowed = torch.nested.narrow(rows, 1, start, torch.tensor(lengths), layout=torch.jagged)
    x = narrowed.transpose(1, 2)
    out, lse, largest = hw.attention_with_stats(x, x, x, mask=hw.causal())
    for n, (at, length) in enumerate(zip(start.tolist(), lengths, strict=True)):
        row = rows[n : n + 1, at : at + length].transpose(1, 2)
        alone = hw.attention_with_stats(row, row, row, mask=hw.causal())
        torch.testing.assert_close(out[n], alone.out[0])
        torch.testing.assert_close(lse[n], alone.lse[0])
        torch.testing.assert_close(largest[n], alone.max_logit[0])


def test_gradients_reach_a_nested_leaf():
    parts = [torch.randn(n, 2, 8) for n in (3, 1, 6)]
    leaf = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    x = leaf.transpose(1, 2)
    hw.attention(x, x, x, mask=hw.causal()).values().square().sum().backward()
    for part, grad in zip(parts, leaf.grad.unbind(), strict=True):
        part = part.requires_grad_()
        row = part.transpose(0, 1)[None]
        hw.attention(row, row, row, mask=hw.causal()).square().sum().backward()
        torch.testing.assert_close(grad, part.grad)


def test_no_sequences_and_no_tokens():
    empty = torch.nested.nested_tensor_from_jagged(
        torch.randn(4, 0, 8), torch.tensor([0]), jagged_dim=2
    )
    out, lse, largest = hw.attention_with_stats(empty, empty, empty)
    assert out.shape[0] == lse.shape[0] == 0
    assert largest.shape == (0, 4)
    x = torch.randn(0, 4, 8)
    out, lse, largest = hw.varlen_attention_with_stats(x, x, x, cu_q=torch.tensor([0, 0]), max_q=0)
    assert out.shape == (0, 4, 8)
    assert lse.shape == (4, 0)
    assert (largest == -torch.inf).all()


# -- the host -------------------------------------------------------------------------------------

COPIES = {
    "aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select",
    "aten::equal", "aten::is_nonzero", "aten::_unique2", "aten::repeat_interleave.Tensor",
}  # fmt: skip


class NoCopyToHost(TorchDispatchMode):
    """A mode in which the host may read no tensor, and none may change its device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert func.name() not in COPIES, func
        tensors = [x for x in (*args, result) if isinstance(x, Tensor)]
        assert len({x.device for x in tensors if x.dim()}) <= 1, func
        return result


@pytest.mark.parametrize("score", [None, hw.softcap(4.0)], ids=str)
def test_the_host_reads_no_offsets(score):
    """Tensors on "meta" have no numbers: whatever the host would read, it could not."""
    x = torch.randn(9, 4, 8, device="meta", requires_grad=True)
    cu = torch.zeros(4, dtype=torch.int32, device="meta")
    options = {"max_q": 9, "backend": "reference"}
    nested = torch.nested.nested_tensor_from_jagged(x.transpose(0, 1), cu.long(), jagged_dim=2)
    with NoCopyToHost():
        for keys in ({}, {"cu_k": cu.clone(), "max_k": 9}):
            hw.varlen_attention(x, x, x, score, hw.causal(), cu_q=cu, **keys, **options)
            results = hw.varlen_attention_with_stats(
                x, x, x, score, hw.causal(), cu_q=cu, **keys, **options
            )
            (results.out.sum() + results.lse.sum()).backward()
        results = hw.attention_with_stats(nested, nested, nested, score, backend="reference")
        results.out.values().sum().backward()
    assert x.grad.shape == x.shape


def test_writes_to_offsets_count():
    numbers = np.array([0, 4, 10], np.int32)
    cu, x = torch.from_numpy(numbers), torch.randn(10, 2, 8)

    def call(offsets: Tensor) -> Tensor:
        return hw.varlen_attention(x, x, x, cu_q=offsets, max_q=8)

    first = call(cu)
    numbers[1] = 6  # unseen by PyTorch
    assert not torch.equal(call(cu), first)
    assert torch.equal(call(cu), call(torch.tensor(numbers)))
    with torch.inference_mode():
        made_there = torch.tensor([0, 6, 10])
        assert torch.equal(call(made_there), call(cu))
    x.requires_grad_()
    call(made_there).sum().backward()


def test_offsets_are_not_kept_alive():
    x = torch.randn(10, 2, 8)
    cu = torch.tensor([0, 4, 10])
    hw.varlen_attention(x, x, x, cu_q=cu, cu_k=cu, max_q=8, max_k=8)
    alive, entries = weakref.ref(cu), len(packed._packings)
    del cu
    gc.collect()
    assert alive() is None
    assert len(packed._packings) < entries


# -- what backends are given ----------------------------------------------------------------------


@pytest.mark.parametrize("mask", [
    hw.causal(), hw.causal() & hw.sliding_window(3), hw.dilated(3, 2),
    lambda b, h, i, j: (i - j).abs() < 3 + h,
])  # fmt: skip
def test_masks_of_distances_are_those_of_documents(mask):
    """Where keys are packed as queries are, kernels get plain positions."""
    ids = torch.zeros(5, dtype=torch.int32)
    ours = lower_mod("mask", PackedMask(ids, ids, ids, None, mask), torch.float32)[0]
    documents = lower_mod("mask", hw.document(ids, ids) & mask, torch.float32)[0]
    assert [(n.op, n.args, n.dtype) for n in ours.nodes if n.op != "gather"] == [
        (n.op, n.args, n.dtype) for n in documents.nodes if n.op != "gather"
    ]
    apart = lower_mod("mask", PackedMask(ids, ids, ids, ids, mask), torch.float32)[0]
    assert apart.uses("t2")
    assert apart.uses("t3")
    assert not ours.uses("t2")


def test_aligned_masks_of_distances_read_no_positions_of_keys():
    """Kernels get the places of keys in the row, of which bounds and limits know more."""
    sides = (
        packed.Side(name, 9, torch.device("cpu"), torch.tensor(cu))
        for name, cu in (("q", [0, 3, 8]), ("k", [0, 5, 7]))
    )
    packing = packed.pack(*sides).aligned()
    at = torch.meshgrid(*map(torch.arange, (1, 1, 9, 9)), indexing="ij")
    for mask, reads in (
        (hw.causal(), False), (~hw.causal(-3), False), (hw.sliding_window(2), False),
        (hw.chunked(2), True), (hw.prefix(2), True),
    ):  # fmt: skip
        graph, captured = lower_mod("mask", packing.mask(mask), torch.float32)
        assert graph.uses("t3") == reads
        kept = mask_at(graph, captured, Positions(*at))
        assert torch.equal(kept.expand(1, 1, 9, 9), packing.mask(mask)(*at))


@pytest.mark.parametrize("form", ["varlen", "jagged"])
def test_compiled(form):
    table = torch.randn(4)

    def call(x, cu):
        score = hw.bias(table[:, None, None])
        if form == "varlen":
            return hw.varlen_attention(x, x, x, score, hw.causal(), cu_q=cu, max_q=9)
        rows = torch.nested.nested_tensor_from_jagged(x.transpose(0, 1), cu, jagged_dim=2)
        return hw.attention(rows, rows, rows, score, hw.causal()).values().transpose(0, 1)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for cu in (torch.tensor([0, 3, 9]), torch.tensor([0, 7, 9])):
        x = torch.randn(9, 4, 8, requires_grad=True)
        out, right = compiled(x, cu), call(x, cu)
        torch.testing.assert_close(out, right)
        (grad,), (right_grad,) = (torch.autograd.grad(o.square().sum(), x) for o in (out, right))
        torch.testing.assert_close(grad, right_grad)


# -- PyTorch's function ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_sdpa_of_nested_tensors(options):
    lengths, keys = (5, 0, 9), (4, 3, 7)
    q, k = (
        torch.nested.nested_tensor([torch.randn(n, 4, 8) for n in of], layout=torch.jagged)
        .transpose(1, 2) for of in (lengths, keys)
    )  # fmt: skip
    with use_for_sdpa():
        outs = [torch.nn.functional.scaled_dot_product_attention(q, k, k, **options)]
    outs.append(scaled_dot_product_attention(q, k, k, **options))
    for out in outs:
        for row, one, keys_of_one in zip(out.unbind(), q.unbind(), k.unbind(), strict=True):
            torch.testing.assert_close(row, torch_sdpa(one, keys_of_one, keys_of_one, **options))


# -- refusals -------------------------------------------------------------------------------------

X = torch.randn(9, 4, 8)
CU = torch.tensor([0, 3, 9])


def nested(lengths=(3, 6), heads=4, width=8) -> Tensor:
    parts = [torch.randn(n, heads, width) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


def varlen(**options):
    named = {"q": X, "k": X, "v": X, "cu_q": CU, "max_q": 6} | options
    return hw.varlen_attention(named.pop("q"), named.pop("k"), named.pop("v"), **named)


N = nested()
REFUSED = {
    "falls": (lambda: varlen(cu_q=torch.tensor([0, 5, 3, 9])), r"cu_q must rise from 0 to at most"),
    "past the end": (lambda: varlen(cu_q=torch.tensor([0, 10]), max_q=10), r"at most 9"),
    "not from 0": (lambda: varlen(cu_q=torch.tensor([1, 9]), max_q=9), r"cu_q must rise from 0"),
    "too long": (lambda: varlen(max_q=5), r"max_q=5, but the longest .* q has 6 tokens"),
    "keys too long": (
        lambda: varlen(cu_k=CU, max_k=5), r"max_k=5, but the longest sequence of k has 6"
    ),
    "no max_k": (lambda: varlen(cu_k=CU), r"cu_k needs max_k"),
    "floats": (lambda: varlen(cu_q=CU.float()), r"cu_q must be an int32 or int64 tensor"),
    "a list": (lambda: varlen(cu_q=[0, 9]), r"cu_q must be .* got list"),
    "elsewhere": (lambda: varlen(cu_q=CU.to("meta")), r"cu_q is on meta, q on cpu"),
    "counts": (
        lambda: varlen(cu_k=torch.tensor([0, 9]), max_k=9), r"count different numbers of sequences"
    ),
    "a batch": (lambda: varlen(q=X[None]), r"q must be \(tokens, hq, d\), got \(1, 9, 4, 8\)"),
    "fewer keys": (lambda: varlen(k=X[:4], v=X[:4]), r"q has 9 tokens, k 4: pass .* cu_k"),
    "block mask": (
        lambda: varlen(mask=hw.block_mask(hw.causal(), 1, 1, 9, 9)), r"mask is a block mask"
    ),
    "lengths of padding": (
        lambda: varlen(mask=hw.padding(torch.tensor([1, 2, 3]))), r"\(3,\).* \(b\) = \(2,\)"
    ),
    "batches": (
        lambda: hw.attention(N, nested((3, 6, 1)), nested((3, 6, 1))),
        r"batch sizes differ|must have the same sequences",
    ),
    "keys and values": (lambda: hw.attention(N, N, nested((6, 3))), r"must have the same sequences"),
    "only q": (lambda: hw.attention(N, X, X), r"k is \(9, 4, 8\) float32, but not all of q, k"),
    "only keys": (lambda: hw.attention(X[None], N, N), r"k is a nested tensor"),
    "heads last": (
        lambda: hw.attention(*[N.transpose(1, 2)] * 3), r"move heads with \.transpose\(1, 2\)"
    ),
    "nested block mask": (
        lambda: hw.attention(N, N, N, mask=hw.block_mask(hw.causal(), 1, 1, 9, 9)),
        r"mask is a block mask",
    ),
    "a layout": (
        lambda: hw.attention(N, N, N, layout=object()), r"layout= takes no nested tensors"
    ),
    "sdpa with a mask": (
        lambda: scaled_dot_product_attention(N, N, N, torch.ones(6, 6)),
        r"attn_mask is not taken with nested tensors",
    ),
    "sdpa heads": (
        lambda: scaled_dot_product_attention(N, nested(heads=2), nested(heads=2)),
        r"numbers of heads differ: query 4, key 2, value 2; .* enable_gqa=True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        call()


def test_keys_and_values_with_equal_offsets_of_their_own():
    """On the CPU the host compares them; elsewhere it would have to wait for the device."""
    q, k, v = nested((2, 5)), nested((4, 3)), nested((4, 3), width=6)
    out = hw.attention(q, k, v)
    for row, *parts in zip(out.unbind(), q.unbind(), k.unbind(), v.unbind(), strict=True):
        torch.testing.assert_close(row, hw.attention(*(x[None] for x in parts))[0])
    meta = [
        torch.nested.nested_tensor_from_jagged(
            torch.randn(4, 7, 8, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta"),
            jagged_dim=2,
        )
        for _ in range(2)
    ]  # fmt: skip
    with pytest.raises(ArgumentError, match=r"make v with .*nested_tensor_from_jagged\(values, k"):
        hw.attention(meta[0], meta[0], meta[1], backend="reference")
