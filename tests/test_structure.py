"""The script that counts what makes source hard to read: every counter finds a planted fault."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "scripts" / "structure.py"
found = importlib.util.spec_from_file_location("structure", PATH)
structure = importlib.util.module_from_spec(found)
found.loader.exec_module(structure)

STEPS = "    step()\n" * 60
DOCSTRING = '    """Do it.' + "\n" * 60 + '    """\n'


def parse(**sources):
    """Return modules of the package, by their paths below it with `__` for `/`."""
    return [
        structure.Module(structure.SOURCE / f"headway/{name.replace('__', '/')}.py", source)
        for name, source in sources.items()
    ]


@pytest.mark.parametrize(
    ("count", "fault", "sound"),
    [
        ("positional_reads", "q, k, *_ = call", "q, k = call.q, call.k"),
        ("positional_reads", "q = self._call[0]", "q = calls[0]"),
        ("positional_reads", "q, k, v = x.request[:3]", "b = x.coords.b"),
        ("fragments", 'def f():\n    """Whether it is."""', 'def f():\n    """Return it."""'),
        ("fragments", 'class A:\n    """What it is."""', 'class A:\n    """An A."""'),
        ("long_functions", f"def f():\n{STEPS}    step()", f"def f():\n{DOCSTRING}{STEPS}"),
        ("long_functions", f"def f():\n    x = 0\n{STEPS}", f"@jit\ndef f():\n    x = 0\n{STEPS}"),
    ],
)
def test_faults_of_one_file(count, fault, sound):
    count = getattr(structure, count)
    (place,) = count(parse(a=fault))
    assert place.startswith("src/headway/a.py:1: ")
    assert count(parse(a=sound)) == []


def test_numbers_for_positions():
    faults = "from ..device import read\nread(tile, 4)\nregisters = [240, 24]\n"
    sound = "from ..device import read\nread(tile, WARPS, 2)\nprint(4)\nregisters = [LARGE, 24]\n"
    places = structure.bare_numbers(parse(backends__hopper__fwd=faults))
    assert [place.split(" ", 1)[1] for place in places] == ["read(tile, 4)", "[240, 24]"]
    assert structure.bare_numbers(parse(backends__hopper__fwd=sound, other=faults)) == []


def test_crowded_folders():
    names = [f"room__file_{n}" for n in range(21)]
    assert structure.crowded_folders(parse(**dict.fromkeys(names, ""))) == [
        "src/headway/room: 21 files"
    ]
    assert structure.crowded_folders(parse(**dict.fromkeys(names[:20], ""))) == []


def test_repeated_classes():
    (place,) = structure.repeated_classes(parse(a="class How: ...", b="class How: ..."))
    assert place == "How: src/headway/a.py:1, src/headway/b.py:1"
    assert structure.repeated_classes(parse(a="class Plan: ...", b="class Plan: ...")) == []


def test_circles_of_imports():
    inner = "def f():\n    from . import a\n"
    assert structure.circles(parse(a="from .b import f", b=inner)) == ["headway.a <-> headway.b"]
    typing = f"if TYPE_CHECKING:\n{inner}".replace("\n    from", "\n        from")
    typing = typing.replace("def", "    def")
    assert structure.circles(parse(a="from .b import f", b=typing)) == []


def test_climbing_trips():
    """A request that goes down and up four times, once in a local name and once by keyword."""
    top = "from .bottom import d0, d1, d2, d3, d4\n" + "".join(
        f"def u{n}(request): d{n}(request)\n" for n in range(5)
    )
    bottom = "from .top import u1, u2, u3, u4\n" + "".join(
        f"def d{n}(request):\n    same = request\n    u{n + 1}(request=same)\n" for n in range(4)
    )
    modules = parse(top=top, bottom=bottom + "def d4(request): ...\n")
    trips = [("headway.top:u0", "request")]
    (place,) = structure.climbing_trips(modules, trips, ["(top)", "(bottom)"])
    assert place.startswith("headway.top:u0 request: 4 climbs, 10 stays: top.u0 > bottom.d0 > ")
    assert (
        structure.climbing_trips(modules, [("headway.top:u1", "request")], ["top", "bottom"]) == []
    )
    (place,) = structure.climbing_trips(modules, [("headway.top:gone", "request")], ["(top)"])
    assert place == "headway.top:gone: there is no such function"


def test_local_names():
    source = "def f(self, found):\n    tile_rows = found\n    g = lambda x: x\n    return g\n"
    length, share = structure.local_names(parse(a=source))
    assert (length, share) == ((5 + 9 + 1) / 3, 1 / 3)
