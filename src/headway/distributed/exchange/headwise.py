"""The plan "heads": all-gather of keys and values, one chunk of heads at a time, with prefetch.

The key/value heads of a call are cut into chunks (`cost.py`). For each chunk, a rank
all-gathers the keys that its queries need, and runs the backend's kernels on them; the keys of the
next chunk are prefetched meanwhile. Every query sees all of its keys at once, so no partial results
are merged. The backward gathers again and sends dK and dV back to the ranks that hold the keys (a
reduce-scatter). "gather" is this plan with one chunk.

Where the keys of all chunks fit into memory at once, all of them are fetched at the start, and
kernels of consecutive chunks run in two streams (`streams.py`).

On two H200s, causal 16k with 32/8 heads ran at 1.40 times (forward) and 1.32 times (backward) the
speed of PyTorch's context parallel with cuDNN. Each GPU reached 0.94 and 0.99 of the speed of one
GPU that exchanges nothing (docs/lab/ranks.md).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...backends.base import Call
from ...operators import results_like
from ...types import Forward, Grads, Spec, acc_dtype, in_dtype
from .comm_plan import CommPlan, Parts, PendingGather, PendingReduce, Transport
from .plan_inputs import Plan, PlanInputs, sum_captured_grads
from .query_shards import (
    BackwardInputs,
    QueryShard,
    backward_shards,
    forward_shards,
    prepare_shards,
    query_shards,
)
from .streams import StreamPool
from .symmetric_memory import REGIONS


@dataclass(frozen=True)
class HeadChunk:
    """Key/value heads that are exchanged and computed together.

    - `number`: of the chunk, in the order of exchange.
    - `kv_heads`: its key/value heads; `q_heads`: the query heads that read them.
    - `comm`: which rows of K and V this rank receives from whom.
    - `shards`: this rank's queries; each shard is one kernel launch.
    """

    number: int
    kv_heads: range
    q_heads: range
    comm: CommPlan
    shards: list[QueryShard]

    @property
    def kv_slice(self) -> slice:
        """Return the chunk's key/value heads as a slice."""
        return slice(self.kv_heads.start, self.kv_heads.stop)

    @property
    def q_slice(self) -> slice:
        """Return the chunk's query heads as a slice."""
        return slice(self.q_heads.start, self.q_heads.stop)

    def call(self, call: Call, kv: Parts, output_buffers: tuple[Tensor, ...]) -> Call:
        """Return the call of this chunk's heads on gathered keys and values.

        - `output_buffers`: memory that the kernels may write their results into.
        """
        sink = None if call.sink is None else call.sink[self.q_slice]
        k, v = kv
        q = _select_heads(call.q, self.q_slice)
        return call.replace(q=q, k=k, v=v, sink=sink, into=output_buffers)


