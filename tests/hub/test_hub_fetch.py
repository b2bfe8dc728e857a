"""Models by hub id, over HTTP: fetched files, their commit, and errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kumi import hub as kumi_hub
from kumi.config import load_plan
from kumi.config.job_sections import ModelSection
from kumi.config.model_source import fetch_snapshot, model_folder, read_hf_config
from kumi.errors import ConfigError, ModelError
from small_llama import SMALL_LLAMA

CONFIG = SMALL_LLAMA | {
    "architectures": ["LlamaForCausalLM"],
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "merges.txt": b"#version",
    "README.md": b"---\nlicense: mit\n---\n",
    "chat_template.jinja": b"{{ 1 }}",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"a pickle",
    "modeling_evil.py": b"import os",
    "original/params.json": b"{}",
    "onnx/model.safetensors": b"",
}
SMALL = [
    "README.md",
    "chat_template.jinja",
    "config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "tokenizer.json",
]
WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_weights_come_only_when_asked_for_and_nothing_else_ever(hub):
    sha = hub.add("org/model", FILES)
    snapshot = kumi_hub.fetch("org/model", "model.source")
    assert sorted(hub.fetched()) == sorted(os.listdir(snapshot.folder)) == SMALL
    assert (snapshot.name, snapshot.revision, snapshot.commit, snapshot.folder.name) == ("org/model", None, sha, sha)
    kumi_hub.fetch_weights(snapshot)
    assert sorted(hub.fetched()) == sorted(os.listdir(snapshot.folder)) == sorted([*SMALL, *WEIGHTS])
    hub.asked.clear()
    kumi_hub.fetch_weights(snapshot)
    assert hub.asked == [], "what is there is not asked for"


def test_a_plan_needs_the_config_alone(hub):
    hub.add("org/model", FILES)
    assert read_hf_config(ModelSection(source="org/model"))["hidden_size"] == 32
    assert hub.fetched() == ["config.json"]


def test_revisions_are_branches_tags_or_commits(hub):
    old = hub.add("org/model", FILES)
    hub.repositories["org/model"].tags["v1"] = old
    new = hub.add("org/model", FILES | {"config.json": json.dumps(CONFIG | {"hidden_size": 64}).encode()})
    sizes = {}
    for asked in ("org/model", "org/model@v1", f"org/model@{old}", "org/model@main"):
        snapshot = kumi_hub.fetch(asked, "model.source")
        sizes[asked] = (snapshot.commit, json.loads((snapshot.folder / "config.json").read_text())["hidden_size"])
        assert read_hf_config(ModelSection(source=asked))["hidden_size"] == sizes[asked][1]
    assert sizes == {
        "org/model": (new, 64),
        "org/model@v1": (old, 32),
        f"org/model@{old}": (old, 32),
        "org/model@main": (new, 64),
    }
    with pytest.raises(
        ConfigError,
        match=r"'org/model@v2' is not a folder, and fetching it from the hub failed \(it has no "
        r"revision 'v2'\); name a folder with config\.json",
    ):
        model_folder("org/model@v2", "model.source")


def test_a_run_goes_on_from_the_commit_that_it_began_from(hub, tmp_path):
    old = hub.add("org/model", FILES)
    snapshot = fetch_snapshot("org/model", "model.source", tmp_path)
    kumi_hub.write_record(tmp_path, {"model.source": "org/model"}, {"model.source": snapshot})
    new = hub.add("org/model", FILES | {"tokenizer.json": b"{ }"})
    assert old != new
    assert fetch_snapshot("org/model", "model.source", tmp_path).commit == old
    assert fetch_snapshot("org/model@main", "model.source", tmp_path).commit == new, "another wish is another run's"
    assert fetch_snapshot("org/model", "data.tokenizer", tmp_path).commit == new
    (tmp_path / "sources.json").write_text("{")
    with pytest.raises(ConfigError, match=r"sources\.json: damaged"):
        fetch_snapshot("org/model", "model.source", tmp_path)


def test_a_folder_wins_over_an_id(hub, tmp_path, monkeypatch):
    hub.add("org/model", FILES)
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_folder("org/model", "model.source") == Path("org/model")
    assert hub.asked == []


def test_offline_the_cache_is_used_and_the_hub_left_alone(hub, monkeypatch):
    from huggingface_hub import constants

    sha = hub.add("org/model", FILES)
    kumi_hub.fetch("org/model", "model.source")
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = kumi_hub.fetch("org/model", "model.source")
    assert snapshot.commit == sha
    with pytest.raises(
        ConfigError, match=r"org/model: the weights could not be downloaded from the hub \(.*offline mode is"
    ):
        kumi_hub.fetch_weights(snapshot)
    with pytest.raises(
        ConfigError, match=r"'org/other' is not a folder, and fetching it from the hub failed \(.*offline"
    ):
        kumi_hub.fetch("org/other", "model.source")
    assert hub.asked == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"private": True}, "there is no such repository, or it is private and your token may not read it"),
        ({"gated": True}, "its owner asks you to accept terms first, on the page of org/model; then log in"),
        (None, "there is no such repository, or it is private"),
    ],
)
def test_why_the_hub_gives_nothing_is_said_in_a_sentence(hub, options, words):
    if options is not None:
        hub.add("org/model", FILES, **options)
    with pytest.raises(ConfigError) as refused:
        kumi_hub.fetch("org/model", "model.source")
    assert str(refused.value).startswith(
        f"model.source: 'org/model' is not a folder, and fetching it from the hub failed ({words}"
    )
    assert "\n" not in str(refused.value)


def test_pickled_weights_and_indices_that_point_elsewhere_are_refused(hub):
    hub.add("org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"a pickle"})
    with pytest.raises(
        ModelError, match=r"model\.safetensors is not in the repository .* does not fetch pickled weights"
    ):
        kumi_hub.fetch("org/pickled", "model.source", weights=True)
    assert hub.fetched() == ["config.json"]
    for number, (index, words) in enumerate(
        [
            ({"weight_map": {"a": "../../secret.safetensors"}}, "lists the weight file '../../secret.safetensors'"),
            ({"weight_map": {"a": "*.safetensors"}}, "lists the weight file '*.safetensors'"),
            ({"weight_map": {"a": 3}}, "lists the weight file 3"),
            ({"weight_map": {}}, "lists no files"),
            ([], "holds a list"),
        ]
    ):
        name = f"org/index-{number}"
        hub.add(name, FILES | {"model.safetensors.index.json": json.dumps(index).encode()})
        with pytest.raises(ModelError) as refused:
            kumi_hub.fetch(name, "model.source", weights=True)
        assert words in str(refused.value)


def test_a_plan_of_a_hub_id_in_a_process_of_its_own_imports_no_torch(hub, tmp_path):
    """In a user's environment, with HF_ENDPOINT and HF_HOME only."""
    sha = hub.add("org/model", FILES)
    run = tmp_path / "plan.toml"
    run.write_text(
        f'model = {{source = "org/model@{sha}"}}\nbatch = {{seq_len = 32, tokens_per_step = 256}}\n'
        'cluster = {source = "a100-sxm-80gb"}\n'
    )
    load_plan(run)
    program = (
        "import sys; from kumi.cli import main\n"
        f"assert main(['plan', {str(run)!r}, '--json']) == 0\n"
        "heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert hub.fetched() == ["config.json"]
