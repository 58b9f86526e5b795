"""Random masks for hypothesis: any ops of the small language, on any captured tensors."""

import torch
from hypothesis import strategies as st

from headway.mods.graph import Builder, Graph, Input
from headway.types import Captured

IDS, BATCH_IDS, TABLE, KEEP, LAYOUT, LEVELS = range(6)
TENSORS = (("i64", 1), ("i32", 2), ("f32", 2), ("bool", 1), ("u8", 2), ("f16", 1))
INPUTS = (
    *(Input(name, "i64") for name in ("b", "h", "q_idx", "kv_idx", "n0")),
    Input("x0", "f32"),
    *(Input(f"t{n}", dtype, ndim) for n, (dtype, ndim) in enumerate(TENSORS)),
)
SMALL = st.integers(-7, 40)


@st.composite
def masks(draw, b: int, h: int, longest: int) -> tuple[Graph, Captured]:
    """A graph that returns a boolean, and what it captures."""
    build = Builder()
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    steps = torch.rand(b, longest, generator=g) < draw(st.sampled_from([0.02, 0.1, 0.5]))
    sorted_ids = draw(st.booleans())
    ids = steps.cumsum(1) if sorted_ids else torch.randint(-3, 4, (b, longest), generator=g)
    short = draw(st.sampled_from([0, 0, 0, 60, 130]))  # sometimes too few ids
    tensors = [
        ids[0, : longest - short].contiguous(),
        ids.to(torch.int32),
        torch.randn(h, 2 * longest, generator=g) * 3,
        torch.rand(2 * longest, generator=g) < draw(st.sampled_from([0.05, 0.5, 0.95])),
        torch.randint(0, 256, (longest, longest // 2), generator=g).to(torch.uint8),
        torch.tensor([-torch.inf, -1.5, 0.0, torch.nan, 2.0, torch.inf, 0.1, 3.0]).half(),
    ]

    def emit(op, args, dtype):
        if op == "where" and isinstance(args[0], bool):
            return args[1 if args[0] else 2]
        return build.emit(op, tuple(args), dtype)

    def gather(n, *index):
        return emit("gather", (f"t{n}", *index), TENSORS[n][0])

    def whole(depth):
        """An int64 expression."""
        if depth == 0 or draw(st.integers(0, 4)) == 0:
            kind = draw(st.sampled_from(["q_idx", "kv_idx", "q_idx", "kv_idx", "b", "h", "n0", "c",
                                         "ids", "batch ids"]))  # fmt: skip
            if kind == "c":
                return draw(SMALL)
            if kind == "ids":
                return gather(IDS, index(draw(st.sampled_from(["q_idx", "kv_idx"]))))
            if kind == "batch ids":
                at = draw(st.sampled_from(["q_idx", "kv_idx"]))
                return emit("to", [gather(BATCH_IDS, "b", at)], "i64")
            return kind
        op = draw(st.sampled_from(
            "add sub sub mul square neg abs sign floordiv truncdiv mod fmod min max where shr shl "
            "and xor invert to pow layout gather".split()
        ))  # fmt: skip
        if op in ("add", "sub", "mul", "min", "max", "and", "xor"):
            return emit(op, [whole(depth - 1), whole(depth - 1)], "i64")
        if op == "square":
            x = whole(depth - 1)
            return emit("mul", [x, x], "i64")
        if op in ("neg", "abs", "sign", "invert"):
            return emit(op, [whole(depth - 1)], "i64")
        if op in ("floordiv", "truncdiv", "mod", "fmod"):
            divisor = draw(st.sampled_from([1, 2, 3, 7, 16, 64, -1, -3, -16, "n0", "q", "kv"]))
            if divisor in ("q", "kv"):
                divisor = emit("max", [f"{divisor}_idx", 1], "i64")
            return emit(op, [whole(depth - 1), divisor], "i64")
        if op == "where":
            return emit(op, [boolean(depth - 1), whole(depth - 1), whole(depth - 1)], "i64")
        if op in ("shr", "shl"):
            by = draw(st.one_of(st.integers(0, 6), st.just("h")))
            return emit(op, [whole(depth - 1), by], "i64")
        if op == "to":
            narrow = draw(st.sampled_from(["i32", "i16", "u8", "i8", "bool"]))
            x = emit("to", [whole(depth - 1)], narrow)
            if narrow != "bool":
                y = emit("to", [whole(depth - 1)], narrow)
                x = emit(draw(st.sampled_from(["add", "sub", "mul"])), [x, y], narrow)
            return emit("to", [x], "i64")
        if op == "pow":
            return emit(op, [whole(depth - 1), draw(st.integers(0, 3))], "i64")
        if op == "layout":
            rows, cols = (
                emit("floordiv", [f"{p}_idx", draw(st.sampled_from([1, 3, 16]))], "i64")
                for p in ("q", "kv")
            )
            return emit(
                "to", [gather(LAYOUT, rows, emit("min", [cols, longest // 2 - 1], "i64"))], "i64"
            )
        at = emit("add", [whole(depth - 1), 0], "i64")
        return gather(IDS, index(at))

    def index(x):
        """Sometimes kept in range, sometimes not."""
        if draw(st.integers(0, 2)) == 0:
            return x
        return emit("min", [emit("max", [x, 0], "i64"), longest - 131], "i64")

    def real(depth):
        """A float32 expression."""
        kind = draw(st.sampled_from(
            "to to table x0 c levels add sub mul square div exp exp2 expm1 log log2 log1p sqrt "
            "rsqrt reciprocal sin cos tanh sigmoid erf floor ceil round trunc sign neg abs min max "
            "where half mod pow".split()
        ))  # fmt: skip
        if depth == 0 or kind == "to":
            return emit("to", [whole(max(depth - 1, 0))], "f32")
        if kind == "table":
            distance = emit("sub", ["q_idx", "kv_idx"], "i64")
            at = emit("add", [distance, longest], "i64")
            at = draw(st.sampled_from([at, "kv_idx", emit("abs", [distance], "i64"), distance]))
            return gather(TABLE, "h", at)
        if kind == "levels":
            return emit("to", [gather(LEVELS, emit("mod", [whole(depth - 1), 8], "i64"))], "f32")
        if kind == "x0":
            return "x0"
        if kind == "c":
            return draw(st.sampled_from([0.0, -0.5, 0.1, 1.0, 3.7, 100.0]))
        if kind in ("add", "sub", "mul", "div", "min", "max", "mod"):
            return emit(kind, [real(depth - 1), real(depth - 1)], "f32")
        if kind == "square":
            x = real(depth - 1)
            return emit("mul", [x, x], "f32")
        if kind == "pow":
            return emit(kind, [real(depth - 1), draw(st.sampled_from([0.5, 3.0, -1.0]))], "f32")
        if kind == "where":
            return emit(kind, [boolean(depth - 1), real(depth - 1), real(depth - 1)], "f32")
        if kind == "half":
            narrow = draw(st.sampled_from(["f16", "bf16", "i64", "i8"]))
            return emit("to", [emit("to", [real(depth - 1)], narrow)], "f32")
        return emit(kind, [real(depth - 1)], "f32")

    def boolean(depth):
        kind = draw(st.sampled_from(
            "compare compare floats floats and or xor not keep isnan isinf true where where".split()
        ))  # fmt: skip
        if depth <= 0 or kind == "compare":
            op = draw(st.sampled_from("eq ne lt le gt ge".split()))
            return emit(op, [whole(max(depth, 0)), whole(max(depth, 0))], "bool")
        if kind == "floats":
            op = draw(st.sampled_from("eq ne lt le gt ge".split()))
            return emit(op, [real(depth - 1), real(depth - 1)], "bool")
        if kind in ("and", "or", "xor"):
            return emit(kind, [boolean(depth - 1), boolean(depth - 1)], "bool")
        if kind == "not":
            return emit(kind, [boolean(depth - 1)], "bool")
        if kind == "where":
            return emit(kind, [boolean(depth - 1), boolean(depth - 1), boolean(depth - 1)], "bool")
        if kind == "keep":
            distance = emit("sub", ["q_idx", "kv_idx"], "i64")
            return gather(
                KEEP, draw(st.sampled_from([distance, "q_idx", emit("abs", [distance], "i64")]))
            )
        if kind in ("isnan", "isinf"):
            return emit(kind, [real(depth - 1)], "bool")
        return draw(st.booleans())

    output = boolean(draw(st.integers(0, 4)))
    graph = build.finish("mask", INPUTS, (output,))
    captured = Captured(
        tensors, [draw(st.integers(1, 9))], [draw(st.sampled_from([0.0, -2.5, 30.0]))]
    )
    return graph, captured
