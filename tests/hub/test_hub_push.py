"""Verified folders to the hub and models from it, over HTTP, by the command line as users use it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from fake_hub import TOKEN

from kumi import load_decoder
from kumi.cli import main
from kumi.convert import convert
from kumi.convert.hf import read_folder
from kumi.convert.hf.card import check_verified
from kumi.convert.hf.origin import origin_of
from kumi.convert.hf.publish import publish
from kumi.errors import CommunicationError, RefusedError
from kumi.hub.datasets import fetch_dataset
from tiny_models import build_reference

# Of the hub's client, about its own use of the library below it.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

CARD = """---
license: other
license_name: a-licence
license_link: https://example.org/licence
datasets: [org/text]
base_model: [org/ancestor]
---
# A model
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The files of a tiny model with a card, as a hub serves them, and the folder that they are in."""
    folder = tmp_path_factory.mktemp("model")
    build_reference("llama").save_pretrained(folder, max_shard_size="40KB")
    (folder / "README.md").write_text(CARD)
    return folder, {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def header(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_a_model_from_the_hub_and_back(hub, model, token, tmp_path, capsys):
    """Under another name, in one shard instead of two, verified, private, with a card that says where it is from."""
    folder, files = model
    sha = hub.add("org/model", files)
    assert main(["convert", "org/model", str(tmp_path / "out"), "--to", "hf", "--push", "me/mine"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{hub.url}/me/mine"
    mine = hub.repositories["me/mine"]
    pushed = mine.commits[mine.sha("main")]
    assert mine.private
    assert set(pushed) == {path.name for path in (tmp_path / "out").iterdir()}
    assert all(data == (tmp_path / "out" / name).read_bytes() for name, data in pushed.items())
    card = pushed["README.md"].decode()
    assert header(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/model",
        "tags": ["kumi"],
        "license": "other",
        "license_name": "a-licence",
        "license_link": "https://example.org/licence",
        "datasets": ["org/text"],
    }
    assert f"| base commit | {sha} |" in card
    assert "| converted from | org/model |" in card
    assert "| verified | against the source: " in card
    shutil.rmtree(tmp_path / "cache")
    ids = torch.arange(20)[None]
    assert main(["convert", "me/mine", str(tmp_path / "again"), "--to", "kumi"]) == 0
    convert(tmp_path / "again", tmp_path / "back", to="hf")
    assert torch.equal(load_decoder(tmp_path / "back")(ids), load_decoder(folder)(ids))


def test_weights_of_another_division_do_not_stay_in_the_repository(hub, model, token, tmp_path):
    """A single file beside an index would be read instead of the files that the index names."""
    folder, files = model
    convert(folder, tmp_path / "one", to="hf", verify=True)
    hub.add("me/mine", files | {"notes.md": b"mine", "adapter/model.safetensors": b"mine too"}, private=True)
    publish(tmp_path / "one", "me/mine")
    repository = hub.repositories["me/mine"]
    left = [name for name in repository.commits[repository.sha("main")] if "safetensors" in name or name == "notes.md"]
    assert sorted(left) == ["adapter/model.safetensors", "model.safetensors", "notes.md"]


def test_a_push_that_failed_goes_on_and_the_folder_stays(hub, model, token, tmp_path):
    folder, _ = model
    convert(folder, tmp_path / "out", to="hf", verify=True)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    hub.broken = True
    words = (
        r"the upload of .* to the hub failed .*out of storage.*; the folder is complete, "
        r"push it later with `kumi push .*out me/mine`"
    )
    with pytest.raises(CommunicationError, match=words):
        publish(tmp_path / "out", "me/mine")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    hub.broken = False
    assert main(["push", str(tmp_path / "out"), "me/mine"]) == 0
    sent = [path for method, path in hub.asked if method == "PUT"]
    commits = len(hub.repositories["me/mine"].commits)
    assert main(["push", str(tmp_path / "out"), "me/mine"]) == 0
    assert [path for method, path in hub.asked if method == "PUT"] == sent, "nothing is sent twice"
    assert len(hub.repositories["me/mine"].commits) == commits


def test_only_what_was_verified_and_is_unchanged_is_pushed(hub, model, token, tmp_path):
    folder, _ = model
    convert(folder, tmp_path / "plain", to="hf", verify=False)
    with pytest.raises(RefusedError, match=r"README\.md has no record of a verification"):
        publish(tmp_path / "plain", "me/mine")
    convert(folder, tmp_path / "out", to="hf", verify=True)
    check_verified(tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    file.write_text(file.read_text().replace('"vocab_size"', '"vocab_size" '))
    with pytest.raises(RefusedError, match="its files have changed since they were verified"):
        publish(tmp_path / "out", "me/mine")
    with pytest.raises(RefusedError, match=r"holds neither a Hugging Face model"):
        publish(tmp_path, "me/mine")
    assert "me/mine" not in hub.repositories
    assert main(["push", str(tmp_path / "out"), "me/mine", "--unverified", "--public"]) == 0
    assert not hub.repositories["me/mine"].private


def test_what_a_push_needs_is_known_before_anything_is_done(hub, model, tmp_path, monkeypatch, capsys):
    words = ["convert", str(model[0]), str(tmp_path / "out"), "--to", "hf", "--push"]
    assert main([*words, "me/mine"]) == 2
    assert "--push me/mine: a push needs a hub token; run `hf auth login`, or set HF_TOKEN" in capsys.readouterr().err
    assert main([*words, "mine"]) == 2
    assert "'mine' is not a repository name; write it as organisation/name" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(["convert", str(model[0]), str(tmp_path / "out"), "--to", "kumi", "--push", "me/mine"]) == 2
    assert "--push needs a Hugging Face folder, not --to kumi" in capsys.readouterr().err
    assert main(["convert", str(model[0]), str(tmp_path / "out"), "--to", "hf", "--public"]) == 2
    assert "have no effect without --push" in capsys.readouterr().err
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main([*words, "me/mine"]) == 2
    assert "HF_HUB_OFFLINE forbids a push" in capsys.readouterr().err
    assert hub.asked == []
    assert not (tmp_path / "out").exists()


def test_a_public_repository_and_a_wrong_token_are_refused(hub, model, token, tmp_path, monkeypatch):
    convert(model[0], tmp_path / "out", to="hf", verify=True)
    hub.add("me/open", {"README.md": b""})
    with pytest.raises(RefusedError, match="the repository exists and is public; confirm with --public"):
        publish(tmp_path / "out", "me/open")
    publish(tmp_path / "out", "me/open", public=True)
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    with pytest.raises(CommunicationError, match=r"the upload of .* to the hub failed") as refused:
        publish(tmp_path / "out", "me/other")
    assert "hf_another" not in str(refused.value)
    assert "me/other" not in hub.repositories


def test_where_a_model_is_from_is_read_off_its_card(tmp_path, saved_card):
    assert origin_of(saved_card("no header")).base_model is None
    origin = origin_of(saved_card(CARD))
    assert (origin.base_model, origin.relation, origin.published) == ("org/ancestor", "finetune", None)
    assert origin_of(saved_card("---\nbase_model: /home/me/model\nlicense: [a]\n---\n")).license == {}
    assert origin_of(saved_card("---\nbase_model: /home/me/model\n---\n")).base_model is None
    assert origin_of(saved_card("---\nbase_model: {unclosed\n---\n")).base_model is None


@pytest.fixture
def saved_card(tmp_path):
    def save(text):
        (tmp_path / "README.md").write_text(text)
        return tmp_path

    return save


def test_a_run_trains_a_hub_s_model_and_pushes_it(hub, model, token, tmp_path, monkeypatch, capsys):
    """The commit is in the run's folder, its checkpoints and its card; the run goes on from it when the hub moved.

    So is that of its data, but for the checkpoints.
    """
    _, files = model
    texts = "".join(json.dumps({"text": f"{n} is {n * n}. " * 9}) + "\n" for n in range(60)).encode()
    data = hub.add("org/sums", {"train.jsonl": texts})
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run.toml"
    run.write_text(
        'name = "small"\nmodel = {source = "org/model"}\ncluster = {devices_per_node = 1}\n'
        "batch = {seq_len = 16, tokens_per_step = 32}\nprecision = {kind = 'fp32'}\n"
        'data = {sources = [{path = "org/sums"}], tokenizer = "org/tokens", validation = 0.1, workers = 1}\n'
        'train = {steps = 2, out = "run"}\nexport = {push = "me/mine", datasets = ["org/sums"]}\n'
    )
    sha = hub.add("org/model", files)
    hub.add("org/tokens", tokenizer_files(tmp_path / "tokens", json.loads(files["config.json"])["vocab_size"]))
    assert main(["train", str(run)]) == 0
    recorded = json.loads(Path("run/sources.json").read_text())
    assert {key: entry["commit"] for key, entry in recorded.items() if key != "data.tokenizer"} == {
        "model.source": sha,
        "data.sources.0.path": data,
    }
    mine = hub.repositories["me/mine"]
    card = header(mine.commits[mine.sha("main")]["README.md"].decode())
    assert (card["base_model"], card["base_model_relation"], card["datasets"], card["license"]) == (
        "org/model",
        "finetune",
        ["org/sums"],
        "other",
    )
    checkpoint = next(Path("run/checkpoints").glob("step_*"))
    assert origin_of(checkpoint).commit == sha
    hub.add("org/model", {"config.json": b"{}"})
    hub.add("org/sums", {"train.jsonl": texts + texts})
    fetch_dataset.cache_clear()
    commits = len(mine.commits)
    assert main(["train", str(run)]) == 0
    assert len(mine.commits) == commits, "nothing new to push"
    assert json.loads(Path("run/sources.json").read_text()) == recorded
    capsys.readouterr()
    assert main(["data", "inspect", str(run)]) == 0
    assert f"org/sums: commit {data}" in " ".join(capsys.readouterr().out.split())
    convert(checkpoint, tmp_path / "new", to="hf")
    assert header((tmp_path / "new" / "README.md").read_text())["base_model_relation"] == "finetune"
    assert read_folder.file_entries(tmp_path / "new")


def test_adapters_of_a_hub_s_model_name_it_and_its_commit(hub, model, token, tmp_path, monkeypatch):
    _, files = model
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"{n} is {n}. " * 9}) + "\n" for n in range(60)))
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run.toml"
    run.write_text(
        'name = "small"\nmodel = {source = "org/model@v1"}\ncluster = {devices_per_node = 1}\nlora = {r = 2}\n'
        "batch = {seq_len = 16, tokens_per_step = 32}\nprecision = {kind = 'fp32'}\n"
        'data = {sources = [{path = "text.jsonl"}], tokenizer = "tokens", validation = 0.1, workers = 1}\n'
        'train = {steps = 2, out = "run"}\nexport = {push = "me/adapters"}\n'
    )
    sha = hub.add("org/model", files)
    hub.repositories["org/model"].tags["v1"] = sha
    tokenizer_files(tmp_path / "tokens", json.loads(files["config.json"])["vocab_size"])
    assert main(["train", str(run)]) == 0
    mine = hub.repositories["me/adapters"]
    pushed = mine.commits[mine.sha("main")]
    config = json.loads(pushed["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/model", sha)
    card = header(pushed["README.md"].decode())
    assert (card["base_model"], card["base_model_relation"]) == ("org/model", "adapter")
    hub.add("org/model", {"config.json": b"{}"})
    assert main(["convert", "run/adapter", "merged", "--to", "hf"]) == 0, "with the base at its commit"


def tokenizer_files(folder, vocab_size):
    """A byte-level tokenizer of `vocab_size` entries, as files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: number for number, word in enumerate(["<end>", *alphabet][:vocab_size])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<end>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return {path.name: path.read_bytes() for path in folder.iterdir()}
