"""The mirror of a run folder: which checkpoints are on the store, through kills, failures and other machines."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from kumi.errors import CommunicationError, ConfigError, RefusedError
from kumi.files.output import open_append
from kumi.remote.remote_store import RemoteStore, open_store
from kumi.storage import checkpoint, remote_checkpoints
from kumi.storage.checkpoint import Piece, list_complete, rotate, step_folder, step_of
from kumi.storage.remote_checkpoints import complete_steps, download_checkpoint, remote_name
from kumi.storage.run_download import fetch_model, pull_run
from kumi.storage.run_mirror import DisplacedError, MirrorTask, RunMirror, claim, finish_with_retries

VALUES = torch.arange(1000, dtype=torch.float32)


@pytest.fixture
def url(tmp_path, cache):
    return f"file://{tmp_path}/store/run"


def save(out, step, value=None):
    """Save a checkpoint with two shards, as two ranks do."""
    data = VALUES + step if value is None else torch.full((1000,), float(value))
    root, attempt = out / "checkpoints", "launch"
    temporary = checkpoint.temporary_folder(step_folder(root, step))
    checkpoint.write_pieces(temporary, 1, [Piece("x", (1000,), (500,), data[500:])], attempt=attempt)
    checkpoint.save(
        step_folder(root, step), [Piece("x", (1000,), (0,), data[:500])], {"step": step}, ranks=2, attempt=attempt
    )


def new_run(out, *steps):
    out.mkdir(parents=True, exist_ok=True)
    for name in ("config.toml", "metrics.jsonl", "plan.json", ".lock", "config.part"):
        (out / name).write_text(name)
    for name in ("logs/rank_00000.log", "data/tokens/x", "hf.1/config.json", "hf.unverified/config.json"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    for step in steps:
        save(out, step)


def mirror_of(store, out, attempt="first", keep=2):
    previous = claim(store, attempt)
    task = MirrorTask(store.url, str(out), str(out.parent / "uploading"), "", attempt, previous, keep, 5.0)
    return RunMirror(task, store)


def write_best(out, step):
    (out / "checkpoints" / "best.json").write_text(json.dumps({"step": step}))


def check(folder, step):
    saved = checkpoint.open(folder)
    saved.verify()
    assert torch.equal(saved.read("x"), VALUES + step)


def test_the_newest_checkpoint_and_the_files_of_the_run_are_uploaded(url, tmp_path):
    out = tmp_path / "local" / "run"
    new_run(out, 1, 2, 3)
    with open_store(url) as store:
        mirror = mirror_of(store, out)
        assert mirror.left() > 4000
        assert mirror.update()
        assert not mirror.update(), "nothing is new"
        assert mirror.left() == 0
        assert complete_steps(store) == [3]
        others = [name for name in store.list_files() if not name.startswith("checkpoints/")]
        assert others == ["config.toml", "logs/rank_00000.log", "metrics.jsonl", "owner.json", "plan.json"]
        check(tmp_path / "store" / "run" / "checkpoints" / "step_000003", 3)
        assert not (out.parent / "uploading" / "step_000003").exists()


def test_old_checkpoints_are_removed_as_locally_and_the_best_one_stays(url, tmp_path):
    out = tmp_path / "local" / "run"
    new_run(out)
    with open_store(url) as store:
        mirror = mirror_of(store, out)
        for step in range(1, 7):
            save(out, step)
            if step == 2:
                write_best(out, 2)
            rotate(out / "checkpoints", 2, [step_folder(out / "checkpoints", 2)])
            mirror.update()
        assert [step_of(folder) for folder in list_complete(out / "checkpoints")] == [2, 5, 6]
        assert complete_steps(store) == [2, 5, 6]
        mirror.finish()
        assert remote_checkpoints.remote_best_step(store) == 2


def test_only_the_newest_and_the_best_are_uploaded_when_the_store_is_slow(url, tmp_path):
    out = tmp_path / "local" / "run"
    new_run(out, 1, 2, 3, 4)
    write_best(out, 2)
    with open_store(url) as store:
        mirror_of(store, out).update()
        assert complete_steps(store) == [2, 4]


def _failing_after(monkeypatch, count):
    """Let the store fail for good after `count` more changes; return the list of changes."""
    changes = []

    def limited(method):
        def change(self, *arguments):
            if len(changes) >= count:
                raise CommunicationError("the process was killed here")
            changes.append(arguments[0])
            return method(self, *arguments)

        return change

    monkeypatch.setattr(RemoteStore, "_write", limited(RemoteStore._write))
    monkeypatch.setattr(RemoteStore, "remove", limited(RemoteStore.remove))
    return changes


def test_no_half_written_checkpoint_is_ever_chosen(url, tmp_path, monkeypatch):
    """The mirror dies after each of its changes in turn. Each time, what another machine finds is complete."""
    out, elsewhere = tmp_path / "local" / "run", tmp_path / "elsewhere"
    new_run(out, 1, 2)
    with open_store(url) as store:
        mirror_of(store, out).update()
    save(out, 3)
    save(out, 4)
    for count in range(200):
        with monkeypatch.context() as patch, open_store(url) as store:
            shutil.rmtree(tmp_path / "before", ignore_errors=True)
            shutil.copytree(tmp_path / "store", tmp_path / "before")
            changes = _failing_after(patch, count)
            try:
                mirror_of(store, out, keep=1).update()
                ended = True
            except CommunicationError:
                ended = False
        with open_store(url) as store:
            steps = complete_steps(store)
            assert steps in ([2], [2, 4], [4]), f"after {changes}"
            shutil.rmtree(elsewhere, ignore_errors=True)
            pull_run(url, elsewhere, elsewhere / "run", ".lock")
            folders = list_complete(elsewhere / "run" / "checkpoints")
            assert [step_of(folder) for folder in folders] == steps[-1:]
            check(folders[-1], steps[-1])
        if ended:
            break
        shutil.rmtree(tmp_path / "store")
        shutil.copytree(tmp_path / "before", tmp_path / "store")
    assert ended
    assert count >= 8, "every change of the upload was the last one once"


def test_an_interrupted_upload_is_completed_by_the_next_start(url, tmp_path, monkeypatch):
    out = tmp_path / "local" / "run"
    new_run(out, 1)
    for count in (1, 3, 2, 3):
        with monkeypatch.context() as patch, open_store(url) as store:
            _failing_after(patch, count)
            with pytest.raises(CommunicationError):
                mirror_of(store, out).update()
    with open_store(url) as store:
        assert complete_steps(store) == []
        mirror_of(store, out).finish()
        assert complete_steps(store) == [1]
    check(tmp_path / "store" / "run" / "checkpoints" / "step_000001", 1)


def test_files_of_an_upload_by_another_layout_are_removed(url, tmp_path):
    out = tmp_path / "local" / "run"
    new_run(out, 1)
    with open_store(url) as store:
        for rank in (1, 2, 3):
            store.write(f"{remote_name(1)}/shard_{rank:05d}.safetensors", b"of four ranks")
        mirror_of(store, out).update()
        assert len(store.list_files(remote_name(1))) == 4
    check(tmp_path / "store" / "run" / "checkpoints" / "step_000001", 1)


def test_rotation_during_the_upload_changes_nothing(url, tmp_path, monkeypatch):
    out = tmp_path / "local" / "run"
    new_run(out, 1)
    written = []
    write = RemoteStore._write

    def slow(self, name, data):
        written.append(name)
        if name.endswith("shard_00000.safetensors"):
            shutil.rmtree(step_folder(out / "checkpoints", 1))
        write(self, name, data)

    monkeypatch.setattr(RemoteStore, "_write", slow)
    with open_store(url) as store:
        mirror_of(store, out).update()
        assert complete_steps(store) == [1]
    assert [name for name in written if name.startswith("checkpoints/")][-1].endswith("step_000001/index.json")


def test_a_checkpoint_that_rotation_removed_before_its_upload_is_not_said_to_be_there(url, tmp_path, monkeypatch):
    """The report after a failure, "the newest checkpoint is there", depends on the result."""
    out = tmp_path / "run"
    new_run(out, 1)
    link = os.link

    def too_late(*arguments, **options):
        shutil.rmtree(step_folder(out / "checkpoints", 1), ignore_errors=True)
        link(*arguments, **options)

    monkeypatch.setattr(os, "link", too_late)
    with open_store(url) as store:
        mirror = mirror_of(store, out)
        assert not mirror.update()
        assert complete_steps(store) == []


def test_a_store_that_fails_for_ever_does_not_fill_the_disk(url, tmp_path, monkeypatch):
    out = tmp_path / "local" / "run"
    new_run(out)
    monkeypatch.setattr(remote_checkpoints, "upload_file", lambda *_: (_ for _ in ()).throw(CommunicationError("cut")))
    most = 0
    with open_store(url) as store:
        mirror = mirror_of(store, out)
        for step in range(1, 12):
            save(out, step)
            most = max(most, _shards(out.parent))
            rotate(out / "checkpoints", 2)
            with pytest.raises(CommunicationError):
                mirror.update()
            most = max(most, _shards(out.parent))
    assert most // 2 <= 4, "keep 2, the new one, and the one whose upload is tried"


def _shards(folder):
    """The number of shards on the disk below `folder`; hard links to one file count once."""
    return len({path.stat().st_ino for path in folder.rglob("*.safetensors")})


def test_a_start_that_was_displaced_uploads_nothing_more(url, tmp_path):
    out = tmp_path / "local" / "run"
    new_run(out, 1)
    with open_store(url) as store:
        first = mirror_of(store, out)
        first.update()
        mirror_of(store, out, "second")
        save(out, 2)
        with pytest.raises(DisplacedError, match=r"another start of this run, on .* writes there now"):
            first.update()
        assert complete_steps(store) == [1]
        with pytest.raises(DisplacedError):
            finish_with_retries(first, patience=60.0)


def test_an_export_cannot_be_opened_before_it_is_complete(url, tmp_path, monkeypatch):
    out = tmp_path / "local" / "run"
    new_run(out, 1)
    files = {"config.json": "new", "model.safetensors": "new", "README.md": "new"}
    (out / "hf").mkdir()
    for name, text in files.items():
        (out / "hf" / name).write_text(text)
    with open_store(url) as store:
        for name in ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
            store.write(f"hf/{name}", b"old")
        states = []
        write = RemoteStore._write

        def watched(self, name, data):
            write(self, name, data)
            if name.startswith("hf/"):
                states.append(sorted(self.list_files("hf")))

        monkeypatch.setattr(RemoteStore, "_write", watched)
        mirror_of(store, out).finish()
        assert sorted(store.list_files("hf")) == sorted(f"hf/{name}" for name in files)
    assert [("hf/config.json" in state) for state in states] == [False, False, True]


def test_a_machine_that_is_behind_is_brought_to_the_newest_checkpoint_and_the_best(url, tmp_path):
    out, other = tmp_path / "local" / "run", tmp_path / "other"
    new_run(out, 1, 2, 3, 4)
    write_best(out, 2)
    with open_store(url) as store:
        mirror_of(store, out, keep=3).finish()
    lines = pull_run(url, other, other / "run", ".lock")
    assert [step_of(folder) for folder in list_complete(other / "run" / "checkpoints")] == [2, 4]
    check(step_folder(other / "run" / "checkpoints", 4), 4)
    assert (other / "run" / "metrics.jsonl").read_text() == "metrics.jsonl"
    assert json.loads((other / "run" / "checkpoints" / "best.json").read_text()) == {"step": 2}
    assert len(lines) == 3
    assert pull_run(url, other, other / "run", ".lock") == [], "nothing is newer"


def test_a_machine_that_is_ahead_keeps_its_own(url, tmp_path):
    out = tmp_path / "local" / "run"
    new_run(out, 1)
    with open_store(url) as store:
        mirror_of(store, out).finish()
    save(out, 2)
    (out / "metrics.jsonl").write_text("mine")
    assert pull_run(url, out.parent, out, ".lock") == []
    assert (out / "metrics.jsonl").read_text() == "mine"


def test_nothing_is_brought_while_a_process_trains(url, tmp_path):
    import fcntl

    out, other = tmp_path / "local" / "run", tmp_path / "other"
    new_run(out, 1)
    with open_store(url) as store:
        mirror_of(store, out).finish()
    (other / "run").mkdir(parents=True)
    with open_append(other / "run" / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert pull_run(url, other, other / "run", ".lock") == []
    assert pull_run(url, other, other / "run", ".lock") != []


def test_damage_on_the_store_is_named_and_damage_on_the_way_repaired(url, tmp_path, monkeypatch):
    out, other = tmp_path / "local" / "run", tmp_path / "other"
    new_run(out, 1)
    with open_store(url) as store:
        mirror_of(store, out).finish()
        read, flipped = RemoteStore.read, []

        def once(self, name, start, stop):
            data = read(self, name, start, stop)
            if name == "shard_00001.safetensors" and not flipped:
                flipped.append(name)
                data = data[:-1] + bytes([data[-1] ^ 1])
            return data

        with monkeypatch.context() as patch:
            patch.setattr(RemoteStore, "read", once)
            check(download_checkpoint(store, 1, other, tmp_path / "incoming"), 1)
        assert flipped
        shard = tmp_path / "store" / "run" / "checkpoints" / "step_000001" / "shard_00001.safetensors"
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        with pytest.raises(RefusedError, match=r"shard_00001.safetensors: the checkpoint is damaged on the store"):
            download_checkpoint(store, 1, tmp_path / "third", tmp_path / "incoming")
        assert not (tmp_path / "third").exists() or list_complete(tmp_path / "third") == []


def test_a_checkpoint_of_another_machine_is_not_overwritten(url, tmp_path):
    out, other = tmp_path / "local" / "run", tmp_path / "other" / "run"
    new_run(out, 1)
    new_run(other)
    save(other, 1, value=7.0)
    with open_store(url) as store:
        mirror_of(store, out).finish()
        mirror_of(store, other, "second").finish()
    check(tmp_path / "store" / "run" / "checkpoints" / "step_000001", 1)


def test_a_store_with_checkpoints_but_no_configuration_is_refused(url, tmp_path):
    out, other = tmp_path / "local" / "run", tmp_path / "other"
    new_run(out, 1)
    with open_store(url) as store:
        mirror_of(store, out).finish()
        store.remove(["config.toml"])
    with pytest.raises(ConfigError, match=r"has checkpoints but no config.toml; restore it, or name another URL"):
        pull_run(url, other, other / "run", ".lock")


def test_a_model_is_fetched_from_a_run_a_checkpoint_or_a_folder(url, tmp_path):
    out = tmp_path / "local" / "run"
    new_run(out, 1, 2)
    (out / "hf").mkdir()
    (out / "hf" / "config.json").write_text("{}")
    with open_store(url) as store:
        mirror_of(store, out).finish()
        store.write(f"{remote_name(3)}/shard_00000.safetensors", b"half")
    run = fetch_model(url, "the model")
    assert [step_of(folder) for folder in list_complete(run / "checkpoints")] == [2]
    folder = fetch_model(f"{url}/checkpoints/step_000002", "the model")
    check(folder, 2)
    assert (folder.parent.parent / "config.toml").is_file()
    assert (fetch_model(f"{url}/hf", "the model") / "config.json").read_text() == "{}"
    with pytest.raises(ConfigError, match=r"step_000003: has no complete checkpoint, because index.json is missing"):
        fetch_model(f"{url}/checkpoints/step_000003", "the model")


def test_the_next_start_on_the_machine_uploads_changed_files_only(url, tmp_path, monkeypatch):
    out = tmp_path / "local" / "run"
    new_run(out, 1)
    with open_store(url) as store:
        mirror_of(store, out).finish()
    (out / "plan.json").write_text("another plan")
    written, write = [], RemoteStore._write

    def watched(self, name, data):
        written.append(name)
        write(self, name, data)

    monkeypatch.setattr(RemoteStore, "_write", watched)
    with open_store(url) as store:
        mirror_of(store, out, "second").finish()
        assert written == ["owner.json", "plan.json"]
        claim(store, "on another machine")
        written.clear()
        mirror_of(store, out, "third").finish()
        assert len(written) == 5, "what the other machine wrote is not known"


def test_links_in_a_run_folder_are_not_followed(url, tmp_path):
    out = tmp_path / "local" / "run"
    new_run(out, 1)
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", out / "notes.txt")
    os.symlink(tmp_path, out / "folder")
    os.symlink(tmp_path / "secret", out / "logs" / "link.log")
    with open_store(url) as store:
        mirror_of(store, out).finish()
        names = store.list_files()
    assert not [name for name in names if "notes" in name or "folder" in name or "link" in name]


def test_the_test_itself_writes_two_shards(tmp_path):
    new_run(tmp_path, 5)
    check(step_folder(tmp_path / "checkpoints", 5), 5)
    assert len(list(Path(step_folder(tmp_path / "checkpoints", 5)).glob("*.safetensors"))) == 2
