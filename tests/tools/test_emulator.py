"""Instructions, one at a time, against what Python and PyTorch say they do."""

import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from .emulator.copies import Map
from .emulator.machine import Machine
from .emulator.memory import Global
from .emulator.source import parse
from .emulator.values import BASE, Fault

THREADS = 64
# Every thread loads a number of each tensor but the last, and stores one there.
PROGRAM = """
.entry test(
{parameters}
)
.reqntid {threads}
{{
.reg .pred %p<4>;
.reg .b16 %h<4>;
.reg .b32 %r<16>;
.reg .b64 %rd<24>;
mov.u32 %r0, %tid.x;
{loads}
{body}
{store}
ret;
$L__func_end0:
}}
"""


def run(body: str, *tensors: torch.Tensor, shared: int = 0, threads: int = THREADS) -> torch.Tensor:
    """%a, %b, ... are the numbers of a thread, %y is what it stores."""
    names, given = "abcy", [*tensors]
    letters = [*names[: len(given) - 1], "y"]
    loads, parameters = [], []
    for n, (letter, x) in enumerate(zip(letters, given, strict=True)):
        bits = 8 * x.element_size()
        parameters.append(f".param .u64 p{n}")
        loads += [f".reg .b{bits} %{letter};", f"ld.param.b64 %rd{n}, [p{n}];",
                  f"mad.wide.u32 %rd{n}, %r0, {bits // 8}, %rd{n};"]  # fmt: skip
        if letter != "y":
            loads.append(f"ld.global.b{bits} %{letter}, [%rd{n}+0];")
    last = len(given) - 1
    text = PROGRAM.format(
        parameters=",\n".join(parameters), loads="\n".join(loads), body=body, threads=threads,
        store=f"st.global.b{8 * given[-1].element_size()} [%rd{last}+0], {{ %y }};",
    )  # fmt: skip
    machine = Machine(parse(text), shared)
    machine.memories.globally = Global(given)
    for x, place in zip(given, machine.registers.parameters.values(), strict=True):
        place[:] = x.data_ptr()
    machine.run((1, 1, 1))
    return given[-1]


def whole(*special: int, dtype=torch.int32) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    x = torch.randint(limits.min, limits.max, (THREADS,), dtype=dtype)
    x[: len(special)] = torch.tensor(special, dtype=dtype)
    return x


def floats(*special: float) -> torch.Tensor:
    x = torch.randn(THREADS) * 10.0 ** torch.randint(-6, 6, (THREADS,))
    x[: len(special)] = torch.tensor(special)
    return x


