"""The kernels compile for compute capability 9.0 with no GPU there, and what they need.

The other widths and kinds of calls are in `long/hopper.py`.
"""

from importlib.metadata import version
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from long import long_unless
from tools.compile_hopper import compiled, report, twice

# Matrix instructions are m64nNk16 for two consumers. Forward: Q k^T before the loops, in each of the
# two loops (full and partial tiles) with P v, and P v after. Backward: five products in each loop, dk
# and dq after (lagged), or S before. A few numbers of a CTA that are spilled once and read once cost
# nothing; hardly any may be read in a loop that multiplies. A block has 64 pairs per thread in the
# forward, 32 in the backward (64 where it lags); without a score its `loop` takes 459 and 402
# instructions (625), and `masked`, where it is causal, 595 and 481 (853).
# At the assembler's level 6 (`config.MANY`) one of two forwards spills 16 bytes more than at its own,
# none of them in a loop, and they take up to 2 % less time. The forward's scheduler, a warp with 24
# registers, spills 12 to 32 bytes once in a work tile.
PINS = {
    ("forward", "128/128", "long"): {
        "hgmma": 96, "shared": 230176, "spills": 28, "loop": 460, "masked": 600,
    },
    # Consumers see halves of partial blocks.
    ("forward", "128/128", "band"): {
        "hgmma": 96, "shared": 230192, "spills": 36, "loop": 460, "masked": 635,
    },
    # Positions are read, one of every block: the loop is that of "band".
    ("forward", "128/128", "in_tiles"): {
        "hgmma": 96, "shared": 230208, "spills": 28, "loop": 460, "masked": 750,
    },
    ("backward", "128/128", "in_tiles"): {
        "hgmma": 144, "shared": 219520, "spills": 32, "loop": 406, "masked": 580,
    },
    # Two CTAs of a multiprocessor, which fit if neither has more than 115712 bytes.
    ("forward", "128/128", "document"): {
        "registers": 128, "hgmma": 36, "shared": 115468, "spills": 52, "loop": 305, "masked": 507,
    },
    # Stream-K, and K and V are released by named barriers.
    ("forward", "128/128", "shared"): {
        "hgmma": 64, "shared": 230096, "spills": 16, "loop": 460, "masked": 460,
    },
    # Each consumer has a channel of its own for its queries.
    ("forward", "192/128", "long"): {
        "hgmma": 120, "shared": 230304, "spills": 52, "loop": 480, "masked": 635,
    },
    # A WGMMA more, for the slope.
    ("forward", "128/128", "slanted"): {"hgmma": 66, "shared": 217792, "spills": 0, "loop": 475},
    ("forward", "64/64", "slanted"): {"hgmma": 50, "shared": 152384, "spills": 0, "loop": 425},
    ("forward", "128/128", "relative"): {"hgmma": 64, "shared": 197296, "spills": 0, "loop": 545},
    ("forward", "64/64", "long_plain"): {
        "registers": 128, "hgmma": 72, "shared": 172856, "spills": 0, "loop": 420,
    },
    # Its first block is among the partial ones, and finishes the work tile before.
    ("forward", "64/64", "longest"): {
        "registers": 128, "hgmma": 72, "shared": 172904, "spills": 16, "loop": 420, "masked": 795,
    },
    ("forward", "64/64", "document"): {
        "registers": 80, "hgmma": 24, "shared": 74756, "spills": 28, "loop": 265, "masked": 465,
    },
    # An instruction more per pair for the entropy, and one where it is masked.
    ("forward", "128/128", "entropy"): {
        "hgmma": 96, "shared": 230192, "spills": 36, "loop": 570, "masked": 735,
    },
    ("forward", "64/64", "entropy_document"): {
        "registers": 80, "hgmma": 24, "shared": 74756, "spills": 40, "loop": 320, "masked": 560,
    },
    ("backward", "128/128", "entropy"): {
        "hgmma": 144, "shared": 220032, "spills": 40, "loop": 480, "masked": 560,
    },
    ("backward", "64/64", "entropy"): {
        "hgmma": 160, "shared": 221824, "spills": 20, "loop": 720, "masked": 860,
    },
    ("backward", "192/128", "entropy"): {
        "hgmma": 216, "shared": 232384, "spills": 440, "loops": 20, "loop": 560, "masked": 650,
    },
    ("backward", "256/256", "entropy"): {
        "registers": 128, "hgmma": 168, "shared": 223416, "spills": 180, "loops": 60, "masked": 550,
    },
    ("backward", "128/128", "entropy_dropout"): {
        "hgmma": 144, "shared": 220160, "spills": 190, "loops": 60, "loop": 880, "masked": 960,
    },
    # Words for dropout, in the loop: 8 and 4 calls of Philox. docs/lab/forward.md counts the accesses.
    # 20 bytes more of the forward are spilled before its loops than with the draw behind P V.
    ("forward", "128/128", "dropout"): {
        "hgmma": 96, "shared": 230208, "spills": 48, "loop": 735, "masked": 820,
    },
    ("backward", "128/128", "dropout"): {
        "hgmma": 144, "shared": 219520, "spills": 64, "loops": 2, "loop": 800, "masked": 860,
    },
    ("backward", "64/64", "dropout"): {
        "hgmma": 104, "shared": 129408, "spills": 0, "loop": 770, "masked": 840,
    },
    ("backward", "128/128", "plain"): {"hgmma": 80, "shared": 219520, "spills": 0},
    # Scores that grow with S by a known number, which no pair is multiplied with.
    ("backward", "128/128", "slanted"): {
        "hgmma": 80, "shared": 219520, "spills": 80, "loops": 4, "loop": 490,
    },
    ("backward", "192/128", "alibi"): {
        "hgmma": 216, "shared": 231744, "spills": 440, "loops": 0, "loop": 610, "masked": 765,
    },
    ("backward", "128/128", "relative"): {
        "hgmma": 80, "shared": 219520, "spills": 56, "loops": 0, "loop": 580,
    },
    ("backward", "128/128", "many"): {
        "hgmma": 144, "shared": 215424, "spills": 40, "loops": 0, "masked": 620,
    },
    ("backward", "64/64", "in_turn"): {
        "hgmma": 104, "shared": 129408, "spills": 0, "masked": 455,
    },
    # P is computed twice, and not passed on.
    ("backward", "256/256", "columns"): {
        "registers": 128, "hgmma": 100, "shared": 222856, "spills": 60, "loops": 1,
    },
    ("backward", "64/64", "long"): {
        "hgmma": 160, "shared": 220768, "spills": 0, "loop": 630, "masked": 860,
    },
    ("backward", "256/256", "causal"): {
        "registers": 128, "hgmma": 136, "shared": 222904, "spills": 0, "masked": 360,
    },
}  # fmt: skip
# Under Triton 3.9, whose assembler finds registers scarcer.
SINCE = {
    ("forward", "64/64", "long_plain"): {"shared": 172840, "loop": 425},
    ("forward", "64/64", "longest"): {"loop": 440, "masked": 845},
    ("forward", "64/64", "document"): {"shared": 74716, "loop": 270, "masked": 470},
    ("forward", "128/128", "long"): {"loop": 485, "masked": 620},
    ("forward", "128/128", "band"): {"shared": 230176, "loop": 485, "masked": 650},
    ("forward", "192/128", "long"): {"spills": 64, "loop": 515, "masked": 655},
    ("forward", "128/128", "document"): {"loop": 340, "masked": 535},
    ("forward", "128/128", "shared"): {"loop": 495, "masked": 500},
    ("forward", "128/128", "slanted"): {"loop": 505},
    ("forward", "64/64", "slanted"): {"loop": 435},
    ("forward", "128/128", "relative"): {"loop": 570},
    ("backward", "128/128", "plain"): {"spills": 36},
    ("backward", "128/128", "many"): {"spills": 88, "loops": 6, "masked": 670},
    ("backward", "128/128", "slanted"): {"loop": 560},
    ("backward", "192/128", "alibi"): {"loops": 2, "loop": 655, "masked": 775},
    ("backward", "128/128", "relative"): {"spills": 208, "loops": 26, "loop": 640, "masked": 640},
    ("backward", "256/256", "causal"): {"spills": 40, "masked": 410},
    ("backward", "64/64", "in_turn"): {"masked": 465},
    ("backward", "256/256", "columns"): {"shared": 222840, "spills": 170, "loops": 40},
    ("backward", "64/64", "long"): {"spills": 20, "loop": 735, "masked": 950},
}


