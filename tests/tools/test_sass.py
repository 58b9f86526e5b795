"""The check of machine code finds what it is for, and nothing in code that is right."""

import re
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tools import sass

# As nvdisasm prints it: a loop, guarded writes, pairs and quads.
RIGHT = """\
kernel:
.text.kernel:
        /*0000*/                   LDC.64 R2, c[0x0][0x210] ;
        /*0010*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0020*/                   PRMT R8, RZ, 0x7610, R8 ;
        /*0030*/                   ISETP.GE.AND P0, PT, R3, 0x1, PT ;
        /*0040*/              @!P0 UMOV UR16, 0x40 ;
        /*0050*/                   UIADD3 UR18, UP0, UR16, 0x40, URZ ;
        /*0060*/                   UIADD3.X UR19, URZ, -0x7fffffe0, URZ, UP0, !UPT ;
        /*0070*/                   CS2R R24, SRZ ;
.L_x_0:
        /*0080*/               @P0 LDG.E.128 R4, desc[UR4][R2.64+0x80] ;
        /*0090*/                   HGMMA.64x16x16.F32.BF16 R40, R4, gdesc[UR16].tnspB, RZ, !UPT, gsb0 ;
        /*00a0*/                   SHFL.BFLY PT, R9, R47, 0x2, 0x1f ;
        /*00b0*/               @P0 BRA `(.L_x_0) ;
        /*00c0*/                   STG.E.64 desc[UR4][R2.64], R24 ;
        /*00d0*/                   EXIT ;
"""


def found(code: str) -> list[str]:
    """Where something is read, and what."""
    lines = sass._unwritten("kernel", code)
    return [line.split(": ")[0][-2:] + line.split("reads")[1] for line in lines]


def test_quiet_where_every_register_may_have_been_written():
    assert found(RIGHT) == []


@pytest.mark.parametrize(
    ("line", "reads"),
    [
        ("@!P0 UMOV UR16, 0x40", ["50 UR16"]),
        ("UIADD3.X UR19, URZ, -0x7fffffe0, URZ, UP0, !UPT", ["90 UR19"]),  # half of a descriptor
        ("ULDC.64 UR4, c[0x0][0x208]", ["80 UR4", "80 UR5", "c0 UR4", "c0 UR5"]),
        ("ISETP.GE.AND P0, PT, R3, 0x1, PT", ["40 P0", "80 P0", "b0 P0"]),
        ("@P0 LDG.E.128 R4, desc[UR4][R2.64+0x80]", [f"90 R{n}" for n in (4, 5, 6, 7)]),
        ("SHFL.BFLY PT, R9, R47, 0x2, 0x1f", []),  # whose result nothing reads
    ],
)
def test_a_write_that_is_missing(line, reads):
    assert line in RIGHT
    assert found(RIGHT.replace(line, "NOP")) == reads


def test_a_write_behind_the_read_counts_in_a_loop_alone():
    read = RIGHT.replace("SHFL.BFLY PT, R9, R47, 0x2, 0x1f", "UIADD3 UR40, UR41, 0x1, URZ")
    write = "        /*00b8*/                   UMOV UR41, 0x1 ;\n"
    jump, behind = read.index("        /*00b0*/"), read.index("        /*00c0*/")
    assert found(read) == ["a0 UR41"]
    assert found(read[:behind] + write + read[behind:]) == ["a0 UR41"]
    assert found(read[:jump] + write + read[jump:]) == []


# Two groups of products: S, of which R8 to R15 hold the sums, then R24 to R31 += P v with P in R4 to R7.
PRODUCTS = """\
kernel:
.text.kernel:
.L_x_0:
        /*0000*/                   WARPGROUP.ARRIVE ;
        /*0010*/                   HGMMA.64x16x16.F32.BF16 R8, gdesc[UR4], RZ, !UPT ;
        /*0020*/                   HGMMA.64x16x16.F32.BF16 R8, gdesc[UR8], R8, gsb0 ;
        /*0030*/                   HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR12].tnspB, R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   FMUL R2, R8, R9 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   FADD R4, R24, R2 ;
        /*0080*/               @P0 BRA `(.L_x_0) ;
        /*0090*/                   EXIT ;
"""