def wrapped(x: int, bits: int = 32) -> int:
    """As a signed number of so many bits."""
    return (x + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


ODD = (0, 1, -1, 7, -7, 2**31 - 1, -(2**31), 31, 32, 33, 100)
WHOLE = {
    "add.s32 %y, %a, %b;": lambda a, b: a + b,
    "sub.s32 %y, %a, %b;": lambda a, b: a - b,
    "mul.lo.s32 %y, %a, %b;": lambda a, b: a * b,
    "mul.hi.s32 %y, %a, %b;": lambda a, b: a * b >> 32,
    "mul.hi.u32 %y, %a, %b;": lambda a, b: (a % 2**32) * (b % 2**32) >> 32,
    "cvt.s64.s32 %rd8, %a; shl.b64 %rd9, %rd8, 31; mul.hi.s64 %rd9, %rd9, %rd8; cvt.u32.u64 %y, %rd9;": lambda a, b: (
        a * a >> 33
    ),
    "mad.lo.s32 %y, %a, %b, 5;": lambda a, b: a * b + 5,
    "div.s32 %y, %a, %b;": lambda a, b: int(a / b) if b and abs(a) < 2**31 else None,
    "rem.s32 %y, %a, %b;": lambda a, b: int(math.fmod(a, b)) if b else None,
    "min.s32 %y, %a, %b;": min,
    "min.relu.s32 %y, %a, %b;": lambda a, b: max(min(a, b), 0),
    "max.u32 %y, %a, %b;": lambda a, b: max(a % 2**32, b % 2**32),
    "and.b32 %y, %a, %b;": lambda a, b: a & b,
    "xor.b32 %y, %a, -2;": lambda a, b: a ^ -2,
    "shl.b32 %y, %a, %b;": lambda a, b: a << b % 2**32 if b % 2**32 < 32 else 0,
    "shr.s32 %y, %a, %b;": lambda a, b: a >> min(b % 2**32, 32),
    "shr.u32 %y, %a, %b;": lambda a, b: (a % 2**32) >> min(b % 2**32, 32),
    "bfe.u32 %y, %a, 3, 7;": lambda a, b: a >> 3 & 127,
    "bfe.s32 %y, %a, 3, 7;": lambda a, b: wrapped(a >> 3 & 127, 7),
    "shf.l.wrap.b32 %y, %a, %b, 4;": lambda a, b: b << 4 | (a >> 28 & 15),
    "shf.r.wrap.b32 %y, %a, %b, 36;": lambda a, b: b << 28 | (a >> 4 & 0xFFFFFFF),
    "prmt.b32 %y, %a, %b, 0x5410U;": lambda a, b: (a & 0xFFFF) | (b & 0xFFFF) << 16,
    "prmt.b32 %y, %a, %b, 0x3340U;": lambda a, b: (
        a & 0xFF | (b & 0xFF) << 8 | (a >> 24 & 0xFF) * 0x1010000
    ),
    "prmt.b32 %y, %a, %b, 0x000F;": lambda a, b: (0xFF if b < 0 else 0) | (a & 0xFF) * 0x1010100,
    "setp.lt.s32 %p0, %a, %b; selp.b32 %y, 1, 2, %p0;": lambda a, b: 1 if a < b else 2,
    "setp.lo.u32 %p0, %a, %b; selp.b32 %y, 1, 2, %p0;": lambda a, b: (
        1 if a % 2**32 < b % 2**32 else 2
    ),
    "mov.b32 {%h0, %h1}, %a; mov.b32 %y, {%h1, %h0};": lambda a, b: (
        (a >> 16 & 0xFFFF) | (a & 0xFFFF) << 16
    ),
    "setp.ge.s32 %p0, %a, 0; mov.b32 %y, 3; @%p0 mov.b32 %y, %b;": lambda a, b: b if a >= 0 else 3,
}


@pytest.mark.parametrize("text", WHOLE)
def test_whole_numbers(text):
    a, b = whole(*ODD), whole(*ODD).roll(3)
    got = run(text, a, b, torch.zeros(THREADS, dtype=torch.int32))
    for x, y, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        right = WHOLE[text](x, y)
        assert right is None or wrapped(right) == z, (x, y)


NAN, INF = math.nan, math.inf
SPECIAL = (0.0, -0.0, NAN, INF, -INF, 1.0, 2.0**-130, 65504.0, 1e38)
FLOATS = {
    "max.f32 %y, %a, %b;": torch.fmax,
    "max.NaN.f32 %y, %a, %b;": torch.maximum,
    "min.f32 %y, %a, %b;": torch.fmin,
    "max.f32 %y, %a, %b, 0f3F800000;": lambda a, b: a.fmax(b).clamp(min=1),
    "sub.f32 %y, %a, %b;": torch.sub,
    "neg.f32 %y, %a;": lambda a, b: -a,
    "mul.f32 %y, %a, 0f3FC00000;": lambda a, b: a * 1.5,
    "fma.rn.f32 %y, %a, %a, %b;": lambda a, b: (a.double() ** 2 + b.double()).float(),
    "setp.lt.f32 %p0, %a, %b; selp.f32 %y, %a, %b, %p0;": lambda a, b: torch.where(a < b, a, b),
    "setp.neu.f32 %p0, %a, %b; selp.f32 %y, %a, %b, %p0;": lambda a, b: torch.where(a != b, a, b),
    "setp.ne.f32 %p0, %a, %b; selp.f32 %y, 0f3F800000, 0f00000000, %p0;": lambda a, b: (
        (a < b) | (a > b)
    ).float(),
    "setp.nan.f32 %p0, %a, %b; selp.f32 %y, 0f3F800000, 0f00000000, %p0;": lambda a, b: (
        a.isnan() | b.isnan()
    ).float(),
    "cvt.rni.f32.f32 %y, %a;": lambda a, b: a.round(),
    "cvt.rzi.s32.f32 %r1, %a; cvt.rn.f32.s32 %y, %r1;": lambda a, b: (
        a.nan_to_num(0.0, 2.0**31, -(2.0**31)).clamp(-(2.0**31), 2.0**31).trunc()
    ),
}


@pytest.mark.parametrize("text", FLOATS)
def test_floats(text):
    a, b = floats(*SPECIAL), floats(*SPECIAL).roll(2)
    got = run(text, a, b, torch.zeros(THREADS))
    assert torch.equal(got.nan_to_num(7.0), FLOATS[text](a, b).nan_to_num(7.0))


@pytest.mark.parametrize(
    ("text", "right"),
    [("ex2.approx.ftz.f32 %y, %a;", torch.exp2), ("lg2.approx.f32 %y, %a;", torch.log2),
     ("tanh.approx.f32 %y, %a;", torch.tanh), ("rsqrt.approx.f32 %y, %a;", torch.rsqrt)],
)  # fmt: skip
def test_functions(text, right):
    a = torch.randn(THREADS).abs()
    assert torch.allclose(run(text, a, torch.zeros(THREADS)), right(a), rtol=1e-6)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_halves(kind):
    """A pair from two float32, the first above, and back; and what is worked out with pairs."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    a, b = floats(*SPECIAL[:6], 65519.9, 1 + 2**-8, 1 + 3 * 2**-8), floats(*SPECIAL[:6])
    pair = run(f"cvt.rn.{kind}x2.f32 %y, %a, %b;", a, b, torch.zeros(THREADS, dtype=torch.int32))
    low, high = pair.view(dtype).view(THREADS, 2).unbind(1)
    assert torch.equal(high.nan_to_num(7.0), a.to(dtype).nan_to_num(7.0))
    assert torch.equal(low.nan_to_num(7.0), b.to(dtype).nan_to_num(7.0))
    squares = run(f"mul.{kind}x2 %y, %a, %a;", pair, torch.zeros_like(pair))
    right = torch.stack([low, high], 1).view(-1) ** 2
    assert torch.equal(squares.view(dtype).nan_to_num(7.0), right.nan_to_num(7.0))
    back = run(f"mov.b32 {{%h0, %h1}}, %a; cvt.f32.{kind} %y, %h1;", pair, torch.zeros(THREADS))
    assert torch.equal(back.nan_to_num(7.0), high.float().nan_to_num(7.0))


def test_small_numbers_are_flushed_where_it_says_so():
    a = torch.full((THREADS,), -127.0)
    assert run("ex2.approx.f32 %y, %a;", a, torch.zeros(THREADS)).eq(2.0**-127).all()
    assert run("ex2.approx.ftz.f32 %y, %a;", a, torch.zeros(THREADS)).eq(0).all()


def test_between_threads():
    a, out = whole(), torch.zeros(THREADS, dtype=torch.int32)
    thread = torch.arange(THREADS)
    assert torch.equal(run("shfl.sync.bfly.b32 %y, %a, 5, 31, -1;", a, out), a[thread ^ 5])
    assert torch.equal(
        run("shfl.sync.idx.b32 %y, %a, 3, 31, -1;", a, out), a[thread // 32 * 32 + 3]
    )
    before = a.view(2, 32)[:, [0, 1, 2, *range(29)]].flatten()
    assert torch.equal(run("shfl.sync.up.b32 %y, %a, 3, 0, -1;", a, out), before)
    total = a.view(2, 32).sum(1, dtype=torch.int32).repeat_interleave(32)
    assert torch.equal(run("redux.sync.add.s32 %y, %a, -1;", a, out), total)
    one = "elect.sync %r1|%p0, -1; selp.b32 %y, 1, 0, %p0;"
    assert torch.equal(run(one, a, out), (thread % 32 == 0).int())
    some = "setp.eq.s32 %p0, %r0, 40; vote.sync.any.pred %p1, %p0, -1; selp.b32 %y, 1, 0, %p1;"
    assert torch.equal(run(some, a, out), (thread >= 32).int())


def test_threads_add_in_global_memory():
    """One after the other."""
    a, b, out = whole(), whole(), torch.zeros(THREADS, dtype=torch.int32)
    first = b[0].item()
    text = "ld.param.b64 %rd8, [p1]; atom.global.gpu.relaxed.add.u32 %y, [%rd8+0], %a;"
    before = first + torch.cat([torch.zeros(1, dtype=torch.int64), a.cumsum(0)])
    assert torch.equal(run(text, a, b, out), before[:-1].int())
    assert b[0] == before[-1].int()


def test_turns_in_a_loop():
    """Warps that go round a different number of times."""
    text = """
    shr.u32 %r1, %r0, 5;
    mov.b32 %y, 0;
    $L_again: add.s32 %y, %y, %a;
    sub.s32 %r1, %r1, 1;
    setp.ge.s32 %p0, %r1, 0;
    @%p0 bra $L_again;
    """
    a = torch.arange(THREADS, dtype=torch.int32)
    assert torch.equal(run(text, a, torch.zeros_like(a)), a * (1 + a // 32))


EXCHANGE = """
shl.b32 %r1, %r0, 2;
mov.b32 %r2, global_smem;
add.s32 %r1, %r1, %r2;
st.shared.b32 [%r1], %a;
{barrier}
xor.b32 %r3, %r1, 128;
ld.shared.b32 %y, [%r3+{offset}];
"""


def test_shared_memory():
    a, out = whole(), torch.zeros(THREADS, dtype=torch.int32)
    text = EXCHANGE.format(barrier="bar.sync 0;", offset=0)
    assert torch.equal(run(text, a, out, shared=256), a.roll(32))
    with pytest.raises(Fault, match="another warp wrote that after the last barrier"):
        run(EXCHANGE.format(barrier="", offset=0), a, out, shared=256)
    with pytest.raises(Fault, match="outside of 256 bytes"):
        run(EXCHANGE.format(barrier="bar.sync 0;", offset=4), a, out, shared=256)
    with pytest.raises(Fault, match="no multiple of 4"):
        run(EXCHANGE.format(barrier="bar.sync 0;", offset=2), a, out, shared=260)
    again = "bar.sync 0; " + EXCHANGE.format(barrier="bar.sync 0;", offset=0)
    late = again + "xor.b32 %r3, %r1, 128; st.shared.b32 [%r1], 0;"
    with pytest.raises(Fault, match="another warp read that after the last barrier"):
        run(late, a, out, shared=256)


def test_a_barrier_to_which_not_all_come():
    text = "setp.lt.s32 %p0, %r0, 32; @%p0 bra $L_out; bar.sync 0; $L_out: mov.b32 %y, %a;"
    with pytest.raises(Fault, match=r"nobody gets any further(.|\n)*threads from 32 on"):
        run(text, whole(), torch.zeros(THREADS, dtype=torch.int32))


def test_e4m3():
    """Every number of the format, two by two."""
    bits = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    pairs = torch.zeros(THREADS, dtype=torch.int32)
    for n in range(2):  # 64 threads, two numbers each
        given = bits.view(torch.int16).view(2, THREADS)[n]
        text = "cvt.u16.u32 %h0, %a; cvt.rn.f16x2.e4m3x2 %y, %h0;"
        made = run(text, given.int(), pairs).view(torch.float16)
        expected = given.view(torch.float8_e4m3fn).half()
        assert torch.equal(made.nan_to_num(-1), expected.nan_to_num(-1))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)]
)
def test_to_float8(kind, dtype):
    """Two numbers for each thread, the second in the low byte."""
    x, out = torch.randn(THREADS) * 1e3, torch.zeros(THREADS, dtype=torch.int32)
    x[:2] = torch.tensor([torch.inf, torch.nan])
    text = f"cvt.rn.satfinite.{kind}.f32 %h0, %a, 0f3F800000; cvt.u32.u16 %y, %h0;"
    made = run(text, x, out)
    largest = torch.finfo(dtype).max
    pairs = torch.stack([torch.ones(THREADS), x.clamp(-largest, largest)], 1).to(dtype)
    assert torch.equal(made, pairs.view(torch.int16)[:, 0].int() & 0xFFFF)


def test_what_is_not_known_is_refused():
    out = torch.zeros(THREADS, dtype=torch.int32)
    for text in (
        "frob.s32 %y, %a;",
        "add.sat.s32 %y, %a, %a;",
    ):
        with pytest.raises(Fault, match="not known here"):
            run(text, whole(), out)


def test_ldmatrix_and_mma():
    """16 x 16 by 16 x 8: both through shared memory, the right one turned."""
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    memory = torch.cat([a.view(-1), b.view(-1)]).view(torch.int32)
    out = torch.zeros(16, 8)
    body = f"""
    .reg .b32 %f<10>;
    ld.param.b64 %rd8, [p0];
    ld.param.b64 %rd9, [p1];
    mov.b32 %r8, {BASE};
    shl.b32 %r1, %r0, 2;
    add.s32 %r1, %r1, %r8;
    {"".join(f"ld.global.b32 %r2, [%rd0+{128 * n}]; st.shared.b32 [%r1+{128 * n}], %r2;" for n in range(6))}
    bar.sync 0;
    and.b32 %r2, %r0, 15;
    shl.b32 %r2, %r2, 5;
    and.b32 %r3, %r0, 16;
    add.s32 %r2, %r2, %r3;
    add.s32 %r2, %r2, %r8;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%f0, %f1, %f2, %f3}}, [%r2];
    and.b32 %r2, %r0, 15;
    shl.b32 %r2, %r2, 4;
    add.s32 %r2, %r2, %r8;
    ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{%f4, %f5}}, [%r2+512];
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{%f6, %f7, %f8, %f9}}, {{%f0, %f1, %f2, %f3}}, {{%f4, %f5}}, {{0f00000000, 0f00000000, 0f3F800000, 0f3F800000}};
    shl.b32 %r1, %r0, 3;
    cvt.u64.u32 %rd10, %r1;
    add.s64 %rd9, %rd9, %rd10;
    st.global.v2.b32 [%rd9+0], {{%f6, %f7}};
    st.global.v2.b32 [%rd9+256], {{%f8, %f9}};
    ld.global.b32 %y, [%rd1+0];
    """
    run(body, memory, out, shared=768, threads=32)
    right = a.float() @ b.float()
    right[8:] += 1
    assert torch.allclose(out, right, atol=1e-5)


def test_boxes():
    """Zeros outside of the tensor; 16 bytes of a row turn with the row."""
    box = Map(0, np.dtype(np.uint16), (5, 9), (2, 20), (8, 4), 16)
    inside, at = box.inside((-1, 6))
    column, row = np.meshgrid(np.arange(-1, 7), np.arange(6, 10))
    assert (inside.reshape(4, 8) == ((column >= 0) & (column < 5) & (row < 9))).all()
    assert (at.reshape(4, 8).astype(np.int64) == 2 * column + 20 * row)[inside.reshape(4, 8)].all()
    wide = Map(0, np.dtype(np.uint16), (64, 9), (2, 128), (64, 9), 128)
    places = wide.places(BASE).astype(np.int64).reshape(9, 8, 8)
    assert sorted(places.ravel()) == [*range(BASE, BASE + wide.size, 2)]
    assert (places[1, 0] - BASE == 128 + 16 + 2 * np.arange(8)).all()
    assert (places[8] == places[0] + 1024).all()
