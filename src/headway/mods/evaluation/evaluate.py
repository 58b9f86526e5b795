"""Run a graph with torch: op after op, on tensors that broadcast against each other."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..graph import DTYPES, Graph, Node, Number, apply

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
    - `gather`: `(node index, captured tensor, indices) -> values`; the one op whose meaning (range
      checks, clamping, recording of indices) belongs to the caller.
    - `scratch`: gives a buffer of the size of `values["score"]` to write a full-sized
      intermediate to. Buffers whose value is dead are used again, in place, so a long score costs
      few tiles of memory.
    - `overwrite`: `values["score"]` is such a buffer too.
    - `only`: the numbers of the nodes to run, in their order, where `values` has all that they read
      of others ("%3").
    - `compute`: `(op, arguments, dtype, out) -> values`, of every op but `gather`.
    """
    env: dict[str, Tensor | Number] = dict(values)
    buffers = None if scratch is None else _Buffers(graph, env, scratch, overwrite)
    read = env.get  # a number among the arguments is no key, and stands for itself
    for n in range(len(graph.nodes)) if only is None else only:
        node = graph.nodes[n]
        args = tuple(map(read, node.args, node.args))  # type: ignore[no-matching-overload]
        if node.op == "gather":
            env[f"%{n}"] = gather(n, args[0], args[1:])  # type: ignore[arg-type]
            continue
        out = None if buffers is None else buffers.take(n, node, args)
        env[f"%{n}"] = compute(node.op, args, DTYPES[node.dtype], out)
        if buffers is not None:
            buffers.release(n, node)
    return list(map(read, graph.outputs, graph.outputs))  # type: ignore[arg-type]


class _Buffers:
    """Where full-sized intermediate values go: over an operand that dies, else to a free buffer."""

    def __init__(
        self, graph: Graph, env: dict, scratch: Callable[[torch.dtype], Tensor], overwrite: bool
    ) -> None:
        self.env, self.scratch, self.last_use = env, scratch, graph.last_use
        self.full = env["score"].shape
        self.kept = set(graph.outputs)
        self.owned = {"score"} if overwrite else set()
        self.free: list[Tensor] = []

    def dying(self, n: int, node: Node) -> list[str]:
        return [
            a for a in dict.fromkeys(node.args)
            if a in self.owned and self.last_use[a] == n and a not in self.kept
        ]  # fmt: skip

    def take(self, n: int, node: Node, args: tuple) -> Tensor | None:
        """A buffer for the node's value, if it is full-sized and floating."""
        dtype = DTYPES[node.dtype]
        if node.op == "to" or not dtype.is_floating_point:
            return None
        if not any(isinstance(a, Tensor) and a.shape == self.full for a in args):
            return None
        self.owned.add(f"%{n}")
        # Every op is pointwise: it may write over what it reads.
        over = [a for a in self.dying(n, node) if self.env[a].dtype == dtype]
        if over:
            self.owned.discard(over[0])
            return self.env[over[0]]
        fits = [x for x in self.free if x.dtype == dtype]
        self.free = [x for x in self.free if not fits or x is not fits[0]]
        return fits[0] if fits else self.scratch(dtype)

    def release(self, n: int, node: Node) -> None:
        """After the node: what died in it may be used again."""
        for a in self.dying(n, node):
            self.free.append(self.env[a])
            self.owned.discard(a)
