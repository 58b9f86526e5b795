"""What one does with a block mask: parts, combinations, other tiles, devices, files, pictures."""

import itertools
import re
from xml.etree import ElementTree

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import headway
from headway.blocks import BlockMask, Runs, from_dense
from headway.blocks.runs import of_dense
from headway.errors import ArgumentError, CheckpointError

from .dense import CPU, tiles_state

TILE, LENGTHS = (8, 16), (100, 230)
GRID = (13, 15)


def random_mask(*groups: int, grid=GRID, lengths=LENGTHS, tile=TILE) -> BlockMask:
    """Runs of all three states, some rows empty; the mask itself plays no part."""
    state = torch.randint(0, 3, (*groups, *grid)).repeat_interleave(4, 3)[..., : grid[1]]
    state[torch.rand(state.shape[:3]) < 0.2] = 0
    return from_dense(state.to(torch.uint8), headway.causal(), lengths, tile)


def states(mask: BlockMask) -> torch.Tensor:
    """What rows say, once it is certain that columns say the same."""
    by_row, by_col = tiles_state(mask.tiles, *mask.shape[:2], mask.grid)
    assert torch.equal(by_row, by_col)
    assert torch.equal(by_row, mask.to_dense())
    for order, n in ((mask.tiles.row_order, mask.grid[0]), (mask.tiles.col_order, mask.grid[1])):
        assert order.shape == (mask.shape[0] * mask.shape[1] * n,)
    assert all(t.dtype == torch.int32 for t in mask.tiles.flatten())
    return by_row.long()


# -- runs -----------------------------------------------------------------------------------------


def test_runs_and_dense_are_one():
    live = torch.rand(40, 33) < 0.6
    runs = of_dense(live.numpy(), CPU)[1]
    assert torch.equal(runs.dense(33), live)
    assert torch.equal(runs.per_row(), live.sum(1))
    assert torch.equal(runs.tiles().long(), live.nonzero()[:, 1])
    assert torch.equal(runs.row(), runs.row().sort().values)
    assert torch.equal(Runs.of_keys(runs.keys(33), runs.count.long(), 40, 33).dense(33), live)


def test_runs_take_and_cut():
    live = torch.rand(40, 33) < 0.6
    rows = torch.randint(0, 40, (70,))
    runs = of_dense(live.numpy(), CPU)[1].take(rows)
    assert torch.equal(runs.dense(33), live[rows])
    assert torch.equal(runs.cut(5, 20).dense(15), live[rows][:, 5:20])
    assert of_dense(live.numpy(), CPU)[1].take(rows[:0]).rows == 0


def test_keys_pass_the_range_of_int32():
    """Rows times width beyond 2^31: 70,000 rows of 70,000 tiles."""
    key = torch.tensor([69_999]) * 70_001 + 69_990
    runs = Runs.of_keys(key, torch.tensor([10]), 70_000, 70_000)
    assert runs.offsets[-2:].tolist() == [0, 1]
    assert (runs.start.tolist(), runs.count.tolist()) == ([69_990], [10])
    assert runs.keys(70_000).tolist() == key.tolist()


def test_more_tiles_than_an_int32_counts(one_thread):
    """8 million tokens: 4.3e9 tiles, and 2,147,450,880 of them full."""
    length, rows = 1 << 23, 1 << 16
    half = rows // 2
    mask = headway.block_mask(headway.causal(), 1, 1, length, length)
    full, partial = rows * (rows - 1) // 2, rows
    assert mask.counts() == (full, partial, rows**2 - full - partial)
    assert (mask | mask).counts() == (mask & mask).counts() == mask.counts()
    everything = headway.block_mask(headway.prefix(length), 1, 1, length, length)
    assert everything.counts() == (rows**2, 0, 0)
    assert (mask | everything).counts() == (rows**2, 0, 0)
    assert everything.tiles.rows_full.per_row().sum() == rows**2
    lower = mask[:, :, half:]
    assert lower.counts()[0] == full - half * (half - 1) // 2
    coarse = mask.retile((1024, 1024))
    assert coarse.counts()[:2] == (rows // 8 * (rows // 8 - 1) // 2, rows // 8)
    assert mask.tiles.row_order[:3].tolist() == [rows - 1, rows - 2, rows - 3]
    assert mask.tiles.col_order[:3].tolist() == [0, 1, 2]
    assert all(t.dtype == torch.int32 for t in mask.tiles.flatten())


# -- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index",
    [
        (1,), (slice(None), 2), (slice(1, 3), slice(0, 2)), (-1, -1), (slice(0, 0),),
        (0, slice(None), slice(3, 9)), (slice(None), slice(None), slice(None), slice(2, 14)),
        (slice(1, 2), 1, slice(5, 13), slice(-4, None)), (2, 0, 12, 14),
        (slice(2, 1), 0, slice(9, 2)),
    ],
    ids=str,
)  # fmt: skip
def test_a_part_has_the_states_of_the_whole(index):
    mask = random_mask(3, 3)
    kept = tuple(i if isinstance(i, slice) else slice(i, i + 1 or None) for i in index)
    assert torch.equal(states(mask[index]), states(mask)[kept])


