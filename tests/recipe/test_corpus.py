"""The text: whole files, the same on every load, none of it lost or mixed up by packing."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from headway_lab.recipe.corpus import BOUNDARY, Corpus, Packed, listing, load_corpus
from headway_lab.recipe.errors import CorpusError


@pytest.fixture(scope="module")
def corpus(text_folder: Path) -> Corpus:
    return load_corpus(text_folder)


def test_two_loads_are_equal(corpus: Corpus, text_folder: Path) -> None:
    assert load_corpus(text_folder) == corpus


def test_what_is_read(corpus: Corpus, text_folder: Path) -> None:
    names = corpus.train_names + corpus.held_out_names
    assert len(names) == 120
    assert "package/m1.py" in names
    assert not any("test" in name or "idlelib" in name or "sysconfig" in name for name in names)
    for name, text in zip(corpus.train_names, corpus.train_texts, strict=True):
        assert (text_folder / name).read_bytes() == text


def test_held_out_files_are_not_trained_on(corpus: Corpus) -> None:
    assert corpus.held_out_names
    assert not set(corpus.held_out_names) & set(corpus.train_names)
    assert not set(corpus.held_out_texts) & set(corpus.train_texts)


def test_a_new_file_moves_no_other_across(
    corpus: Corpus, text_folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(text_folder, tmp_path / "copy")
    for n in range(40):
        (copy / f"a{n}.py").write_text(f"new = {n}")
    after = load_corpus(copy)
    assert set(corpus.held_out_names) <= set(after.held_out_names)
    assert set(corpus.train_names) <= set(after.train_names)


@pytest.mark.parametrize("change", ["a byte", "a name"])
def test_the_checksum_sees(change: str, corpus: Corpus, text_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(text_folder, tmp_path / "copy")
    file = copy / "m0.py"
    if change == "a byte":
        file.write_bytes(b"x" + file.read_bytes()[1:])
    else:
        file.rename(copy / "renamed.py")
    assert load_corpus(copy).sha256 != corpus.sha256


def test_the_standard_library_is_a_text() -> None:
    corpus = load_corpus()
    assert corpus.train_bytes > 2e6
    assert 1e4 < corpus.held_out_bytes < corpus.train_bytes / 8
    assert "textwrap.py" in corpus.train_names + corpus.held_out_names


def test_too_little_text(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"0 \.py files under .*--corpus"):
        load_corpus(tmp_path)
    with pytest.raises(CorpusError, match="not a folder"):
        load_corpus(tmp_path / "missing")


def test_what_is_no_file_is_not_read(corpus: Corpus, text_folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "text"
    shutil.copytree(text_folder, root)
    (root / "folder.py").mkdir()
    (root / "dangling.py").symlink_to("nowhere")
    os.mkfifo(root / "pipe.py")
    assert load_corpus(root) == corpus
    (root / os.fsdecode(b"bad\xff.py")).write_text("x = 1")
    with pytest.raises(CorpusError, match=r"bad.*\.py' is not UTF-8; rename it"):
        load_corpus(root)


def test_packages(tmp_path: Path) -> None:
    """Every file of sources and notes once, whole families held out."""
    files = {
        "torch/a.py": b"a = 1",
        "torch/notes.md": "# é".encode(),
        "torch/copy.py": b"a = 1",  # as a.py
        "torch/__pycache__/x.py": b"cached",
        "torch/latin.txt": b"\xe9",
        "torch/zero.txt": b"a\0",
        "torch/data.csv": b"1,2",
        "torch/long.txt": b"x" * 1_000_001,
        "torch/empty.py": b"",
        "torchvision/b.rst": b"b",
        "six.py": b"six",
        "timm/c.py": b"c",
        "timm/copy.py": b"a = 1",  # is trained on
        "timm-1.0.dist-info/top.txt": b"d",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    (tmp_path / "torch" / "folder.py").mkdir()
    (tmp_path / "torch" / "dangling.py").symlink_to("nowhere")
    corpus = load_corpus(tmp_path, "packages")
    assert corpus.train_names == ("six.py", "torch/a.py", "torch/notes.md", "torchvision/b.rst")
    assert corpus.held_out_names == ("timm-1.0.dist-info/top.txt", "timm/c.py")
    assert corpus.train_texts[1] == b"a = 1"
    header, *lines = listing(corpus).splitlines()
    assert header == "package,part,files,bytes,sha256"
    assert [line.rpartition(",")[0] for line in lines] == [
        "six.py,train,1,3", "timm,held out,1,1", "timm-1.0.dist-info,held out,1,1",
        "torch,train,2,9", "torchvision,train,1,1",
    ]  # fmt: skip


def test_no_packages(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"0 source files of packages under .*--corpus"):
        load_corpus(tmp_path, "packages")
    with pytest.raises(CorpusError, match="not a folder"):
        load_corpus(tmp_path / "missing", "packages")


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("context", [1, 7, 64])
def test_packing_loses_nothing(corpus: Corpus, context: int, seed: int | None) -> None:
    """Put together again by their ids, the sequences are the files, and each token's target is
    what comes next."""
    packed = Packed(corpus.train_texts, context, seed)
    batch = packed.rows(torch.arange(packed.sequences))
    tokens, targets, ids = (t.flatten() for t in (batch.tokens, batch.targets, batch.ids))
    real = targets >= 0
    assert int(real.sum()) == sum(len(text) + 1 for text in corpus.train_texts)
    assert bool(real[: int(real.sum())].all())
    tokens, targets, ids = tokens[real], targets[real], ids[real]
    assert torch.equal(targets[:-1], tokens[1:])
    assert targets[-1] == BOUNDARY
    texts = []
    for n in range(int(ids[-1]) + 1):
        of_file = tokens[ids == n].tolist()
        assert of_file[0] == BOUNDARY
        texts.append(bytes(of_file[1:]))
    assert sorted(texts) == sorted(corpus.train_texts)
    assert (tuple(texts) == corpus.train_texts) == (seed is None)


def test_an_epoch_reads_every_sequence_once(corpus: Corpus) -> None:
    packed = Packed(corpus.train_texts, 32, seed=5)
    size = 3
    steps = -(-2 * packed.sequences // size)
    rows = torch.cat([packed.batch(step, size).tokens for step in range(steps)])
    everything = packed.rows(torch.arange(packed.sequences)).tokens
    first, second = rows[: packed.sequences], rows[packed.sequences : 2 * packed.sequences]
    assert not torch.equal(first, second)
    for epoch in (first, second):
        assert sorted(epoch.tolist()) == sorted(everything.tolist())


def test_a_batch_is_a_function_of_step_and_seed(corpus: Corpus) -> None:
    def tokens(seed: int, step: int) -> torch.Tensor:
        return Packed(corpus.train_texts, 32, seed).batch(step, 4).tokens

    assert torch.equal(tokens(1, 9), tokens(1, 9))
    assert not torch.equal(tokens(1, 9), tokens(2, 9))
    assert not torch.equal(tokens(1, 9), tokens(1, 10))