class HeadwiseAllGather(Plan):
    """All-gather of K and V by chunks of heads; see this file's docstring.

    - `chunk_heads`, `backward_chunk_heads`: how many key/value heads each chunk of the forward and
      of the backward has; together all of them.
    """

    def __init__(
        self, name: str, inputs: PlanInputs, chunk_heads: list[int], backward_chunk_heads: list[int]
    ) -> None:
        self.name, self.group = name, inputs.group
        self.chunks = list(_cut_into_chunks(inputs, chunk_heads))
        self.backward_chunks = self.chunks
        if chunk_heads != backward_chunk_heads:
            self.backward_chunks = list(_cut_into_chunks(inputs, backward_chunk_heads))
        sizes = inputs.sizes
        self.received = sum(
            chunk.comm.received * len(chunk.kv_heads) * sizes.b * (sizes.d + sizes.dv)
            for chunk in self.chunks
        )
        self.all_kv_fits = inputs.all_kv_fits

    def forward(self, spec: Spec, call: Call, transport: Transport) -> Forward:
        """See `Plan`."""
        results = list(results_like(spec.text, call.q, call.v, call.q.shape[0]))
        with self._stream_pool(self.chunks, call, transport) as pool:
            for chunk, pending in self._prefetch(self.chunks, call, transport, pool):
                with pool.stream(chunk.number):
                    kv = pending.wait()
                    out_and_lse = tuple([_select_heads(x, chunk.q_slice) for x in results[:2]])
                    chunk_call = chunk.call(call, kv, out_and_lse)
                    chunk_results = forward_shards(spec, chunk_call, chunk.shards)
                    _store_heads(results, chunk_results, chunk.q_slice)
                pool.keep(kv)
                # The next step allocates another chunk's keys: free these (or `pool` keeps them).
                del pending, kv, chunk_call, chunk_results
        return Forward(*results)

    def backward(self, spec, call, transport, out, lse, dout, dlse, needs):
        inputs = BackwardInputs(out, lse, dout, dlse, needs)
        backward = _BackwardPass(spec, call, transport, inputs)
        with self._stream_pool(self.backward_chunks, call, transport) as pool:
            fetches = self._prefetch(self.backward_chunks, call, transport, pool)
            preprocessed: list[Any] = []
            if pool.streams:
                # A persistent kernel lets no other one in, so every chunk's preprocess (delta, lse)
                # is launched before the first chunk's main kernel.
                fetches = list(fetches)
                preprocessed = [backward.preprocess(*fetch, pool) for fetch in fetches]
            for chunk, pending in fetches:
                chunk_preprocessed = (
                    preprocessed[chunk.number]  # the number of a chunk is its place in the list
                    if preprocessed
                    else backward.preprocess(chunk, pending, pool)
                )
                backward.run(chunk, pending, chunk_preprocessed, pool)
                del pending, chunk_preprocessed
        return backward.finish()

    def _stream_pool(self, chunks: list[HeadChunk], call: Call, transport: Transport) -> StreamPool:
        """Return two streams where all keys fit into memory, and every chunk's gradients have a
        region of symmetric memory, since all of them are in flight at once. Else there are none,
        and all kernels run in the caller's stream."""
        overlaps = self.all_kv_fits and 1 < len(chunks) <= REGIONS
        return StreamPool(call.q.device, overlaps and transport.overlaps_kernels and call.q.is_cuda)

    def _prefetch(
        self, chunks: list[HeadChunk], call: Call, transport: Transport, pool: StreamPool
    ) -> Iterator[tuple[HeadChunk, PendingGather]]:
        """Yield every chunk with its keys and values, which may still be in flight. The gather of
        the next chunk (with streams: of all chunks) begins first, so that this rank lays out its
        rows for the others before it waits for theirs."""
        ahead = len(chunks) if pool.streams else 1
        gathers: list[PendingGather] = []
        for n, chunk in enumerate(chunks):
            for later in chunks[n + len(gathers) : n + 1 + ahead]:
                local_kv = tuple([_select_heads(x, later.kv_slice) for x in (call.k, call.v)])
                gathers.append(transport.gather(later.comm, local_kv))
            yield chunk, gathers.pop(0)  # no reference to earlier chunks' keys is kept here


