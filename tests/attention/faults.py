"""Backends with one fault each, over the reference.

Each names the cases that must catch it, and the results by which: `shows` must be found wrong,
`hides` must not, since a fault whose forward is right is one that lives for months.
"""

import math
from dataclasses import replace

import pytest
import torch

from headway import causal
from headway.backends import reference
from headway.backends.base import Call
from headway.mods import lower_mod
from headway.mods.graph import Node, parse
from headway.types import Captured, Coords, Forward, Grads, Spec

FORWARD = "out lse max_logit"
GRADS = "q k v"  # and "sink", or the name of a captured tensor
# Of the fourteen shapes, those whose length is no multiple of 64.
UNEVEN = (
    "8_64_127 8_64_120 8_64_129 8_64_255 4_64_127 4_64_120 4_64_129 8_128_127 8_128_120".split()
)


class Right:
    """The reference under another name: what the faults below are faults of."""

    name = "wrong"
    reasons_against = staticmethod(reference.reasons_against)
    accumulates = staticmethod(reference.accumulates)
    native = staticmethod(reference.native)
    code = staticmethod(reference.code)

    def forward(self, spec, call):
        return reference.forward(*self.both(*self.before_forward(spec, call)))

    def backward(self, spec, call, out, lse, dout, dlse, needs):
        spec, call = self.both(*self.before_backward(spec, call))
        return reference.backward(spec, call, out, lse, dout, dlse, needs)

    cases = shows = hides = ""
    half = ""  # cases that must catch what is wrong in half precision only

    # What a fault changes of the arguments: in both directions, or in one.

    def both(self, spec: Spec, call: Call) -> tuple[Spec, Call]:
        return spec, call

    before_forward = before_backward = both


# -- scale ----------------------------------------------------------------------------------------


class NoScale(Right):
    cases = "heads_8_2 fourteen_4_64_127_causal layout_transposed"
    shows = f"{FORWARD} {GRADS}"

    def both(self, spec, call):
        return replace(spec, scale=1.0), call


class ScaleTwice(Right):
    cases = "heads_8_2 fourteen_8_128_128 std_5_None"
    shows = f"{FORWARD} {GRADS}"

    def both(self, spec, call):
        return replace(spec, scale=spec.scale * abs(spec.scale)), call


class ScaleOnceMoreInDq(Right):
    cases = "heads_8_2 length_65 std_1_None"
    shows = "q"
    hides = f"{FORWARD} k v"

    def backward(self, spec, call, *rest):
        grads = super().backward(spec, call, *rest)
        return grads._replace(q=grads.q * spec.scale)


class DefaultForZeroScale(Right):
    cases = "scale_0.0 scale_0.0_score"
    shows = f"{FORWARD} v"

    def both(self, spec, call):
        return replace(spec, scale=spec.scale or 1 / math.sqrt(call.q.shape[3])), call


# -- masks ----------------------------------------------------------------------------------------


class OtherCorner(Right):
    """A causal mask that starts at the other corner where lengths differ."""

    cases = "lengths_61_97_causal lengths_255_65_causal lengths_1_257_causal"
    shows = "out lse"

    def both(self, spec, call):
        return spec, call.replace(coords=Coords(q=call.k.shape[2] - call.q.shape[2]))


class MaskUpsideDown(Right):
    """True masks out."""

    cases = "mask_causal mask_padding mask_dense long_causal_window"
    shows = "out lse"

    def both(self, spec, call):
        graph = parse(spec.mask)
        nodes = (*graph.nodes, Node("not", graph.outputs, "bool"))
        graph = replace(graph, nodes=nodes, outputs=(f"%{len(nodes) - 1}",))
        return replace(spec, mask=graph.text), call


class BackwardWithoutMask(Right):
    cases = "mask_causal mask_causal_late mask_document layout_guarded"
    shows = GRADS
    hides = FORWARD

    def before_backward(self, spec, call):
        n = spec.score_tensors, spec.score_ints, spec.score_floats
        captured = Captured(*(x[:m] for x, m in zip(call.captured, n, strict=True)))
        return replace(spec, mask=None), call.replace(captured=captured)


