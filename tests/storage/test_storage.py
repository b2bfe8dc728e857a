"""Checkpoint storage: written tensors are read, in any slices; damaged or incomplete checkpoints are refused."""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from kumi.errors import RefusedError, SaveError
from kumi.storage import checkpoint
from kumi.storage.checkpoint import AsyncSaver, Piece
from kumi.storage.write import read_sealed, tiling_problem, write_sealed

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def whole(name, tensor):
    return Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def cut(name, tensor, box):
    """The piece of `tensor` in the box of (low, high), not contiguous where the box is narrow."""
    view = tensor[tuple(slice(low, high) for low, high in box)]
    return Piece(name, tuple(tensor.shape), tuple(low for low, _ in box), view)


def some_tensors():
    torch.manual_seed(0)
    tensors = {f"t.{dtype}": torch.randint(0, 2, (5, 3)).to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "one": torch.randn(7),
        "four": torch.randn(3, 2, 4, 5),
    }
    tensors["transposed"] = torch.randn(6, 4).t()
    return tensors


def two_rank_checkpoint(folder, *, tensor=None):
    """A checkpoint whose 'w' (10, 6) is written by two ranks as a row-cut and a column-cut rest."""
    w = torch.arange(60.0).reshape(10, 6) if tensor is None else tensor
    temporary = checkpoint.temporary_folder(folder)
    checkpoint.write_pieces(temporary, 0, [cut("w", w, [(0, 4), (0, 6)]), whole("step", torch.tensor(7))])
    checkpoint.write_pieces(temporary, 1, [cut("w", w, [(4, 10), (0, 2)]), cut("w", w, [(4, 10), (2, 6)])])
    checkpoint.commit(temporary, folder, {"step": 7, "loss": 0.1 + 0.2}, ranks=2)
    return w


def test_all_dtypes_and_shapes_come_back(tmp_path):
    tensors = some_tensors()
    checkpoint.save(
        tmp_path / "step_000001", [whole(name, tensor) for name, tensor in tensors.items()], {"tokens": 2**60}
    )
    stored = checkpoint.open(tmp_path / "step_000001")
    assert stored.meta == {"tokens": 2**60}
    assert set(stored.tensors) == set(tensors)
    stored.verify()
    for name, tensor in tensors.items():
        read = stored.read(name)
        assert read.dtype == tensor.dtype
        assert read.shape == tensor.shape
        assert torch.equal(read, tensor), name


def test_other_readers_read_the_shard(tmp_path):
    tensors = some_tensors()
    checkpoint.save(tmp_path / "step_000001", [whole(name, tensor) for name, tensor in tensors.items()], {})
    read = safetensors.torch.load_file(tmp_path / "step_000001" / "shard_00000.safetensors")
    assert set(read) == set(tensors)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("block_bytes", [1, 64, 4 * 2**20])
