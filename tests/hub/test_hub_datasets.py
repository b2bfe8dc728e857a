"""Datasets by hub id, over HTTP: the files of one split, from the cache without network, and errors."""

import pytest

from kumi.data.sources import expand, hub_commits
from kumi.errors import ConfigError
from kumi.hub.datasets import fetch_dataset, is_dataset, select_files
from kumi.spec.data_source import Source

FILES = {
    "README.md": b"# chats",
    "dataset_infos.json": b"{}",
    "data/train-00000-of-00002.parquet": b"1",
    "data/train-00001-of-00002.parquet": b"2",
    "data/test-00000-of-00001.parquet": b"3",
    "data/train.jsonl": b"{}",
    "code/load.py": b"import os",
}
TRAIN = ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]


def names(path, **options):
    return [file.name for file in expand(Source(path, **options))]


def test_the_train_split_is_fetched_and_read_from_the_cache_without_network(hub, monkeypatch):
    from huggingface_hub import constants

    hub.add("someone/chats", FILES)
    assert names("someone/chats") == TRAIN
    assert sorted(hub.fetched()) == TRAIN
    assert names("hf://datasets/someone/chats/data/test*") == ["test-00000-of-00001.parquet"]
    assert names("hf://datasets/someone/chats@main/data") == [
        *names("hf://datasets/someone/chats/data/test*"),
        *TRAIN,
        "train.jsonl",
    ]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fetch_dataset.cache_clear()
    assert names("someone/chats") == TRAIN
    (file,) = (file for file in expand(Source("someone/chats")) if file.name == TRAIN[0])
    file.unlink()
    fetch_dataset.cache_clear()
    with pytest.raises(ConfigError, match=r"has 1 of 2 files of data/train"):
        names("someone/chats")
    with pytest.raises(
        ConfigError, match=r"'someone/other' is not a local file, .* the hub failed .*; name a file or folder"
    ):
        names("someone/other")


def test_a_recorded_commit_is_read_after_the_dataset_moved(hub):
    first = hub.add("someone/chats", FILES)
    second = hub.add("someone/chats", FILES | {"data/train-00000-of-00002.parquet": b"new"})
    texts = {}
    for commits in ({}, {"someone/chats": first}):
        source = Source("someone/chats", validation="hf://datasets/someone/chats/data/test*", commits=commits)
        texts[hub_commits(source)["someone/chats"]] = [file.read_bytes() for file in expand(source)]
    assert texts == {second: [b"new", b"2"], first: [b"1", b"2"]}
    assert hub_commits(source) == {"someone/chats": first, source.validation: second}
    assert hub_commits(Source("/nowhere")) == {}


def test_a_dataset_that_the_hub_lacks_is_named(hub):
    with pytest.raises(ConfigError, match="there is no such repository"):
        names("someone/none")
    hub.add("someone/chats", FILES)
    with pytest.raises(ConfigError, match="it has no revision 'v9'"):
        names("someone/chats@v9")
    with pytest.raises(ConfigError, match="no data file of the dataset matches 'x/"):
        names("hf://datasets/someone/chats/x/*")
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        names("hf://datasets/someone")
    with pytest.raises(ConfigError, match="removes all 2 files"):
        names("someone/chats", exclude=("**/*.parquet",))


@pytest.mark.parametrize(
    ("files", "selected"),
    [
        (["b.json", "dataset_info.json"], ["b.json"]),
        (["a.jsonl.gz", "b.csv"], ["a.jsonl.gz"]),
        (
            ["default/train/0000.parquet", "default/train/0001.parquet", "default/test/0000.parquet"],
            ["default/train/0000.parquet", "default/train/0001.parquet"],
        ),
        (["data/train_sft-00000-of-00001.parquet", "data/test_sft-00000-of-00001.parquet"], "data/test_sft"),
        (["en/train.jsonl", "fr/train.jsonl"], "en/train"),
        (["a.csv"], "no file that kumi reads"),
    ],
)
def test_one_split_is_selected_never_a_guess(files, selected):
    if isinstance(selected, list):
        assert select_files("a/b", files, "") == selected
        return
    with pytest.raises(ConfigError, match=selected):
        select_files("a/b", files, "")


def test_a_path_that_looks_like_a_file_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for path in ("data/chats", "other/chats.jsonl", "other/x.py", "/a/b", "a/b/c", "a/*", "chats"):
        assert not is_dataset(path)
    assert is_dataset("other/chats")
    assert is_dataset("other/chats@v1.0")