class BackwardAlwaysCausal(BackwardWithoutMask):
    cases = "fourteen_8_64_128 fourteen_4_64_129 mask_window mask_padding"
    shows = GRADS
    hides = FORWARD

    def before_backward(self, spec, call):
        spec, call = super().before_backward(spec, call)
        graph, captured = lower_mod("mask", causal(), torch.float64)
        of_score = call.captured._replace(ints=[*call.captured.ints, *captured.ints])
        return replace(spec, mask=graph.text), call.replace(captured=of_score)


class BatchZero(Right):
    """Score and mask see batch 0 everywhere."""

    cases = (
        "mask_by_batch mask_causal_document mask_padding "
        "mask_prefix_lm score_by_batch score_bias_batch"
    )
    shows = "out lse"

    def forward(self, spec, call):
        rows = [Right.forward(self, spec, _of_batch(call, n)) for n in range(len(call.q))]
        return Forward(*(torch.cat(x) for x in zip(*rows, strict=True)))

    def backward(self, spec, call, *rest):
        *tensors, needs = rest
        rows = [
            Right.backward(self, spec, _of_batch(call, n), *(x[n : n + 1] for x in tensors), needs)
            for n in range(len(call.q))
        ]
        q, k, v = (torch.cat(x) for x in zip(*(r[:3] for r in rows), strict=True))
        sink = sum(r.sink for r in rows) if call.sink is not None else None
        per_tensor = zip(*(r.captured for r in rows), strict=True)
        captured = [None if x[0] is None else sum(x) for x in per_tensor]
        return Grads(q, k, v, sink, captured)


def _of_batch(call: Call, n: int) -> Call:
    return call.replace(q=call.q[n : n + 1], k=call.k[n : n + 1], v=call.v[n : n + 1])


# -- edges ----------------------------------------------------------------------------------------


class NoTailOfKeys(Right):
    """Keys beyond the last whole block of 64 are not visited."""

    cases = "fourteen_8_64_127 fourteen_4_64_129 length_257 lengths_61_97"
    shows = "out lse"

    def both(self, spec, call):
        whole = max(call.k.shape[2] // 64 * 64, 1)
        return spec, call.replace(k=call.k[:, :, :whole], v=call.v[:, :, :whole])

    def backward(self, spec, call, *rest):
        grads = super().backward(spec, call, *rest)
        short = call.k.shape[2] - grads.k.shape[2]
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, short)) for x in (grads.k, grads.v))
        return grads._replace(k=k, v=v)


class NoTailOfRows(Right):
    """Rows beyond the last whole block of 64 are never written."""

    cases = "fourteen_8_64_127 length_65 length_257_causal lengths_61_97"
    shows = "out lse"

    def forward(self, spec, call):
        out, lse, *rest = super().forward(spec, call)
        whole = call.q.shape[2] // 64 * 64
        written = [torch.empty_like(x) for x in (out, lse)]
        for x, right in zip(written, (out, lse), strict=True):
            x[:, :, :whole] = right[:, :, :whole]
        return Forward(*written, *rest)


