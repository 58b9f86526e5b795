"""The package as a user gets it: what is built, what it asks for, and that it runs where nothing
else is installed.

No network: the wheel is installed without its dependencies, into virtual environments that see,
of the packages that the tests run with, those that the wheel asks for (and what these ask for).
"""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import headway

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import long_description  # noqa: E402
import release  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = PROJECT.get("urls", {}).get("Source")  # none, until there is one
MOST = 1 << 20  # bytes of the wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


def test_the_wheel_is_small_and_holds_the_two_packages_alone(built: dict[str, Path]) -> None:
    assert built["wheel"].stat().st_size < MOST
    assert built["wheel"].name == f"headway-{headway.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(built["wheel"]) as file:
        names = file.namelist()
        about = next(n for n in names if n.endswith(".dist-info/METADATA"))
        asked = message_from_bytes(file.read(about))
    assert {n.split("/")[0] for n in names} == {"headway", "headway_lab", about.split("/")[0]}
    assert {"headway/py.typed", "headway_lab/py.typed", "headway/blocks/report.html"} <= set(names)
    assert any(n.endswith("licenses/LICENSE") for n in names)
    sources = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*.py")}
    assert {n for n in names if n.endswith(".py")} == sources
    extras = set(asked.get_all("Provides-Extra", []))
    assert {"all", "cli", "dev", "docs", "hf", "plot", "triton"} == extras
    assert asked["Author"] == "the Headway developers"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    expected = long_description.outside(readme, SOURCE or "").strip()
    assert asked.get_payload(decode=True).decode("utf-8").strip() == expected


