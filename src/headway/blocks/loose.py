"""What a mask may keep, whatever is in the tensors that it captures: `causal() & padding(lengths)`
keeps no more than `causal()`. Those tiles hold while lengths are written to, as CUDA graphs need.
"""

from functools import lru_cache

import torch

from ..mods.graph import Arg, Builder, Graph
from ..types import Captured, Coords
from .build import cached_build
from .runs import combine
from .tiles import Tiles

Both = tuple[Arg, Arg]  # of a bool, what is True wherever it is, and what is True nowhere else


@lru_cache(maxsize=1024)
def loosened(graph: Graph, unknown: frozenset[str] = frozenset()) -> Graph:
    """A mask that keeps every pair that this one keeps for some content of its tensors, or more
    pairs, and that reads no tensor.

    - `unknown`: other inputs that it does not read, such as positions that are given one by one.
    """
    hidden = {i.name for i in graph.inputs if i.ndim is not None} | unknown
    builder = Builder()
    known: dict[Arg, Arg] = {}  # values that depend on nothing hidden, as they are called now
    bounds: dict[Arg, Both] = {}  # of bools that do

    def of(arg: Arg) -> Both:
        if not isinstance(arg, str):
            return bool(arg), bool(arg)
        return (known[arg], known[arg]) if arg in known else bounds.get(arg, (True, False))

    def emit(op: str, *args: Arg) -> Arg:
        return builder.emit(op, args, "bool")

    def both(a: Arg, b: Arg) -> Arg:
        return False if a is False or b is False else emit("and", a, b)

    def either(a: Arg, b: Arg) -> Arg:
        return True if a is True or b is True else emit("or", a, b)

    for name in (i.name for i in graph.inputs if i.name not in hidden):
        known[name] = name
    for n, node in enumerate(graph.nodes):
        name, args = f"%{n}", node.args
        if all(a in known for a in args if isinstance(a, str)):
            given = tuple(known[a] if isinstance(a, str) else a for a in args)
            known[name] = builder.emit(node.op, given, node.dtype, node.line)
        elif node.dtype != "bool":
            continue
        elif node.op in ("and", "or"):
            join = both if node.op == "and" else either
            (most, least), (most_b, least_b) = map(of, args)
            bounds[name] = join(most, most_b), join(least, least_b)
        elif node.op in ("not", "invert"):
            most, least = of(args[0])
            bounds[name] = emit("not", least), emit("not", most)
        elif node.op == "where":
            (most, least), (most_b, least_b) = map(of, args[1:])
            bounds[name] = either(most, most_b), both(least, least_b)
    most, _ = of(graph.outputs[0])
    inputs = tuple(i for i in graph.inputs if i.ndim is None)
    return builder.finish(graph.kind, inputs, (most,))


def undecided(
    graph: Graph, captured: Captured, shape: tuple[int, int, int, int], tile: tuple[int, int],
    device: torch.device, coords: Coords = Coords(),
) -> tuple[Tiles, int, int]:  # fmt: skip
    """What `build` returns, for any content of the tensors and positions that are given: all tiles
    in which a pair may be kept, and all of them partial. They are found on the host."""
    given = {"q_idx": coords.q_pos, "kv_idx": coords.kv_pos}
    unknown = frozenset(name for name, pos in given.items() if pos is not None)
    loose, numbers = loosened(graph, unknown), captured._replace(tensors=[])
    where, host = coords._replace(q_pos=None, kv_pos=None), torch.device("cpu")
    tiles, b, h = cached_build(loose, numbers, shape, tile, host, where)
    kinds = (tiles.rows_full, tiles.rows_partial), (tiles.cols_full, tiles.cols_partial)
    runs = []
    for (full, partial), n in zip(kinds, (1, 0), strict=True):
        live = combine([full, partial], -(-shape[2 + n] // tile[n]))
        runs += [full.cut(0, 0), live(lambda covered: covered[0] | covered[1])]
    made = Tiles.of_runs(*runs).flatten()
    return Tiles.unflatten([x.to(device) for x in made]), b, h