def test_a_part_evaluates_the_mask_of_the_whole():
    """`part` used on a part of the tensors gives that part of the whole's result."""
    windows = torch.tensor([5, 60, 17])
    ids = torch.randint(0, 4, (2, 230)).sort(1).values

    def mask(b, h, q_idx, kv_idx):
        return ((q_idx - kv_idx).abs() < windows[h]) & (ids[b, q_idx] == ids[b, kv_idx])

    whole = headway.block_mask(mask, 2, 3, *LENGTHS, tile=TILE)
    q, (k, v) = torch.randn(2, 3, LENGTHS[0], 8), torch.randn(2, 2, 3, LENGTHS[1], 8)
    out = headway.attention(q, k, v, mask=whole)
    part = whole[1, 1:3, 4:9]
    assert part.shape == (1, 2, 40, 230)
    got = headway.attention(q[1:, 1:, 32:72], k[1:, 1:], v[1:, 1:], mask=part)
    torch.testing.assert_close(got, out[1:, 1:, 32:72])
    keys = whole[:, :, :, 2:]  # and over a part of the keys: the same as masking the others
    got = headway.attention(q, k[:, :, 32:], v[:, :, 32:], mask=keys)
    want = headway.attention(q, k, v, mask=lambda b, h, i, j: mask(b, h, i, j) & (j >= 32))
    torch.testing.assert_close(got, want)
    assert repr(part.mask).endswith("b=1, h=1, q_idx=32)")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((3,), "batch index 3 is out of range for 3"),
        ((0, -4), "head index -4"),
        ((0, 0, slice(0, 4, 2)), r"query tile index slice\(0, 4, 2\)"),
        ((0, 0, 0, True), "key tile index True"),
        ((0, 0, 0, 0, 0), "got 5 indices"),
    ],
)
def test_a_wrong_index_is_named(index, message):
    with pytest.raises(ArgumentError, match=message):
        random_mask(3, 3)[index]


# -- combinations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [((2, 3), (2, 3)), ((1, 3), (2, 1)), ((2, 1), (1, 1))], ids=str)
def test_and_or(groups):
    a, b = (random_mask(*g) for g in groups)
    x, y = torch.broadcast_tensors(states(a), states(b))
    assert torch.equal(states(a & b), torch.minimum(x, y))
    assert torch.equal(states(a | b), torch.maximum(x, y))
    assert repr((a & b).mask) == "causal() & causal()"


def test_combined_masks_mean_what_they_say():
    a, b = headway.causal() & headway.sliding_window(40), headway.prefix(33)
    blocks = [headway.block_mask(m, 1, 1, *LENGTHS, tile=TILE) for m in (a, b)]
    q, (k, v) = torch.randn(1, 2, LENGTHS[0], 8), torch.randn(2, 1, 2, LENGTHS[1], 8)
    for mask, both in ((a & b, blocks[0] & blocks[1]), (a | b, blocks[0] | blocks[1])):
        got, want = (headway.attention(q, k, v, mask=m) for m in (both, mask))
        torch.testing.assert_close(got, want)


def test_masks_that_do_not_fit_together_are_refused():
    mask = random_mask(2, 1)
    with pytest.raises(ArgumentError, match=r"equal lengths and tiles.*\(8, 16\).*\(16, 16\)"):
        mask & random_mask(2, 1, tile=(16, 16))
    with pytest.raises(ArgumentError, match=r"equal or 1: \(2, 1\) and \(3, 1\)"):
        mask | random_mask(3, 1)
    with pytest.raises(
        ArgumentError, match="& combines a block mask with another, not with causal"
    ):
        mask & headway.causal()
    with pytest.raises(ArgumentError, match=r"\| combines a block mask .*int"):
        mask | 3
    with pytest.raises(ArgumentError, match="on cpu and meta"):
        mask | mask.to("meta")


