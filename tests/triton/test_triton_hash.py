"""Triton's hash of itself: read from a record only while Triton's files are the same."""

import os
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton.runtime import cache

import triton
from headway.backends.gpu.runtime import kernel_cache, triton_hash


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A stand-in for Triton's package, a folder for records, and a count of hashes made."""
    folder = tmp_path / "triton"
    (folder / "backends").mkdir(parents=True)
    for name in ("__init__.py", "libtriton.so", "backends/compiler.py"):
        (folder / name).write_text("as installed")
    monkeypatch.setattr(triton, "__file__", str(folder / "__init__.py"))
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(triton_hash, "_SETTLED_SECONDS", -60.0)  # as if it were long ago
    return folder


def hashed(monkeypatch, content="right"):
    """Return the hash of a new process, and how often Triton had to make it."""
    made = []
    monkeypatch.setattr(cache, "triton_key", lambda: made.append(1) or content)
    return triton_hash.triton_hash.__wrapped__(), len(made)


def test_it_is_made_once_for_the_same_files(package, monkeypatch):
    assert hashed(monkeypatch) == ("right", 1)
    assert hashed(monkeypatch, "never asked for") == ("right", 0)


def written(file):
    file.write_text("as changed: ")


def written_with_its_times_set_back(file):
    about = file.stat()
    file.write_text("AS INSTALLED")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (about.st_size, about.st_mtime_ns)


def replaced(file):
    about = file.stat()
    other = file.with_name("other")
    other.write_text("AS INSTALLED")
    os.utime(other, ns=(about.st_atime_ns, about.st_mtime_ns))
    other.rename(file)


def removed(file):
    file.unlink()


def joined_by_another(file):
    file.with_name("plugin.py").write_text("new")


@pytest.mark.parametrize(
    "change", [written, written_with_its_times_set_back, replaced, removed, joined_by_another]
)
@pytest.mark.parametrize("name", ["libtriton.so", "backends/compiler.py"])
def test_it_is_made_again_where_a_file_changed(package, monkeypatch, change, name):
    assert hashed(monkeypatch) == ("right", 1)
    change(package / name)
    assert hashed(monkeypatch, "another") == ("another", 1)


def test_a_file_behind_a_link_counts(package, monkeypatch, tmp_path):
    elsewhere = tmp_path / "plugin"
    elsewhere.mkdir()
    (elsewhere / "code.py").write_text("one")
    (package / "backends" / "plugin").symlink_to(elsewhere)
    assert hashed(monkeypatch) == ("right", 1)
    (elsewhere / "code.py").write_text("two")
    assert hashed(monkeypatch, "another") == ("another", 1)


def test_a_link_to_nothing_is_no_obstacle(package, monkeypatch, tmp_path):
    (package / "backends" / "plugin.py").symlink_to(tmp_path / "plugin.py")
    assert hashed(monkeypatch) == ("right", 1)
    assert hashed(monkeypatch) == ("right", 0)
    (tmp_path / "plugin.py").touch()
    assert hashed(monkeypatch) == ("right", 1)


def test_files_that_changed_just_now_leave_no_record(package, monkeypatch):
    monkeypatch.setattr(triton_hash, "_SETTLED_SECONDS", 60.0)
    assert hashed(monkeypatch) == ("right", 1)
    assert hashed(monkeypatch) == ("right", 1)


def test_files_that_change_meanwhile_leave_no_record(package, monkeypatch):
    def key():
        (package / "libtriton.so").write_text("installed over")
        return "half old, half new"

    monkeypatch.setattr(cache, "triton_key", key)
    assert triton_hash.triton_hash.__wrapped__() == "half old, half new"
    assert hashed(monkeypatch) == ("right", 1)


@pytest.mark.parametrize("damage", ["", "{}", "[]", "null", '{"value": "wrong"}'])
def test_a_damaged_record_is_made_again(package, monkeypatch, damage, tmp_path):
    hashed(monkeypatch)
    (record,) = (tmp_path / "cache").iterdir()
    record.write_text(damage)
    assert hashed(monkeypatch) == ("right", 1)


def test_a_changed_value_is_noticed(package, monkeypatch, tmp_path):
    hashed(monkeypatch)
    (record,) = (tmp_path / "cache").iterdir()
    record.write_text(record.read_text().replace("right", "wrong"))
    assert hashed(monkeypatch) == ("right", 1)


def test_a_folder_that_cannot_be_written_to_is_no_obstacle(package, monkeypatch, tmp_path):
    (tmp_path / "cache").touch()
    assert hashed(monkeypatch) == ("right", 1)
    assert hashed(monkeypatch) == ("right", 1)


def test_kernels_lie_under_tritons_own_keys(monkeypatch):
    """The key of a kernel with our hash is the one that Triton makes."""

    class Part:
        def hash(self):
            return "part"

    monkeypatch.setattr(kernel_cache, "triton_hash", cache.triton_key)
    with_own = kernel_cache._key(Part(), Part(), Part(), env_vars={})
    monkeypatch.setattr(kernel_cache, "triton_hash", lambda: "other")
    with_other = kernel_cache._key(Part(), Part(), Part(), env_vars={})
    own = kernel_cache.compiler.get_cache_key(Part(), Part(), Part(), env_vars={})
    assert with_own.startswith(own + "-")
    assert with_other.startswith("other-part-part-part")
    assert triton_hash.triton_hash() == cache.triton_key()
