"""Lay the package out as a kernel of the Hugging Face Hub: `scripts/hub_kernel.py FOLDER`.

    FOLDER/build/torch-universal/__init__.py, api.py, ...   the library, without the command line
    FOLDER/build/torch-universal/metadata.json              what the `kernels` package reads

There is nothing to compile: kernels are Python, and Triton's. The folder is what a kernel
repository holds; `kernels.get_local_kernel(Path(FOLDER))` tries it. The package is loaded under a
name made from its content, and so are its operators: any number of versions fit in one process.
"""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "headway"
LEFT_OUT = ("cli",)  # it needs packages that a kernel may not
# transformers looks for these in a kernel that is named as attn_implementation.
FLASH = """
from .compat.flash import flash_attn_func as flash_attn_func
from .compat.flash import flash_attn_varlen_func as flash_attn_varlen_func
from .compat.flash import flash_attn_with_kvcache as flash_attn_with_kvcache
"""


def lay_out(folder: Path, source: Path = SOURCE) -> Path:
    """Write the kernel into `folder`; the path of the variant. What was built there is replaced."""
    variant = folder / "build" / "torch-universal"
    shutil.rmtree(variant, ignore_errors=True)
    shutil.copytree(source, variant, ignore=_left_out(source))
    with (variant / "__init__.py").open("a") as init:
        init.write(FLASH)
    digest = hashlib.sha256()
    for path in sorted(variant.rglob("*.py")):
        digest.update(f"{path.relative_to(variant).as_posix()}\n".encode() + path.read_bytes())
    (version,) = re.findall(r'^__version__ = "(.+)"', (source / "__init__.py").read_text(), re.M)
    about = {
        "name": "headway",
        "id": f"_headway_{digest.hexdigest()[:12]}",
        "version": int(version.split(".")[0]),
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},  # the least of what it runs on
    }
    (variant / "metadata.json").write_text(json.dumps(about, indent=2) + "\n")
    return variant


def _left_out(source: Path):
    def ignore(folder: str, names: list[str]) -> set[str]:
        top = LEFT_OUT if Path(folder) == source else ()
        return {name for name in names if name in top or name == "__pycache__"}

    return ignore


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: scripts/hub_kernel.py FOLDER")
    print(lay_out(Path(sys.argv[1])))