# -- tiles, devices, pytrees ----------------------------------------------------------------------


@pytest.mark.parametrize("by", [(1, 1), (2, 1), (1, 3), (3, 2), (13, 15), (100, 100)], ids=str)
def test_retile(by):
    mask = random_mask(2, 2)
    coarse = mask.retile((TILE[0] * by[0], TILE[1] * by[1]))
    state = states(mask)
    want = torch.zeros(2, 2, *coarse.grid, dtype=torch.long)
    for r, c in itertools.product(*map(range, coarse.grid)):
        cell = state[..., r * by[0] : (r + 1) * by[0], c * by[1] : (c + 1) * by[1]].flatten(2)
        want[..., r, c] = (cell > 0).any(2).long() + (cell == 2).all(2).long()
    assert torch.equal(states(coarse), want)
    assert coarse.shape == mask.shape


def test_retile_refuses_other_sizes():
    with pytest.raises(ArgumentError, match=r"tile=\(12, 16\) must .*multiples of .*\(8, 16\)"):
        random_mask(1, 1).retile((12, 16))
    with pytest.raises(ArgumentError, match=r"tile=12 must .*multiples of .*\(8, 16\)"):
        random_mask(1, 1).retile(12)
    for tile in ((0, 16), 0, 16.0, (16.0, 16), (16, 16, 16), (8, True)):
        with pytest.raises(ArgumentError, match=re.escape(f"tile={tile!r} must be one or two")):
            random_mask(1, 1).retile(tile)


def test_to_moves_the_ids_of_library_masks():
    ids = torch.arange(64) // 9
    mask = headway.block_mask(headway.document(ids) & headway.causal(), 1, 1, 64, 64, tile=TILE)
    moved = mask.to("meta")
    assert moved.device.type == "meta"
    assert moved.mask.first.ids.device.type == "meta"
    assert torch.equal(mask.to("cpu").to_dense(), mask.to_dense())
    assert mask.to("cpu").mask.first.ids is ids
    whole = headway.block_mask(lambda b, h, i, j: ids[i] == ids[j], 1, 1, 64, 64, tile=TILE)
    with pytest.raises(ArgumentError, match=r"captures a tensor \(64,\) on cpu"):
        whole.to("meta")


def test_it_is_a_pytree():
    mask = random_mask(2, 2)
    tensors, spec = torch.utils._pytree.tree_flatten(mask)
    assert len(tensors) == 14
    back = torch.utils._pytree.tree_unflatten(tensors, spec)
    assert torch.equal(states(back), states(mask))
    assert back.mask is mask.mask


# -- files ----------------------------------------------------------------------------------------


def library_mask() -> headway.Mask:
    ids = torch.randint(0, 5, (2, 230)).sort(1).values
    inside = headway.document(ids[:, :100].contiguous(), ids)
    return ~(headway.causal(3) & headway.sliding_window(50)) | inside & headway.padding(
        torch.tensor([200, 230])
    )


