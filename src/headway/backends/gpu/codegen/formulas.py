"""The types and operations of graphs in Triton's language; `maths` is gpu/device/maths.py."""

TYPES = {
    "f64": "tl.float64", "f32": "tl.float32", "bf16": "tl.bfloat16", "f16": "tl.float16",
    "i64": "tl.int64", "i32": "tl.int32", "i16": "tl.int16", "i8": "tl.int8", "u8": "tl.uint8",
    "bool": "tl.int1",
}  # fmt: skip
INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
    "gt": ">", "ge": ">=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip
FLOAT_FORMULAS = {
    "neg": "-{}", "abs": "tl.abs({})", "sign": "maths.sign({}).to(tl.float32)", "exp": "tl.exp({})",
    "exp2": "tl.exp2({})", "expm1": "maths.expm1({})", "log": "tl.log({})", "log2": "tl.log2({})",
    "log1p": "maths.log1p({})", "sqrt": "tl.sqrt({})", "rsqrt": "tl.rsqrt({})",
    "reciprocal": "1 / {}", "sin": "tl.sin({})", "cos": "tl.cos({})", "tanh": "maths.tanh({})",
    "sigmoid": "maths.sigmoid({})", "erf": "tl.erf({})", "floor": "tl.floor({})",
    "ceil": "tl.ceil({})", "round": "maths.round_even({})", "trunc": "maths.trunc({})",
    "isnan": "{0} != {0}", "isinf": 'tl.abs({}) == float("inf")', "not": "{} == 0",
    "floordiv": "tl.floor({} / {})", "truncdiv": "maths.trunc({} / {})",
    "mod": "{0} - tl.floor({0} / {1}) * {1}", "fmod": "{0} - maths.trunc({0} / {1}) * {1}",
    "pow": "maths.power({}, {})", "detach": "{}",
    "max": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
}  # fmt: skip
INT_FORMULAS = {
    "neg": "-{}", "abs": "tl.abs({})", "sign": "maths.sign({})", "not": "{} == 0", "invert": "~{}",
    "floordiv": "maths.floordiv({}, {})", "truncdiv": "maths.truncdiv({}, {})",
    "mod": "maths.mod({}, {})", "fmod": "{0} - maths.truncdiv({0}, {1}) * {1}",
    "max": "tl.maximum({}, {})", "min": "tl.minimum({}, {})", "floor": "{}", "ceil": "{}",
    "round": "{}", "trunc": "{}",
}  # fmt: skip