@pytest.mark.parametrize("source", ["", "https://example.org/it/"])
def test_the_long_description_is_read_outside_of_the_repository(source: str) -> None:
    """Its links lead to the files at `Source`, and its picture is there; without it, words stay."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = long_description.outside(readme, source)
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert [link for link in links if not link.startswith("https://")] == []
    assert "Change an import" in shown
    assert ("![" in shown) == ("A missing bar" in shown) == bool(source)
    mine = [link for link in links if source and link.startswith(source)]
    assert len(mine) == (len(re.findall(r"\]\((?!https:)", readme)) if source else 0)
    for link in mine:
        kind, _, path = link.removeprefix(source).partition("/main/")
        path, _, _ = path.partition("#")
        assert (ROOT / path).exists(), link
        assert kind == ("raw" if path.endswith(".svg") else "blob"), link


def test_hints_install_packages_that_an_extra_names() -> None:
    """By their own names: this package's is not on an index."""
    extras = PROJECT["optional-dependencies"]
    asked = {Requirement(r).name for e in ("cli", "hf", "plot", "triton") for r in extras[e]}
    hints = [
        re.sub("[^a-z ]+", "", hint).split()
        for path in (ROOT / "src").rglob("*.py")
        for hint in re.findall(
            r"pip install ((?:'?[a-z]+[>=\d.']*(?: |\b))+)", path.read_text("utf-8")
        )
    ]
    assert {name for hint in hints for name in hint} - {"git"} <= asked  # pip install git+...
    assert sorted(Requirement(r).name for r in extras["cli"]) in hints


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in pages():
        for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if page.suffix == ".md" and not link.startswith("https://"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_sdist_is_complete(built: dict[str, Path]) -> None:
    """All that git keeps, less what serves a checkout alone: what the pages and tests point to."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not in a git checkout")
    kept = {name for name in listed.stdout.splitlines() if not name.startswith(".ci/")}
    with tarfile.open(built["sdist"]) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    there = {name for name in kept if (ROOT / name).exists()}  # a file may just have been deleted
    assert there - names == set()


def closure(asked: Iterable[str]) -> set[str]:
    """The names of the installed packages that requirements ask for, and so on."""
    found: set[str] = set()
    todo = [(Requirement(text), "") for text in asked]
    while todo:
        requirement, extra = todo.pop()
        name = requirement.name.lower().replace("_", "-")
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if name in found:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # a build of PyTorch without Triton, say
        found.add(name)
        for text in requires:
            todo += [(Requirement(text), each) for each in ("", *requirement.extras)]
    return found


def tops(name: str) -> dict[str, Path]:
    """The files and folders that a package has put beside those of others."""
    package = metadata.distribution(name)
    parts = {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "bin")}
    return {part: Path(str(package.locate_file(part))) for part in parts - {"__pycache__"}}


@pytest.fixture(scope="module")
def scripts(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of a new environment with the wheel, and no more."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=False, symlinks=os.name == "posix")
    scripts = folder / ("bin" if os.name == "posix" else "Scripts")
    python = scripts / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    options = ["--quiet", "--no-index", "--no-deps", "--no-cache-dir", "--no-compile"]
    subprocess.run([*pip, "install", *options, str(built["wheel"])], check=True)
    return scripts


def lend(scripts: Path, folder: Path, *extras: str) -> None:
    """Let an environment see what the wheel asks for, in place of what it saw."""
    asked = list(PROJECT["dependencies"])
    for extra in extras:
        asked += PROJECT["optional-dependencies"][extra]
    others = folder / "others"
    others.mkdir()
    for name in sorted(closure(asked)):
        for part, path in tops(name).items():
            if not (others / part).exists():
                (others / part).symlink_to(path)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    command = [scripts / "python", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    Path(found.stdout.strip(), "others.pth").write_text(f"{others}\n")


def run(scripts: Path, program: str, *arguments: str, status: int = 0) -> str:
    """What a program of an environment prints, both streams."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [str(scripts / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=scripts)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


CORE = """
import importlib.util, pathlib, sys
for name in ("tyro", "rich", "safetensors", "matplotlib", "transformers", "jaxtyping", "pytest"):
    assert importlib.util.find_spec(name) is None, name
import torch
import headway as hw
from headway.compat import flash, flex, torch_sdpa
from headway.nn import MLA, Attention
from headway.optim import MuonClip
from headway.stability import QKClip
assert "venv" in hw.__file__, hw.__file__
q, k, v = (torch.randn(1, 4, 40, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
right = torch.autograd.grad(expected.square().sum(), (q, k, v))
call = lambda q, k, v: hw.attention(q, k, v, mask=hw.causal())
blocks = hw.block_mask(hw.causal(), 1, 1, 40, 40, tile=(16, 16))
for run in (
    call,
    torch.compile(call, backend="eager", fullgraph=True),
    lambda q, k, v: hw.attention(q, k, v, mask=blocks),
):
    out = run(q, k, v)
    torch.testing.assert_close(out, expected)
    for mine, theirs in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), right):
        torch.testing.assert_close(mine, theirs)
try:
    blocks.save(pathlib.Path("mask.safetensors"))
except ImportError as error:
    assert "pip install safetensors" in str(error), error
else:
    raise AssertionError("saved without safetensors")
exec(compile(sys.argv[1], "README.md", "exec"))
"""


@pytest.mark.skipif(os.name != "posix", reason="packages are lent by symbolic links")
def test_the_core_alone_attends_and_trains(scripts: Path, tmp_path: Path) -> None:
    """The first example of the README among it; and the commands say what they lack."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (first, *_) = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    lend(scripts, tmp_path)
    run(scripts, "python", "-c", CORE, first)
    assert "pip install filelock rich safetensors tyro" in run(
        scripts, "headway", "train", status=2
    )
    assert f"({scripts.parent}" in run(
        scripts, "headway", "doctor"
    )  # the package that was installed


HELP = """
import sys
from headway.cli import main
for name in sys.argv[1:]:
    try:
        main([name, "--help"])
    except SystemExit as end:
        assert not end.code, name
"""


@pytest.mark.skipif(os.name != "posix", reason="packages are lent by symbolic links")
def test_the_command_line_needs_its_extra_alone(scripts: Path, tmp_path: Path) -> None:
    lend(scripts, tmp_path, "cli")
    files = sorted((ROOT / "src").glob("*/cli/[a-z]*.py"))
    imports = "".join(f"import {file.parts[-3]}.cli.{file.stem}\n" for file in files)
    code = f"{imports}headway.cli.main(['mask', 'causal()', '--length', '64'])\n{HELP}"
    # Of headway_lab, by their entry point; one as a command, the others in one process.
    assert "headway train" in run(scripts, "headway", "train", "--help")
    others = ("sample", "bench", "experiment")
    helped = run(scripts, "python", "-c", code, *others)
    assert "▒▒··" in helped
    for name in others:
        assert f"headway {name}" in helped


# -- what is written in more than one place -----------------------------------------------------


def pages() -> list[Path]:
    top = [*ROOT.glob("*.md"), ROOT / "CITATION.cff"]
    return [*top, *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.yml")]


def test_no_page_names_an_address_that_the_package_does_not() -> None:
    for page in [*pages(), ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]:
        text = page.read_text(encoding="utf-8")
        for address in re.findall(r"https?://[^\s)\"'>]*headway[\w.-]*", text):
            assert address.startswith(SOURCE or "nowhere"), f"{page}: {address}"
        assert not re.search(r"pip install \W*headway\b(?!\[[a-z,]+\] @ file:)", text), page


def test_the_wheel_that_pages_name_is_the_one_that_is_built() -> None:
    for name in ("README.md", "docs/index.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert re.findall(r"headway-([\d.]+)-py3-none-any\.whl", text) == [headway.__version__]


def test_versions_agree() -> None:
    said = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert said == [headway.__version__]


def test_a_release_dates_what_is_unreleased() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = release.dated(changelog, "0.2.0", "2031-01-02")
    assert released.replace("\n## 0.2.0 (2031-01-02)\n", "", 1) == changelog
    assert released.index("## Unreleased") < released.index("## 0.2.0 (2031-01-02)\n\n### ")
    for again in ("0.2.0", "0.3.0"):  # released already; nothing under Unreleased
        with pytest.raises(ValueError, match=r"CHANGELOG\.md has"):
            release.dated(released, again, "2031-01-03")
    assert release.missing(headway.__version__) == [
        "`Source` in [project.urls] of pyproject.toml"
    ] * (SOURCE is None)
    assert len(release.missing("9.9.9")) > len(release.missing(headway.__version__))


def test_constraints_name_every_dependency() -> None:
    """And nothing else: `scripts/setup.sh` installs by them."""
    extras = PROJECT["optional-dependencies"]
    asked = [
        *PROJECT["dependencies"],
        *(r for e in ("cli", "hf", "plot", "dev", "docs") for r in extras[e]),
    ]
    wanted = {Requirement(text).name for text in asked}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {re.split("[=<>]", line)[0] for line in lines if line[:1].isalpha()}
    assert pinned == wanted


@pytest.mark.parametrize("status", [0, 3])
def test_setup_shows_what_pip_warns_of_only_if_it_fails(status: int, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\necho WARNING: an index is gone >&2\nexit {status}\n")
    fake.chmod(0o755)
    text = (ROOT / "scripts" / "setup.sh").read_text()
    function = re.search(r"^pip_install\(\) .*?^}$", text, re.MULTILINE | re.DOTALL)
    assert function is not None
    script = f"set -euo pipefail; venv={tmp_path}\n{function[0]}\npip_install x; echo after"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert bool(done.returncode) == bool(status)
    assert done.stdout == ("" if status else "after\n")
    assert done.stderr == ("WARNING: an index is gone\n" if status else "")


def test_the_oldest_transformers_is_the_one_that_is_tested() -> None:
    """And the other one is newer."""
    pinned = [
        tuple(map(int, re.findall(r"^transformers==([\d.]+)$", text, re.MULTILINE)[0].split(".")))
        for text in ((ROOT / f"constraints{x}.txt").read_text() for x in ("-transformers", ""))
    ]
    (asked,) = PROJECT["optional-dependencies"]["hf"]
    assert asked == "transformers>=" + ".".join(map(str, pinned[0][:2]))
    assert pinned[0] < pinned[1]


# -- what a code host reads ----------------------------------------------------------------------


def test_the_bug_report_asks_for_doctor() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    fields = {field["id"]: field for field in form["body"]}
    assert len(fields) == len(form["body"])
    for field in fields.values():
        assert field["type"] == "textarea"
        assert field["attributes"]["label"]
    assert "headway doctor" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"]["required"]


def test_the_workflow_runs_what_there_is() -> None:
    """Its make targets, extras and test files; on three systems."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    systems = {job["runs-on"] for job in jobs.values()} | set(
        jobs["install"]["strategy"]["matrix"]["os"]
    )
    assert {"ubuntu", "macos", "windows"} <= {name.partition("-")[0] for name in systems}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for job in jobs.values():
        for step in job["steps"]:
            assert set(step) & {"uses", "run"}
            program, *words = step.get("run", "true").split()
            if program == "make":
                assert words[0] in targets
            for word in words:
                if word.startswith("tests/"):
                    assert (ROOT / word).exists(), word
                if extras := re.search(r"\.\[(.+)\]", word):
                    assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])