def test_save_and_load(tmp_path):
    mask = headway.block_mask(library_mask(), 2, 1, *LENGTHS, tile=TILE)[1, 0, 2:]
    mask.save(tmp_path / "mask.safetensors")
    back = BlockMask.load(tmp_path / "mask.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["mask.safetensors"]
    assert (back.shape, back.tile, repr(back.mask)) == (mask.shape, mask.tile, repr(mask.mask))
    assert torch.equal(states(back), states(mask))
    q, (k, v) = torch.randn(1, 2, 84, 8), torch.randn(2, 1, 2, 230, 8)
    got, want = (headway.attention(q, k, v, mask=m) for m in (back, mask))
    assert torch.equal(got, want)


def test_one_tensor_stays_one_tensor(tmp_path):
    ids = torch.arange(64) // 9
    both = headway.document(ids) & ~headway.document(ids, ids.flip(0))
    headway.block_mask(both, 1, 1, 64, 64, tile=TILE).save(tmp_path / "mask")
    back = BlockMask.load(tmp_path / "mask").mask
    assert back.first.ids is back.second.mask.ids
    assert not torch.equal(back.first.ids, back.second.mask.kv_ids)


def test_a_python_function_is_not_saved(tmp_path):
    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < 9

    mask = headway.block_mask(headway.causal() & near, 1, 1, 64, 64, tile=TILE)
    with pytest.raises(ArgumentError, match=r"Python code that no file can hold: .*near"):
        mask.save(tmp_path / "mask")
    assert not list(tmp_path.iterdir())


def test_broken_files_are_refused(tmp_path):
    path = tmp_path / "mask"
    mask = random_mask(2, 2)
    mask.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        BlockMask.load(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="holds no block mask"):
        BlockMask.load(path)
    with pytest.raises(FileNotFoundError):
        BlockMask.load(tmp_path / "none")
    path.write_bytes(whole)
    with safe_open(path, "pt") as file:
        head, tensors = file.metadata(), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    for name, change in (
        ("tiles.1", lambda t: t + 14),  # runs past the last column
        ("tiles.2", lambda t: -t),
        ("tiles.0", lambda t: t.flip(0)),
        ("tiles.3", lambda t: t[:-1]),
        ("tiles.6", lambda t: t.long()),
        ("tiles.12", lambda t: t.clone().fill_(0)),
    ):
        save_file({**tensors, name: change(tensors[name]).contiguous()}, path, head)
        with pytest.raises(CheckpointError, match="do not fit"):
            BlockMask.load(path)
    save_file({n: t for n, t in tensors.items() if n != "tiles.5"}, path, head)
    with pytest.raises(CheckpointError, match=r"only a part .*tiles.5"):
        BlockMask.load(path)
    other = {"headway": head["headway"].replace("causal", "acausal")}
    save_file(tensors, path, other)
    with pytest.raises(CheckpointError, match="no score or mask named 'acausal'"):
        BlockMask.load(path)
    with pytest.raises(CheckpointError, match="could not be written"):
        mask.save(tmp_path / "no" / "such" / "folder")


# -- pictures -------------------------------------------------------------------------------------


def test_text_picture():
    mask = headway.block_mask(headway.causal(), 1, 1, 40, 40, tile=(8, 8))
    assert mask.picture().splitlines() == [
        "▒▒········", "██▒▒······", "████▒▒····", "██████▒▒··", "████████▒▒",
    ]  # fmt: skip
    assert mask.picture(3).splitlines() == ["▒▒····", "██▒▒··", "████▒▒"]
    assert repr(mask).splitlines()[0] == (
        "BlockMask(causal(), shape=(1, 1, 40, 40), tile=(8, 8), full=10, partial=5, empty=10, "
        "sparsity=40.0%)"
    )
    assert mask.picture(16) in repr(mask)
    for rows in (0, 2.5, "8"):
        with pytest.raises(ArgumentError, match=f"rows={rows!r} must be a positive integer"):
            mask.picture(rows)


def test_pictures_of_a_million_tokens_cost_little():
    mask = headway.block_mask(headway.causal(), 1, 1, 1 << 20, 1 << 20)
    lines = mask.picture(16).splitlines()
    assert len(lines) == 16
    assert lines[5] == "██" * 5 + "▒▒" + "··" * 10
    assert mask.counts()[:2] == (8192 * 8191 // 2, 8192)
    assert mask.tiles.rows_full.start.shape == (8191,)


@pytest.mark.parametrize(
    ("mask", "lengths", "tile"),
    [
        (
            headway.causal() & headway.sliding_window(2048) | headway.prefix(700),
            (16384, 16384),
            128,
        ),
        (headway.prefix(100), (1, 4096), 16),
        (headway.sliding_window(3), (5, 3), 1),
    ],
    ids=["16k", "one query", "tiny"],
)
def test_image_tells_full_partial_and_empty_apart(tmp_path, mask, lengths, tile):
    image = pytest.importorskip("matplotlib.image")
    colours = pytest.importorskip("matplotlib.colors")
    from headway.blocks.picture import COLOURS

    headway.block_mask(mask, 1, 1, *lengths, tile=(tile, tile)).save_picture(tmp_path / "mask.png")
    pixels = torch.from_numpy(image.imread(tmp_path / "mask.png")[..., :3])
    assert pixels.shape[0] > 1000
    area = pixels[100:1100].flatten(0, 1)
    for colour in COLOURS[: 3 if tile > 1 else 1]:
        near = (area - torch.tensor(colours.to_rgb(colour))).abs().amax(1) < 0.01
        assert near.sum() > 50


def cells_of(svg: str, colour: str, at: int = 0) -> set[tuple[float, ...]]:
    """The stretches of a colour in the at-th panel: left, top, width, height."""
    panels = ElementTree.fromstring(svg).findall(f"{SVG}g")
    paths = [p for p in panels[at].findall(f"{SVG}path") if p.get("fill") == colour]
    numbers = r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-"
    return {tuple(map(float, m)) for p in paths for m in re.findall(numbers, p.get("d"))}


SVG = "{http://www.w3.org/2000/svg}"


def test_svg_draws_each_tile(tmp_path):
    from headway.blocks.picture import COLOURS

    mask = headway.block_mask(headway.causal() & headway.prefix(20), 1, 1, 36, 40, tile=8)
    mask.save_picture(tmp_path / "mask.svg", title="a < b & c")
    text = (tmp_path / "mask.svg").read_text()
    assert cells_of(text, COLOURS[1]) == {
        (0, 0, 8, 8), (8, 8, 8, 8), (16, 16, 8, 8), (16, 24, 8, 8), (16, 32, 8, 4)
    }  # fmt: skip
    assert cells_of(text, COLOURS[2]) == {
        (0, 8, 8, 8),
        (0, 16, 16, 8),
        (0, 24, 16, 8),
        (0, 32, 16, 4),
    }
    assert "a &lt; b &amp; c" in text
    assert "full: 7 (28.0%)" in text


def test_pictures_show_batches_and_heads():
    from headway.blocks.picture import COLOURS

    mask = headway.block_mask(lambda b, h, i, j: j < 8 * (b + h), 2, 3, 32, 32, tile=8)
    svg = mask._repr_html_()
    for n in range(6):
        b, h = divmod(n, 3)
        want = {(0, 8 * row, 8 * (b + h), 8) for row in range(4) if b + h}
        assert cells_of(svg, COLOURS[2], n) == want
        assert f">batch {b}, head {h}<" in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert repr(mask).splitlines()[1] == "batch 0, head 0:"
    many = headway.block_mask(lambda b, h, i, j: j < i + h, 1, 40, 32, 32, tile=8)
    assert many._repr_html_().count(">head ") == 16
    assert "16 of 40 batches and heads" in many._repr_html_()


def test_small_multiples_in_an_image(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    ids = torch.stack([torch.arange(64) // n for n in (8, 16, 32)])
    headway.block_mask(headway.document(ids), 3, 1, 64, 64, tile=8).save_picture(tmp_path / "m.png")
    assert min(image.imread(tmp_path / "m.png").shape[:2]) > 500


def test_pictures_of_scores():
    from headway.blocks.picture import of_score

    table = torch.arange(12.0).view(2, 6)
    score = lambda s, b, h, i, j: s + table[h, j]
    picture = of_score(score, headway.causal(), (1, 2, 6, 6), 32)
    assert [p.label for p in picture.panels] == ["head 0", "head 1"]
    for h, panel in enumerate(picture.panels):
        levels = (table[h] * 32 / 11).round() + 1
        assert torch.equal(panel.cells.float(), levels.expand(6, 6).tril())
    far = of_score(score, None, (1, 2, 1000, 6), 10)  # ten positions of queries, the one of keys
    assert far.panels[0].cells.shape == (10, 1)
    holes = of_score(
        lambda s, b, h, i, j: torch.where(i == j, -torch.inf, s), None, (1, 1, 4, 4), 9
    )
    assert torch.equal(holes.panels[0].cells == 0, torch.eye(4).bool())
    assert holes.legend[0][1] == "not kept"
    root = of_score(lambda s, b, h, i, j: (i - j).sqrt(), None, (1, 1, 4, 4), 9)
    assert root.legend[0][1] == "not finite"
    with pytest.raises(ArgumentError, match="has no pair to draw"):
        of_score(score, None, (1, 2, 0, 6), 8)


def test_an_unknown_image_format_is_named(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ArgumentError, match=r"cannot draw to .*mask\.xyz"):
        random_mask(1, 1).save_picture(tmp_path / "mask.xyz")