# What is loaded is a factor, and whoever reads it waits for it.
LOADED = """\
kernel:
.text.kernel:
        /*0000*/                   LDSM.16.M88.4 R4, [R2+UR4] ;
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 ;
        /*0020*/                   HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR12].tnspB, R24, gsb0 ;
        /*0030*/               @P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x40], RZ ;
        /*0040*/                   EXIT ;
"""


def test_an_arrival_before_what_is_loaded_is_there():
    assert sass._early("kernel", LOADED) == []
    too_early = LOADED.replace("R24, R4, gdesc", "R24, R8, gdesc")
    (said,) = sass._early("kernel", too_early)
    assert said.startswith("kernel+0x0030: SYNCS.ARRIVE")
    assert "R4 of LDSM at 0x0000" in said
    own = "        /*0000*/                   STSM.16.M88.4 [R2+UR4], R40 ;\n        /*0000*/"
    assert sass._early("kernel", too_early.replace("        /*0000*/", own)) == []


def test_an_arrival_before_products_are_done():
    """At a barrier with a number, of a ring: behind the last wait all have read what they multiply."""
    arrive = "        /*0068*/                   BAR.ARV R40, 0x120 ;\n"
    behind = PRODUCTS.replace("        /*0070*/", arrive + "        /*0070*/")
    assert sass._early("kernel", behind) == []
    before = PRODUCTS.replace("        /*0040*/", arrive + "        /*0040*/")
    said = sass._early("kernel", before)
    assert [re.search(r"BAR.ARV.* at 0x(\w+)", x)[1] for x in said] == ["0010", "0020", "0030"]
    turn = before.replace("R40", "0xe")  # of a consumer: not a ring's
    assert sass._early("kernel", turn) == []


def test_loops_that_multiply():
    """The innermost ones; what stands behind the last EXIT jumps back into them, and is of none."""
    outer = PRODUCTS.replace(".text.kernel:\n", ".text.kernel:\n.L_x_9:\n", 1).replace(
        "        /*0090*/", "        /*0088*/               @P1 BRA `(.L_x_9) ;\n        /*0090*/"
    )
    wait = outer.replace("        /*0050*/", ".L_x_1:\n        /*0050*/") + (
        "        /*00a0*/                   LDL R2, [R1] ;\n"
        "        /*00b0*/                   BRA `(.L_x_1) ;\n"
    )
    for text in (PRODUCTS, outer, wait):
        (body,) = sass._loops(text)
        assert [x.address for x in body] == [f"00{n}0" for n in range(9)]


def test_quiet_where_products_are_waited_for():
    assert sass._in_flight("kernel", PRODUCTS) == []


@pytest.mark.parametrize(
    ("line", "instead", "touched"),
    [
        ("FMUL R2, R8, R9", "FMUL R4, R8, R9", ["0050 writes R4 30"]),  # a factor's place
        ("FMUL R2, R8, R9", "FMUL R2, R8, R4", []),  # which may be read
        ("FMUL R2, R8, R9", "FMUL R2, R8, R24", ["0050 reads R24 30"]),  # a sum too early
        ("gsb0, 0x1", "gsb0, 0x2", ["0050 reads R9 20"]),
        # Around the loop the first group has the sums of the last round in flight.
        ("gsb0, 0x0", "gsb0, 0x1", ["0070 reads R24 30"]),
    ],
)
def test_what_is_touched_in_flight(line, instead, touched):
    assert line in PRODUCTS
    lines = sass._in_flight("kernel", PRODUCTS.replace(line, instead))
    said = [
        re.search(r"\+0x(\w+): .* (writes|reads) (\w+) of HGMMA at 0x00(\w+)", x) for x in lines
    ]
    assert [" ".join(x.groups()) for x in said if x] == touched