def test_any_slice_of_any_pieces(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr("kumi.storage.write.BLOCK_BYTES", block_bytes)
    w = two_rank_checkpoint(tmp_path / "step_000007")
    stored = checkpoint.open(tmp_path / "step_000007")
    rng = random.Random(1)
    for _ in range(200):
        low = [rng.randrange(size + 1) for size in w.shape]
        high = [rng.randrange(a, size + 1) for a, size in zip(low, w.shape)]
        expected = w[low[0] : high[0], low[1] : high[1]]
        assert torch.equal(stored.read("w", low, expected.shape), expected), (low, high)
    out = torch.zeros(6, 10, dtype=torch.bfloat16).t()  # strides and dtype of the destination are its own
    stored.read_into(out, "w", (0, 0))
    assert torch.equal(out, w.bfloat16())
    assert stored.read("step") == 7


def test_random_tilings_of_three_dims(tmp_path):
    rng = random.Random(2)
    tensor = torch.randn(9, 8, 7)

    def split(box):
        """Boxes that tile `box`, by cutting at random."""
        wide = [dim for dim, (low, high) in enumerate(box) if high - low > 1]
        if not wide or rng.random() < 0.3:
            return [box]
        dim = rng.choice(wide)
        middle = rng.randrange(box[dim][0] + 1, box[dim][1])
        halves = [(box[dim][0], middle), (middle, box[dim][1])]
        return [piece for half in halves for piece in split([*box[:dim], half, *box[dim + 1 :]])]

    for step in range(1, 6):
        boxes = split([(0, 9), (0, 8), (0, 7)])
        folder = tmp_path / f"step_{step:06d}"
        for rank in range(3):
            checkpoint.write_pieces(
                checkpoint.temporary_folder(folder), rank, [cut("x", tensor, box) for box in boxes[rank::3]]
            )
        checkpoint.commit(checkpoint.temporary_folder(folder), folder, {}, ranks=3)
        assert torch.equal(checkpoint.open(folder).read("x"), tensor)
        if len(boxes) > 1:
            as_start = [([low for low, _ in box], [high - low for low, high in box]) for box in boxes]
            assert "0 pieces" in tiling_problem(as_start[1:], tensor.shape)
            assert "2 pieces" in tiling_problem([*as_start, as_start[0]], tensor.shape)


def test_a_hole_an_overlap_and_a_disagreement_are_not_committed(tmp_path):
    w = torch.randn(4, 6)
    folder = tmp_path / "step_000001"
    temporary = checkpoint.temporary_folder(folder)
    checkpoint.write_pieces(temporary, 0, [cut("w", w, [(0, 2), (0, 6)])])
    for box, problem in [
        ([(2, 4), (0, 5)], r"index \(2, 5\) is in 0 pieces"),
        ([(1, 4), (0, 6)], r"index \(1, 0\) is in 2 pieces"),
    ]:
        checkpoint.write_pieces(temporary, 1, [cut("w", w, box)])
        with pytest.raises(SaveError, match=problem):
            checkpoint.commit(temporary, folder, {}, ranks=2)
    checkpoint.write_pieces(temporary, 1, [cut("w", w.double(), [(2, 4), (0, 6)])])
    with pytest.raises(SaveError, match=r"'w' is F32 \(4, 6\) on one rank, F64 \(4, 6\) on rank 1"):
        checkpoint.commit(temporary, folder, {}, ranks=2)
    assert checkpoint.latest(tmp_path) is None


def test_a_missing_rank_and_another_launch_are_not_committed(tmp_path):
    folder = tmp_path / "step_000001"
    temporary = checkpoint.temporary_folder(folder)
    w = torch.randn(4)
    checkpoint.write_pieces(temporary, 0, [cut("w", w, [(0, 2)])], attempt="new")
    checkpoint.write_pieces(temporary, 1, [cut("w", w, [(2, 4)])], attempt="dead")
    checkpoint.write_pieces(temporary, 2, [cut("w", w, [(2, 4)])], attempt="dead")
    with pytest.raises(SaveError, match="the part of rank 1 is missing"):
        checkpoint.commit(temporary, folder, {}, ranks=2, attempt="new")
    checkpoint.write_pieces(temporary, 1, [cut("w", w, [(2, 4)])], attempt="new")
    checkpoint.commit(temporary, folder, {}, ranks=2, attempt="new")
    assert sorted(path.name for path in folder.iterdir()) == [
        "index.json",
        "meta.json",
        "shard_00000.safetensors",
        "shard_00001.safetensors",
    ]
    with pytest.raises(SaveError, match="never overwritten"):
        checkpoint.save(folder, [], {})


def test_wrong_names_shapes_and_slices_are_refused(tmp_path):
    two_rank_checkpoint(tmp_path / "step_000007")
    stored = checkpoint.open(tmp_path / "step_000007")
    with pytest.raises(
        RefusedError, match=r"'stop' is not among the checkpoint's 2 tensors; the nearest name is 'step'"
    ):
        stored.read("stop")
    with pytest.raises(RefusedError, match=r"has no slice \(2, 6\) at \(9, 0\)"):
        stored.read("w", (9, 0), (2, 6))


def test_every_flipped_bit_is_found_and_its_file_named(tmp_path):
    two_rank_checkpoint(tmp_path / "step_000006")
    folder = tmp_path / "step_000007"
    two_rank_checkpoint(folder)
    rng = random.Random(3)
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        for _ in range(40):
            position, bit = rng.randrange(len(good)), rng.randrange(8)
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            path.write_bytes(bytes(bad))
            with pytest.raises(
                RefusedError, match=rf"{path.name}: the checkpoint is damaged: .*delete .* from step_000006"
            ):
                checkpoint.open(folder).verify()
        path.write_bytes(good)
    checkpoint.open(folder).verify()


def test_a_damaged_tensor_is_named_when_it_is_read_and_only_then(tmp_path):
    folder = tmp_path / "step_000007"
    two_rank_checkpoint(folder)
    path = folder / "shard_00001.safetensors"
    bad = bytearray(path.read_bytes())
    bad[-1] ^= 1
    path.write_bytes(bytes(bad))
    stored = checkpoint.open(folder)
    assert stored.read("w", (0, 0), (4, 6)).shape == (4, 6)
    with pytest.raises(RefusedError, match=r"shard_00001.safetensors: .* checksum of 'w' is .* to start anew"):
        stored.read("w")


def test_every_truncated_or_missing_file_is_found_and_named(tmp_path):
    folder = tmp_path / "step_000007"
    two_rank_checkpoint(folder)
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        for keep in (0, 1, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:keep])
            with pytest.raises(RefusedError, match=f"{path.name}: the checkpoint is damaged") as caught:
                checkpoint.open(folder)
            if path.suffix == ".safetensors":
                assert f"{keep} bytes on disk, {len(good)} were written" in str(caught.value)
        path.unlink()
        with pytest.raises(RefusedError, match=f"{path.name}: the checkpoint is damaged: the file is missing"):
            checkpoint.open(folder)
        path.write_bytes(good)
    with pytest.raises(RefusedError, match="no such checkpoint folder"):
        checkpoint.open(tmp_path / "step_000008")


