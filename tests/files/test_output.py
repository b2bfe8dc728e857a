"""No file is written or removed through a link inside a folder of kumi's own."""

import os

import pytest
import torch

from kumi.convert.hf.write_folder import check_target
from kumi.data import store_meta
from kumi.errors import KumiError, RefusedError
from kumi.files.output import copy_into, open_append, open_new, remove_tree
from kumi.storage import checkpoint
from kumi.train import run_folder
from kumi.train.metrics import truncate_metrics

PIECES = [checkpoint.Piece("w", (4,), (0,), torch.ones(4))]


@pytest.fixture
def victim(tmp_path):
    """A folder beside the output folder, which must stay as it is."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "thesis.txt").write_text("all of it")
    (folder / "shard_00000.safetensors").write_text("mine")
    yield folder
    assert sorted(path.name for path in folder.iterdir()) == ["shard_00000.safetensors", "thesis.txt"]
    assert [path.read_text() for path in sorted(folder.iterdir())] == ["mine", "all of it"]


@pytest.mark.parametrize("name", ["step_000006.tmp", "step_000004"])
def test_a_link_in_the_place_of_a_checkpoint_is_refused(name, tmp_path, victim):
    (tmp_path / name).symlink_to(victim)
    with pytest.raises(RefusedError, match="is a link to"):
        checkpoint.save(tmp_path / "step_000006", PIECES, {}, keep=1)


@pytest.mark.parametrize("name", ["step_000005.tmp", "step_000002.deleted.tmp"])
def test_of_a_leftover_that_is_a_link_the_link_goes(name, tmp_path, victim):
    root = tmp_path / "checkpoints"
    root.mkdir()
    checkpoint.save(root / "step_000002", PIECES, {})
    checkpoint.save(root / "step_000003", PIECES, {})
    (root / name).symlink_to(victim)
    checkpoint.save(root / "step_000006", PIECES, {}, keep=1)
    assert [path.name for path in root.iterdir()] == ["step_000006"]


def test_a_link_in_the_place_of_a_shard_is_replaced(tmp_path, victim):
    folder = tmp_path / "step_000006.tmp"
    folder.mkdir()
    for name in ("shard_00000.safetensors", "shard_00000.json.part", "index.json.part", "meta.json.part"):
        (folder / name).symlink_to(victim / "thesis.txt")
    checkpoint.save(tmp_path / "step_000006", PIECES, {})
    assert checkpoint.open(tmp_path / "step_000006").read("w").equal(torch.ones(4))


@pytest.mark.parametrize(
    "name", [".lock", "config.toml", "plan.json", "checkpoints", "metrics.jsonl", "logs", "hf", "probe.safetensors"]
)
def test_a_run_folder_with_links_is_refused(name, tmp_path, victim):
    out = tmp_path / "run"
    out.mkdir()
    (out / name).symlink_to(victim / "thesis.txt")
    with (
        pytest.raises(RefusedError, match=f"{name}: is a link to .*thesis.*let train.out be"),
        run_folder.claim_run_folder(out, None),
    ):
        pass
    with pytest.raises(RefusedError, match="link"):
        open_append(out / name)


def test_a_run_folder_may_be_a_link_itself(tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "large")
    with open_append(tmp_path / "run" / "metrics.jsonl") as file:
        file.write('{"step": 1}\n{"step": 2}\n')
    truncate_metrics(tmp_path / "run" / "metrics.jsonl", 1)
    assert (tmp_path / "large" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_new_files_take_the_place_of_links_and_kept_ones_are_regular(tmp_path, victim):
    (tmp_path / "a").symlink_to(victim / "thesis.txt")
    with open_new(tmp_path / "a") as file:
        file.write("new")
    assert not (tmp_path / "a").is_symlink()
    (tmp_path / "meta.json.partial").symlink_to(victim / "thesis.txt")
    store_meta.write_json(tmp_path / "meta.json", {})
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RefusedError, match="not a regular file"):
        open_append(tmp_path / "pipe")
    (tmp_path / "folder").symlink_to(victim)
    remove_tree(tmp_path / "folder")
    assert not os.path.lexists(tmp_path / "folder")


def test_a_target_that_is_a_link_is_refused(tmp_path, victim):
    (tmp_path / "new").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RefusedError, match="is a link to"):
        check_target(tmp_path / "new", replace=True)


def test_side_files_are_copied_from_their_folder_only(tmp_path, victim):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "chat_template.jinja").symlink_to(victim / "thesis.txt")
    os.mkfifo(source / "tokenizer.json")
    for name, words in {"chat_template.jinja": "out of the folder", "tokenizer.json": "not a regular file"}.items():
        with pytest.raises(KumiError, match=words):
            copy_into(target, source, name)
    (source / "vocab.json").write_text("{}")
    copy_into(target, source, "vocab.json")
    assert (target / "vocab.json").read_text() == "{}"
