"""Run a graph with torch, op after op, on tensors that broadcast against each other."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..graph import DTYPES, Graph, Node, Number
from ..ops import apply

Gather = Callable[[int, Tensor, tuple[Tensor | int, ...]], Tensor]


def evaluate(
    graph: Graph,
    values: dict[str, Tensor | Number],
    gather: Gather,
    scratch: Callable[[torch.dtype], Tensor] | None = None,
    overwrite: bool = False,
    only: Iterable[int] | None = None,
    compute: Callable[..., Tensor] = apply,
) -> list[Tensor | Number]:
    """Run `graph` on tensors that broadcast against each other; returns its outputs.

    **Arguments:**

    - `values`: tensors (or numbers) of the inputs, by name; captured tensors under "t0", "t1", ...
    - `gather`: `(node index, captured tensor, indices) -> values`. The caller implements this op:
      its range checks, clamping, and the recording of indices.
    - `scratch`: `dtype -> buffer` of the shape of `values["score"]`, for full-sized intermediates.
      Buffers of dead values are reused, so a long score needs few tiles of memory.
    - `overwrite`: whether `values["score"]` is such a buffer too.
    - `only`: the numbers of the nodes to run, in order. `values` then holds all that they read of
      other nodes ("%3").
    - `compute`: `(op, arguments, dtype, out) -> values`, for every op but `gather`.
    """
    env: dict[str, Tensor | Number] = dict(values)
    buffers = None if scratch is None else _Buffers(graph, env, scratch, overwrite)
    value_of = env.get  # value_of(arg, arg): a name's value, or the number itself
    for n in range(len(graph.nodes)) if only is None else only:
        node = graph.nodes[n]
        args = tuple(map(value_of, node.args, node.args))  # type: ignore[no-matching-overload]
        if node.op == "gather":
            env[f"%{n}"] = gather(n, args[0], args[1:])  # type: ignore[arg-type]
            continue
        out = None if buffers is None else buffers.take(n, node, args)
        env[f"%{n}"] = compute(node.op, args, DTYPES[node.dtype], out)
        if buffers is not None:
            buffers.release(n, node)
    return list(map(value_of, graph.outputs, graph.outputs))  # type: ignore[arg-type]


class _Buffers:
    """Buffers for full-sized intermediates: a dying operand's, else a free one, else a new one."""

    def __init__(
        self, graph: Graph, env: dict, scratch: Callable[[torch.dtype], Tensor], overwrite: bool
    ) -> None:
        self.env, self.scratch, self.last_use = env, scratch, graph.last_use
        self.full_shape = env["score"].shape
        self.output_names = set(graph.outputs)
        self.in_buffers = {"score"} if overwrite else set()
        self.free: list[Tensor] = []

    def dying(self, n: int, node: Node) -> list[str]:
        return [
            a for a in dict.fromkeys(node.args)
            if a in self.in_buffers and self.last_use[a] == n and a not in self.output_names
        ]  # fmt: skip

    def take(self, n: int, node: Node, args: tuple) -> Tensor | None:
        """Return a buffer for the node's value, if it is full-sized and floating."""
        dtype = DTYPES[node.dtype]
        if node.op == "to" or not dtype.is_floating_point:
            return None
        if not any(isinstance(a, Tensor) and a.shape == self.full_shape for a in args):
            return None
        self.in_buffers.add(f"%{n}")
        # Every op is pointwise, so it may overwrite its operands.
        dying = [a for a in self.dying(n, node) if self.env[a].dtype == dtype]
        if dying:
            self.in_buffers.discard(dying[0])
            return self.env[dying[0]]
        fits = [buffer for buffer in self.free if buffer.dtype == dtype]
        self.free = [buffer for buffer in self.free if not fits or buffer is not fits[0]]
        return fits[0] if fits else self.scratch(dtype)

    def release(self, n: int, node: Node) -> None:
        """Free the buffers of the operands that are not read after this node."""
        for a in self.dying(n, node):
            self.free.append(self.env[a])
            self.in_buffers.discard(a)