class NoTailOfRowsInDq(Right):
    cases = "fourteen_8_64_127 length_65 length_257"
    shows = "q"
    hides = FORWARD

    def backward(self, spec, call, *rest):
        grads = super().backward(spec, call, *rest)
        grads.q[:, :, call.q.shape[2] // 64 * 64 :] = 0
        return grads


class GridOverQueries(Right):
    """dk and dv of keys beyond the number of queries are never written."""

    cases = "lengths_61_97 lengths_65_255_causal long_300_700"
    shows = "k v"
    hides = f"{FORWARD} q"

    def backward(self, spec, call, *rest):
        grads = super().backward(spec, call, *rest)
        k, v = torch.empty_like(grads.k), torch.empty_like(grads.v)
        n = call.q.shape[2]
        k[:, :, :n], v[:, :, :n] = grads.k[:, :, :n], grads.v[:, :, :n]
        return grads._replace(k=k, v=v)


class NeighboursLse(Right):
    """The store of one head's row statistics, a block of 64 without a mask, runs over the first
    rows of the next head's. The backward reads them."""

    cases = " ".join(f"fourteen_{x} fourteen_{x}_causal" for x in UNEVEN)
    shows = GRADS
    hides = FORWARD

    def backward(self, spec, call, out, lse, *rest):
        over = -lse.shape[2] % 64
        flat = lse.flatten(0, 1).clone()
        flat[1:, :over] = flat[:-1, :1]
        return super().backward(spec, call, out, flat.view_as(lse), *rest)


class NextHeadsLse(Right):
    cases = "fourteen_8_64_128 fourteen_8_64_64_causal length_65 heads_8_8"
    shows = GRADS
    hides = FORWARD

    def backward(self, spec, call, out, lse, *rest):
        return super().backward(spec, call, out, lse.roll(1, dims=1), *rest)


class MissingTile(Right):
    """Of the rows 256 to 383, keys 128 to 255 are not visited."""

    cases = "long_513_513 long_700_300"
    shows = "out lse"

    def forward(self, spec, call):
        whole, rows = super().forward(spec, call), slice(256, 384)
        parts = []
        for at in (slice(0, 128), slice(256, None)):
            coords = Coords(q=256, kv=at.start)
            part = call.replace(
                q=call.q[:, :, rows], k=call.k[:, :, at], v=call.v[:, :, at], coords=coords
            )
            parts.append(super().forward(spec, part))
        lse = torch.logaddexp(parts[0].lse, parts[1].lse)
        out = sum(p.out * (p.lse - lse).exp()[..., None].to(p.out.dtype) for p in parts)
        whole.out[:, :, rows], whole.lse[:, :, rows] = out, lse
        return whole


class EmptyRowsAverage(Right):
    """-1e30 in place of -inf: a row that sees nothing gets the mean of v."""

    cases = "mask_causal_late mask_padding mask_sparse long_causal_late"
    shows = "out"

    def forward(self, spec, call):
        whole = super().forward(spec, call)
        nothing = whole.lse == -math.inf
        mean = call.v.mean(2, keepdim=True).repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
        return whole._replace(out=torch.where(nothing[..., None], mean, whole.out))


class EmptyRowsNaN(Right):
    cases = "mask_causal_late mask_padding mask_nothing"
    shows = "q"
    hides = FORWARD

    def backward(self, spec, call, out, lse, *rest):
        grads = super().backward(spec, call, out, lse, *rest)
        return grads._replace(q=grads.q.masked_fill((lse == -math.inf)[..., None], math.nan))


class EmptyRowsLseZero(Right):
    cases = "mask_causal_late mask_padding mask_no_row"
    shows = "lse"
    hides = f"out {GRADS}"

    def forward(self, spec, call):
        whole = super().forward(spec, call)
        return whole._replace(lse=whole.lse.masked_fill(whole.lse == -math.inf, 0))


# -- heads ----------------------------------------------------------------------------------------


class HeadsModulo(Right):
    """Query head h reads key head h % hk."""

    cases = "heads_8_2 heads_6_3 heads_6_2 fourteen_4_64_128"
    shows = f"out lse {GRADS}"

    def both(self, spec, call):
        group = call.q.shape[1] // call.k.shape[1]
        return spec, call.replace(k=call.k.repeat(1, group, 1, 1), v=call.v.repeat(1, group, 1, 1))

    def backward(self, spec, call, *rest):
        grads = super().backward(spec, call, *rest)
        k, v = (x.unflatten(1, (-1, call.k.shape[1])).sum(1) for x in (grads.k, grads.v))
        return grads._replace(k=k, v=v)


class OneHeadOfGroup(Right):
    """dk and dv of the last query head of a group only."""

    cases = "heads_8_2 heads_3_1 fourteen_4_64_128"
    shows = "k v"
    hides = f"{FORWARD} q"

    def backward(self, spec, call, out, lse, dout, dlse, needs):
        group = call.q.shape[1] // call.k.shape[1]
        last = torch.arange(call.q.shape[1]) % group == group - 1
        last = last[:, None]
        whole = super().backward(spec, call, out, lse, dout, dlse, needs)
        part = super().backward(spec, call, out, lse, dout * last[..., None], dlse * last, needs)
        return whole._replace(k=part.k, v=part.v)


class NextHeadsScore(Right):
    """The score reads row h + 1 of what is captured per head."""

    cases = "score_relative score_alibi_learned score_twice width_64_64_score"
    shows = "lse"

    def both(self, spec, call):
        hq = call.q.shape[1]
        given = call.captured.tensors
        tensors = [t.roll(1, 0) if t.dim() and len(t) == hq else t for t in given]
        return spec, call.replace(captured=call.captured._replace(tensors=tensors))


# -- lse, statistics, sink ------------------------------------------------------------------------


class NoGradientOfLse(Right):
    cases = "heads_8_2 fourteen_8_64_128 length_65"
    shows = "q k"
    hides = f"{FORWARD} v"

    def backward(self, spec, call, out, lse, dout, dlse, needs):
        return super().backward(spec, call, out, lse, dout, None, needs)


class LseOfBaseTwo(Right):
    cases = "heads_8_2 length_65"
    shows = "lse"
    hides = f"out {GRADS}"

    def forward(self, spec, call):
        whole = super().forward(spec, call)
        return whole._replace(lse=whole.lse / math.log(2))

    def backward(self, spec, call, out, lse, *rest):
        return super().backward(spec, call, out, lse * math.log(2), *rest)


class LogitAfterScore(Right):
    cases = "score_softcap score_relative score_twice"
    shows = "max_logit"
    hides = f"out lse {GRADS}"

    def forward(self, spec, call):
        whole = super().forward(replace(spec, row_max=True), call)
        return whole._replace(max_logit=whole.row_max.amax(-1), row_max=whole.row_max.new_empty(0))


class LogitOfAllPairs(Right):
    cases = "mask_causal mask_document mask_corner"
    shows = "max_logit"
    hides = f"out lse {GRADS}"

    def forward(self, spec, call):
        plain = Spec(scale=spec.scale, max_logit=True)
        whole = super().forward(plain, call.replace(captured=Captured([], [], [])))
        return super().forward(spec, call)._replace(max_logit=whole.max_logit)


class LogitUnsigned(Right):
    cases = "scale_-0.5 mask_corner"
    shows = "max_logit"
    hides = f"out lse {GRADS}"

    def forward(self, spec, call):
        whole, other = super().forward(spec, call), super().forward(spec, call.replace(q=-call.q))
        return whole._replace(max_logit=torch.maximum(whole.max_logit, other.max_logit))


class SinkIsALogit(Right):
    cases = "scale_0.0_score"
    shows = "max_logit"
    hides = f"out lse {GRADS} sink"

    def forward(self, spec, call):
        whole = super().forward(spec, call)
        largest = torch.maximum(whole.max_logit, call.sink.to(whole.max_logit))
        return whole._replace(max_logit=largest)


class SinkNotInLse(Right):
    cases = "mask_causal_sink heads_8_2"
    shows = "lse"

    def forward(self, spec, call):
        without = super().forward(replace(spec, sink=False), call.replace(sink=None))
        return super().forward(spec, call)._replace(lse=without.lse)


class SinkWithoutGradient(Right):
    cases = "mask_causal_sink heads_8_2 heads_1_1"
    shows = "sink"
    hides = f"{FORWARD} {GRADS}"

    def backward(self, spec, call, *rest):
        grads = super().backward(spec, call, *rest)
        return grads._replace(sink=torch.zeros_like(grads.sink))


class SinkOfNextHead(Right):
    cases = "mask_causal_sink heads_8_2"
    shows = "out lse"

    def both(self, spec, call):
        return spec, call.replace(sink=call.sink.roll(1))


# -- scores ---------------------------------------------------------------------------------------


class BiasOfBaseTwo(Right):
    """log2(e) is applied to the logits and forgotten on the bias."""

    cases = "score_bias_all score_bias_keys score_relative"
    shows = "out lse"

    def both(self, spec, call):
        tensors = [t * math.log(2) if t.is_floating_point() else t for t in call.captured.tensors]
        return spec, call.replace(captured=call.captured._replace(tensors=tensors))


class NoDerivativeOfScore(Right):
    cases = "score_softcap score_alibi_softcap scale_3.0_score"
    shows = "q k"
    hides = f"{FORWARD} v"

    def backward(self, spec, call, out, lse, dout, dlse, needs):
        through = reference._score_gradients

        def identity(spec, call, s, kept, dt, dnumber, needs):
            return dt, through(spec, call, s, kept, dt, dnumber, needs)[1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "_score_gradients", identity)
            return super().backward(spec, call, out, lse, dout, dlse, needs)


class LastOfRepeats(Right):
    """`grad[index] = value` in place of `+=`."""

    cases = "score_relative score_bias_heads score_bias_keys"
    shows = "captured"
    hides = f"{FORWARD} {GRADS}"

    def backward(self, *args):
        def assign(grad, indices, values):
            indices = torch.broadcast_tensors(*map(torch.as_tensor, indices), values)[:-1]
            grad[indices] = values

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "scatter", assign)
            return super().backward(*args)