LONG = {
    ("forward", "128/128", "long"), ("forward", "128/128", "slanted"),
    ("forward", "128/128", "relative"), ("forward", "64/64", "longest"),
    ("backward", "128/128", "plain"), ("backward", "128/128", "slanted"),
    ("backward", "64/64", "dropout"), ("forward", "64/64", "entropy_document"),
    ("backward", "64/64", "entropy"), ("backward", "192/128", "entropy"),
    ("backward", "256/256", "entropy"), ("backward", "128/128", "entropy_dropout"),
}  # fmt: skip


@pytest.mark.parametrize(("direction", "widths", "name"), long_unless({*PINS} - LONG, PINS))
def test_compiles(direction, widths, name):
    (made,) = report(direction, widths, name)
    pin = {
        "unwritten": [],
        "in_flight": [],
        "early": [],
        "idle": [],
        "fences": 0,
        "registers": 168,
        "serialized": 0,
        "loops": 0,
        "loop": 1000,
        "masked": 1000,
    } | PINS[direction, widths, name]
    if not version("triton").startswith("3.6."):
        pin |= SINCE.get((direction, widths, name), {})
    most = {n: pin.pop(n) for n in ("spills", "loops", "loop", "masked", "serialized")}
    assert {n: made[n] for n in pin} == pin
    assert all(made[n] <= limit for n, limit in most.items()), made


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_positions_that_cancel(direction):
    """What they index depends on less than it reads, and has the shape of all that it reads."""
    assert direction in dict(compiled(direction, 64, 64, "cancelled"))


def test_nothing_is_added_twice():
    """A tensor that is 1 long along an axis may lie in a thread's registers several times."""
    for call in ("rows", "columns", "numbers"):
        made = dict(compiled("backward", 64, 64, call))["backward"].asm["ptx"]
        assert "atom.global" in made
        assert twice(made) == 0, call