def test_listing_rotation_and_leftovers(tmp_path):
    assert checkpoint.list_complete(tmp_path / "nowhere") == []
    for step in (5, 20, 999999, 1000000):
        checkpoint.save(checkpoint.step_folder(tmp_path, step), [whole("x", torch.ones(1))], {})
    for name in ("step_000030.tmp", "step_000031.deleted.tmp", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000040").write_text("a file is no checkpoint")
    assert [checkpoint.step_of(path) for path in checkpoint.list_complete(tmp_path)] == [5, 20, 999999, 1000000]
    assert checkpoint.latest(tmp_path).name == "step_1000000"
    assert checkpoint.rotate(tmp_path, 2, protect=["step_000005"]) == [tmp_path / "step_000020"]
    checkpoint.save(checkpoint.step_folder(tmp_path, 1000001), [whole("x", torch.ones(1))], {}, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step_000040", "step_1000001"]


def test_free_space_is_compared_before_anything_is_written(tmp_path):
    checkpoint.check_free_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(
        RefusedError, match=r"not enough disk for a checkpoint: it needs .* \(1152921504606846976 bytes\) and .* free"
    ):
        checkpoint.check_free_space(tmp_path / "not" / "yet", 2**60)
    assert not (tmp_path / "not").exists()


def test_host_memory_is_allocated_before_the_first_save(tmp_path, monkeypatch):
    """As on a GPU, whose first save would wait for it."""
    allocate, pinned = torch.empty, []

    def note_pinned(*args, pin_memory=False, **options):  # pinned memory needs a GPU
        if pin_memory:
            pinned.append(threading.current_thread().name)
        return allocate(*args, **options)

    monkeypatch.setattr(checkpoint, "is_gpu", lambda device: True)
    monkeypatch.setattr(torch, "empty", note_pinned)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    pieces = [Piece(name, (8,), (0,), torch.ones(8)) for name in "ab"]
    saver = AsyncSaver()
    saver.reserve(pieces)
    saver.save(tmp_path / "step_000001", pieces, {})
    saver.save(tmp_path / "step_000002", [*pieces, Piece("c", (8,), (0,), torch.ones(8))], {})
    saver.wait()
    assert pinned == ["kumi-reserve", "kumi-reserve", "MainThread"]
    assert torch.equal(checkpoint.open(tmp_path / "step_000001").read("b"), torch.ones(8))


def test_saving_in_the_background_keeps_what_was_there_at_the_call(tmp_path, monkeypatch):
    w, meta = torch.zeros(1000), {"rng": [1]}
    saver, save, changed = AsyncSaver(), checkpoint.save, threading.Event()

    def save_later(*args, **options):
        assert changed.wait(60)
        save(*args, **options)

    monkeypatch.setattr(checkpoint, "save", save_later)
    for step in range(1, 4):
        saver.wait()
        changed.clear()
        w.fill_(step)
        saver.save(
            checkpoint.step_folder(tmp_path, step), [whole("w", w), whole("t", torch.tensor(step))], meta, keep=2
        )
        w.fill_(-1)
        meta["rng"][0] += 1
        changed.set()
    saver.wait()
    assert not saver.busy
    assert [path.name for path in checkpoint.list_complete(tmp_path)] == ["step_000002", "step_000003"]
    stored = checkpoint.open(tmp_path / "step_000003")
    assert torch.equal(stored.read("w"), torch.full((1000,), 3.0))
    assert (stored.read("t"), stored.meta) == (3, {"rng": [3]})


def test_all_is_on_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    synced, sizes_then, sync, rename = {}, {}, os.fsync, Path.rename

    def watched_sync(handle):
        sync(handle)
        stat = os.fstat(handle)
        synced[stat.st_ino] = stat.st_size

    def watched_rename(path, target):
        if path.is_dir():
            sizes_then.update(synced)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    folder = tmp_path / "step_000001"
    checkpoint.save(folder, [whole("w", torch.arange(9.0))], {"step": 1})
    inside = {path.name: path.stat() for path in folder.iterdir()}
    assert {"index.json", "meta.json", "shard_00000.safetensors"} == set(inside)
    # Each file with all of its bytes, and the folder that names them; then the folder that names this one.
    assert [name for name, stat in inside.items() if sizes_then.get(stat.st_ino) != stat.st_size] == []
    assert folder.stat().st_ino in sizes_then
    assert tmp_path.stat().st_ino in synced


def test_ranks_in_the_background_need_no_collective(tmp_path):
    w = torch.randn(8, 4)
    savers = [AsyncSaver(rank=rank, ranks=4, attempt="a", timeout=20) for rank in range(4)]
    for step in (1, 2):
        for rank in (2, 0, 3, 1):
            piece = cut("w", w + step, [(2 * rank, 2 * rank + 2), (0, 4)])
            savers[rank].save(checkpoint.step_folder(tmp_path, step), [piece], {"step": step})
    for saver in savers:
        saver.wait()
    for step in (1, 2):
        assert torch.equal(checkpoint.open(checkpoint.step_folder(tmp_path, step)).read("w"), w + step)


def test_an_error_in_the_background_is_raised_at_the_next_call(tmp_path):
    (tmp_path / "file").write_text("in the way")
    saver = AsyncSaver()
    saver.save(tmp_path / "file" / "step_000001", [whole("w", torch.ones(2))], {})
    with pytest.raises(SaveError, match=r"rank 0 cannot write|cannot be written") as caught:
        saver.save(tmp_path / "step_000002", [whole("w", torch.ones(2))], {})
    assert caught.value.exit_code == 8
    saver.wait()
    with pytest.raises(TypeError):
        saver.save(tmp_path / "step_000003", [], {"not JSON": torch.ones(1)})


def test_rank_0_hears_of_another_ranks_failure(tmp_path, monkeypatch):
    def no_space(file, data):
        raise OSError(28, "No space left on device")

    folder = tmp_path / "step_000001"
    first = AsyncSaver(rank=0, ranks=2, timeout=60)
    first.save(folder, [cut("w", torch.ones(4), [(0, 2)])], {})
    while not (checkpoint.temporary_folder(folder) / "shard_00000.json").exists():
        time.sleep(0.01)
    monkeypatch.setattr("kumi.storage.write._write_tensor", no_space)
    second = AsyncSaver(rank=1, ranks=2)
    second.save(folder, [cut("w", torch.ones(4), [(2, 4)])], {})
    for saver in (second, first):
        with pytest.raises(
            SaveError, match=r"rank 1 cannot write its part of the checkpoint: .*No space left on device"
        ):
            saver.wait()
    assert checkpoint.latest(tmp_path) is None


def save_for_ever(root, ranks):
    """Save step after step until killed, waiting for every other one; 'x' is filled with the step."""
    last = checkpoint.latest(root)
    step = checkpoint.step_of(last) if last else 0
    savers = [AsyncSaver(rank=rank, ranks=ranks, attempt=str(os.getpid())) for rank in range(ranks)]
    while True:
        step += 1
        folder = checkpoint.step_folder(root, step)
        x = torch.full((512, 300), float(step))
        pieces = [
            [Piece("x", (512, 300), (512 // ranks * rank, 0), x[512 // ranks * rank : 512 // ranks * (rank + 1)])]
            for rank in range(ranks)
        ]
        for rank, saver in enumerate(savers):
            saver.save(folder, pieces[rank], {"step": step}, keep=2)
        if step % 2:
            for saver in savers:
                saver.wait()


def test_killed_at_any_instant_the_last_complete_checkpoint_is_whole(tmp_path):
    rng = random.Random(4)
    seen = 0
    for attempt in range(10):
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(tmp_path, ranks=1 + attempt % 2)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 20
        while (
            checkpoint.latest(tmp_path) is None or checkpoint.step_of(checkpoint.latest(tmp_path)) <= seen
        ) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        for folder in checkpoint.list_complete(tmp_path):
            stored = checkpoint.open(folder)
            stored.verify()
            assert stored.meta["step"] == checkpoint.step_of(folder)
            assert torch.equal(stored.read("x"), torch.full((512, 300), float(stored.meta["step"])))
        newest = checkpoint.step_of(checkpoint.latest(tmp_path))
        assert newest > seen
        seen = newest


def test_no_pickle_and_plain_json(tmp_path):
    two_rank_checkpoint(tmp_path / "step_000007")
    index = json.loads((tmp_path / "step_000007" / "index.json").read_text())
    assert index["format"] == 1
    assert index["tensors"]["w"]["pieces"][0]["file"] == "shard_00000.safetensors"
    assert json.loads((tmp_path / "step_000007" / "meta.json").read_text())["meta"] == {"step": 7, "loss": 0.1 + 0.2}
    assert all(thread.name != "kumi-save" for thread in threading.enumerate())


def test_leftovers_of_earlier_steps_go_and_that_of_a_later_one_is_taken_over(tmp_path):
    for step in (3, 9):
        leftover = checkpoint.temporary_folder(checkpoint.step_folder(tmp_path, step))
        leftover.mkdir()
        (leftover / "shard_00001.safetensors").write_bytes(b"half")
    piece = Piece("x", (2,), (0,), torch.ones(2))
    checkpoint.save(checkpoint.step_folder(tmp_path, 5), [piece], {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000005", "step_000009.tmp"]
    checkpoint.save(checkpoint.step_folder(tmp_path, 9), [piece], {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000005", "step_000009"]
    saved = checkpoint.open(tmp_path / "step_000009")
    assert torch.equal(saved.read("x"), torch.ones(2))
    assert not (tmp_path / "step_000009" / "shard_00001.safetensors").exists()


def test_an_index_of_millions_of_pieces_is_read_back(tmp_path):
    """Thousands of ranks cut thousands of tensors: no bound on values may refuse what kumi wrote itself."""
    write_sealed(tmp_path / "index.json", {"pieces": [0] * 8_000_001})
    assert len(read_sealed(tmp_path / "index.json")["pieces"]) == 8_000_001