class FirstGatherOnly(Right):
    """Of a tensor that is indexed twice, the gradient of the first only."""

    cases = "score_twice length_65_score long_score_twice"
    shows = "table"
    hides = f"{FORWARD} {GRADS}"

    def backward(self, *args):
        real, done = reference.scatter, []

        def once(grad, indices, values):
            if not any(grad is x for x in done):
                done.append(grad)
                real(grad, indices, values)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "scatter", once)
            return super().backward(*args)


# -- dropout --------------------------------------------------------------------------------------


class DropoutUnscaled(Right):
    """No 1 / (1 - p), in either direction."""

    cases = "dropout_0.1 dropout_0.5"
    shows = f"out {GRADS}"
    hides = "lse max_logit"

    def forward(self, spec, call):
        whole = super().forward(spec, call)
        return whole._replace(out=whole.out * (1 - spec.dropout))

    def backward(self, spec, call, out, lse, dout, dlse, needs):
        rate = 1 - spec.dropout
        return super().backward(spec, call, out / rate, lse, dout * rate, dlse, needs)


class DropoutNotInBackward(Right):
    cases = "dropout_0.1 dropout_0.5_all"
    shows = GRADS
    hides = FORWARD

    def before_backward(self, spec, call):
        return replace(spec, dropout=0.0), call