class _BackwardPass:
    """A backward in progress: its results, and the gradients of K and V that are in flight."""

    def __init__(
        self, spec: Spec, call: Call, transport: Transport, inputs: BackwardInputs
    ) -> None:
        self.call, self.transport, self.inputs = call, transport, inputs
        self.spec = spec.replace(exact_kv=True)  # dK, dV unrounded: they are summed over ranks
        self.dq_dtype, kv_dtype = spec.grad_dtypes(call.q.dtype)
        # In a list, where `_store_heads` may put the result of a chunk of all heads.
        self.dq = [call.q.new_empty(call.q.shape, dtype=self.dq_dtype)]
        self.dk, self.dv = (x.new_empty(x.shape, dtype=kv_dtype) for x in (call.k, call.v))
        self.dsinks: list[Tensor] = []
        self.dcaptured: list[list[Tensor | None]] = []
        self.in_flight: list[tuple[PendingReduce, Parts]] = []  # and the slices of dK, dV to fill

    def preprocess(
        self, chunk: HeadChunk, pending: PendingGather, pool: StreamPool
    ) -> tuple[BackwardInputs, list[Any]]:
        """Launch the backend's preprocess of a chunk. It reads no keys: only the shapes of
        `pending.buffers` count, and their data may not have arrived."""
        chunk_inputs = self.inputs.select_heads(chunk.q_slice)
        with pool.stream(chunk.number):
            chunk_call = chunk.call(self.call, pending.buffers, ())
            return chunk_inputs, prepare_shards(self.spec, chunk_call, chunk.shards, chunk_inputs)

    def run(
        self, chunk: HeadChunk, pending: PendingGather, preprocessed: tuple, pool: StreamPool
    ) -> None:
        """Launch a chunk's kernels, and begin to send its dK and dV to the holders of the keys."""
        chunk_inputs, shard_states = preprocessed
        acc = acc_dtype(self.call.q.dtype)
        with pool.stream(chunk.number):
            kv = pending.wait()
            # Tensors of no rows that say the batch, heads, width and dtype of the gradients.
            templates = tuple([x.new_empty((*x.shape[:2], 0, x.shape[3]), dtype=acc) for x in kv])
            sender = self.transport.reduce_sender(chunk.comm, templates)
            # Kernels write dK and dV straight into symmetric memory, where there is some.
            buffers = _select_heads(self.dq[0], chunk.q_slice), *(sender.send_buffers or ())
            chunk_call = chunk.call(self.call, kv, buffers)
            grads = backward_shards(self.spec, chunk_call, chunk.shards, chunk_inputs, shard_states)
            targets = tuple([_select_heads(x, chunk.kv_slice) for x in (self.dk, self.dv)])
            self.in_flight.append((sender.send((grads.k.to(acc), grads.v.to(acc))), targets))
            _store_heads(self.dq, [in_dtype(grads.q, self.dq_dtype)], chunk.q_slice)
        pool.keep(kv, shard_states)
        # Receive the previous chunk's while this chunk's are sent. With streams, `finish` receives
        # all: until the pool's exit, the caller's stream does not wait for the pool's kernels.
        if not pool.streams and len(self.in_flight) > 1:
            self._receive()
        if grads.sink is not None:
            self.dsinks.append(grads.sink)
        self.dcaptured.append(grads.captured)

    def finish(self) -> Grads:
        """Receive all gradients that are still in flight, and return the results."""
        while self.in_flight:
            self._receive()
        dsink = torch.cat(self.dsinks) if self.dsinks else None
        return Grads(self.dq[0], self.dk, self.dv, dsink, sum_captured_grads(self.dcaptured))

    def _receive(self) -> None:
        """Wait for the oldest chunk's gradients, and write their sums into dK and dV."""
        pending, targets = self.in_flight.pop(0)
        pending.write(targets)


def _cut_into_chunks(inputs: PlanInputs, chunk_heads: list[int]) -> Iterator[HeadChunk]:
    """Yield chunks of `chunk_heads` key/value heads. Where one mask serves all heads, chunks share
    their communication plan."""
    group_size = inputs.sizes.hq // inputs.sizes.hk
    heads_differ = inputs.mask is not None and inputs.mask.h > 1
    shared: tuple[CommPlan, list[QueryShard]] | None = None
    stop = 0
    for number, heads in enumerate(chunk_heads):
        kv_heads = range(stop, stop := stop + heads)
        q_heads = range(kv_heads.start * group_size, kv_heads.stop * group_size)
        if shared is None or heads_differ:
            requirements, needed_tiles = inputs.kv_requirements(q_heads)
            local_ranges = requirements[inputs.rank]
            shared = (
                CommPlan(inputs.kv, requirements, inputs.group),
                query_shards(inputs, q_heads, local_ranges, needed_tiles),
            )
        comm, shards = shared
        h = inputs.offsets[1] + q_heads.start
        chunk_shards = [replace(shard, coords=shard.coords._replace(h=h)) for shard in shards]
        yield HeadChunk(number, kv_heads, q_heads, comm, chunk_shards)


def _store_heads(results: list[Tensor], chunk_results: Iterable[Tensor], heads: slice) -> None:
    """Copy a chunk's results `(b, h, ...)` into the results of all heads, unless the kernels wrote
    them there. A result that was not asked for has one dimension and stays empty."""
    for n, x in enumerate(chunk_results):
        if x.dim() > 1 and x.shape[1] == results[n].shape[1]:
            results[n] = x
        elif x.dim() > 1 and x.data_ptr() != (target := results[n][:, heads]).data_ptr():
            target.copy_(x)


def _select_heads(x: Tensor, heads: slice) -> Tensor:
    """Return some heads of x `(b, heads, ...)`."""
    return x if heads.stop - heads.start == x.shape[1] else x[:, heads]