class DropoutOfOtherPairs(Right):
    cases = "dropout_0.1 dropout_0.5_all dropout_long"
    shows = GRADS
    hides = FORWARD

    def before_backward(self, spec, call):
        return spec, call.replace(seed=call.seed + 1)


class DropoutAlikeInHeads(Right):
    """Every head drops the same pairs: a counter that leaves the head out."""

    cases = "dropout_0.1 dropout_0.5"
    shows = "out"
    hides = "lse max_logit"

    def forward(self, spec, call):
        hq, group = call.q.shape[1], call.q.shape[1] // call.k.shape[1]
        heads = []
        for h in range(hq):
            at, kv = slice(h, h + 1), slice(h // group, h // group + 1)
            one = call.replace(q=call.q[:, at], k=call.k[:, kv], v=call.v[:, kv])
            heads.append(super().forward(spec, one))
        out, lse = (torch.cat([part[n] for part in heads], 1) for n in (0, 1))
        return super().forward(spec, call)._replace(out=out, lse=lse)


# -- memory ---------------------------------------------------------------------------------------


def _as_if_contiguous(x: torch.Tensor) -> torch.Tensor:
    everything = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return everything[torch.arange(x.numel()) % everything.numel()].view(x.shape)


class StridesOfInputsIgnored(Right):
    cases = "layout_transposed layout_columns layout_fused layout_strided"
    shows = "out"

    def both(self, spec, call):
        return spec, call.replace(**{n: _as_if_contiguous(getattr(call, n)) for n in "qkv"})


class StridesOfDoutIgnored(Right):
    cases = "grad_transposed grad_columns grad_guarded grad_fused"
    shows = GRADS
    hides = FORWARD

    def backward(self, spec, call, out, lse, dout, dlse, needs):
        return super().backward(spec, call, out, lse, _as_if_contiguous(dout), dlse, needs)


class OverwritesInput(Right):
    cases = "length_65 heads_8_2"
    shows = "changed"

    def forward(self, spec, call):
        whole = super().forward(spec, call)
        call.k[0, 0, 0, 0] += 1
        return whole


class AddsUpInBuffers(Right):
    """dv is added to memory that was never cleared."""

    cases = "length_65 heads_8_2"
    shows = "v"
    hides = f"{FORWARD} q k"

    def backward(self, *args):
        grads = super().backward(*args)
        return grads._replace(v=torch.empty_like(grads.v).add_(grads.v))


# -- accumulation ---------------------------------------------------------------------------------
# Right but for the numbers that lie between blocks of 64, which are of the inputs' dtype.


def _blocks(length: int) -> list[slice]:
    return [slice(at, min(at + 64, length)) for at in range(0, length, 64)]


class NarrowSums(Right):
    """dq, dk and dv grow in half precision, as in PyTorch's kernel for CPUs."""

    half = "long_600_half long_pieces_no_mask"
    shows = GRADS
    hides = FORWARD

    def backward(self, spec, call, out, lse, dout, dlse, needs):
        def part(i: slice, j: slice) -> Grads:
            coords = call.coords._replace(q=i.start, kv=j.start)
            k, v = call.k[:, :, j], call.v[:, :, j]
            some = call.replace(q=call.q[:, :, i], k=k, v=v, coords=coords)
            of = [x if x is None else x[:, :, i] for x in (out, lse, dout, dlse)]
            return reference.backward(spec, some, *of, needs)

        whole = super().backward(spec, call, out, lse, dout, dlse, needs)
        every_i, every_j = slice(0, call.q.shape[2]), slice(0, call.k.shape[2])
        dq = sum(part(every_i, j).q for j in _blocks(every_j.stop))
        by_queries = [part(i, every_j) for i in _blocks(every_i.stop)]
        return whole._replace(
            q=dq, k=sum(part.k for part in by_queries), v=sum(part.v for part in by_queries)
        )


class NarrowOut(Right):
    """out grows in half precision from block to block of keys."""

    half = "long_600_half long_pieces_no_mask"
    shows = "out"
    hides = "lse max_logit"

    def forward(self, spec, call):
        whole, out, lse = super().forward(spec, call), None, None
        for j in _blocks(call.k.shape[2]):
            coords = call.coords._replace(kv=j.start)
            some = call.replace(k=call.k[:, :, j], v=call.v[:, :, j], coords=coords)
            part = super().forward(spec, some)
            if out is None:
                out, lse = part[:2]
                continue
            total = torch.logaddexp(lse, part.lse)
            before, now = ((x - total).exp()[..., None] for x in (lse, part.lse))
            out, lse = (out * before + part.out * now).to(call.q.dtype), total
        return whole._replace(out=out.to(whole.out.dtype))
