"""Hugging Face folders are read strictly, and written completely or not at all."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kumi.convert import load_decoder, weights_reader
from kumi.convert.hf import read_folder, write_folder
from kumi.convert.hf.card import model_card
from kumi.errors import ModelError, RefusedError
from kumi.spec import families
from weights import read_tensors


def change(folder: Path, edit) -> None:
    """Apply `edit` to the dictionary of tensors in `folder`."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


WRONG = [
    (lambda t: t.pop("model.norm.weight"), r"'model\.norm\.weight' is missing from the weights; fetch the model again"),
    (lambda t: t.pop("lm_head.weight"), r"'lm_head\.weight' is missing .* set tie_word_embeddings to true"),
    (lambda t: t.update(extra=torch.zeros(2)), r"'extra' \(2,\) is not a tensor of the llama model"),
    (
        lambda t: t.update({"model.norm.weight": torch.zeros(31)}),
        r"'model\.norm\.weight' is \(31,\) in .*, but \(32,\) in",
    ),
    (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}), r"has dtype I8, and kumi reads F64"),
    (
        lambda t: t.update({"norm.weight": t.pop("model.norm.weight")}),
        r"the folder has 'norm\.weight' instead: save the causal",
    ),
]


@pytest.mark.parametrize(("edit", "words"), WRONG)
def test_tensors_that_do_not_fit_are_named(saved, edit, words):
    folder = saved()
    change(folder, edit)
    with pytest.raises(ModelError, match=words):
        load_decoder(folder)


def test_known_extras_are_accepted(saved):
    folder = saved("llama-tied")
    expected = load_decoder(folder).state_dict()
    change(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert all(torch.equal(value, expected[name]) for name, value in load_decoder(folder).state_dict().items())
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ModelError, match=r"'lm_head\.weight' differs from .* set tie_word_embeddings to false"):
        load_decoder(folder)


def test_files_that_are_not_there_or_not_readable(saved, tmp_path):
    folder = saved()
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a readable safetensors file"):
        load_decoder(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickled \(\.bin\).*save_pretrained"):
        load_decoder(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_decoder(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors, named by .*, is missing"):
        load_decoder(folder)
    index.write_text("{}")
    with pytest.raises(ModelError, match="weight_map is empty"):
        load_decoder(folder)


def test_parts_of_tensors(saved):
    folder = saved(max_shard_size="20KB")
    spec = families.from_hf(families.read_config(folder))
    read, whole = weights_reader(folder, spec), load_decoder(folder).state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(read(f"model/{name}", (5, 0), (7, 32)), whole[name][5:12])
    assert torch.equal(read("model/model.norm.weight", (3,), (4,)), whole["model.norm.weight"][3:7])
    assert torch.equal(read(f"model/{name}", (0, 0), (48, 32)), whole[name])


@pytest.mark.parametrize("case", ["mixtral", "deepseek-v3"])
def test_parts_of_experts_are_read_from_their_own_tensors_only(case, saved, monkeypatch):
    folder = saved(case, max_shard_size="20KB")
    spec, whole = families.from_hf(families.read_config(folder)), load_decoder(folder).state_dict()
    read, asked = weights_reader(folder, spec), []
    part = read_folder.read_part
    monkeypatch.setattr(read_folder, "read_part", lambda entry, *rest: asked.append(entry.name) or part(entry, *rest))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    experts, rows, columns = whole[name].shape
    assert torch.equal(read(f"model/{name}", (1, 0, 0), (2, rows, columns)), whole[name][1:3])
    assert sorted({int(one.split(".")[5]) for one in asked}) == [1, 2]
    asked.clear()
    # Columns of gate and up projection of the last experts.
    half = rows // 2
    values = read(f"model/{name}", (experts - 1, half - 3, 5), (1, 7, 11))
    assert torch.equal(values, whole[name][-1:, half - 3 : half + 4, 5:16])
    assert len(asked) == 2
    assert read(f"model/{name}", (0, 0, 0), (0, rows, columns)).shape == (0, rows, columns)


def test_experts_may_be_stored_as_one_tensor(saved):
    folder = saved("olmoe")
    expected = load_decoder(folder).state_dict()

    def fuse(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
        tensors.update({name: value for name, value in expected.items() if ".experts." in name})

    change(folder, fuse)
    assert all(torch.equal(value, expected[name]) for name, value in load_decoder(folder).state_dict().items())


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"), r"experts\.3\.up_proj\.weight' is missing"),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.4.up_proj.weight": torch.zeros(48, 32)}),
            r"experts\.4\.up_proj\.weight' \(48, 32\) is not a tensor of the olmoe model",
        ),
        (
            lambda t: t.update(
                {"model.layers.0.mlp.experts.1.down_proj.weight": torch.zeros(32, 48, dtype=torch.float16)}
            ),
            r"experts\.1\.down_proj\.weight' is float16, but .*experts\.0\.down_proj\.weight' is float32, and both",
        ),
    ],
)
def test_experts_that_do_not_fit_are_named(edit, words, saved):
    folder = saved("olmoe")
    change(folder, edit)
    with pytest.raises(ModelError, match=words):
        load_decoder(folder)


def write(folder: Path, source: Path, **changes):
    spec = families.from_hf(families.read_config(source))
    tensors = changes.pop("tensors", read_tensors(source))
    options = {
        "base_config": families.read_config(source),
        "dtype": "float32",
        "tokenizer_folder": None,
        "card": "# x\n",
    }
    write_folder.write_hf_folder(folder, spec, tensors, **options | changes)


def test_shards_and_their_index(saved, tmp_path):
    source = saved()
    # In reverse: the order in which tensors come does not matter.
    backwards = reversed(list(read_tensors(source)))
    write(tmp_path / "new", source, tensors=backwards, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "new/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "new").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3
    assert all((tmp_path / "new" / file).stat().st_size < 22_000 for file in files)
    assert index["metadata"]["total_size"] == 4 * 21_728
    expected = dict(read_tensors(source))
    tensors = {}
    for file in files:
        part = load_file(tmp_path / "new" / file)
        assert all(index["weight_map"][name] == file for name in part)
        tensors |= part
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(value, tensors[name]) for name, value in expected.items())


def test_everything_else_in_the_folder(saved, tmp_path):
    source, tokenizer = saved(), tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "notes.txt"):
        (tokenizer / name).write_text(f"text of {name}")
    write(tmp_path / "new", source, dtype="bfloat16", tokenizer_folder=tokenizer)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "new/tokenizer.json").read_text() == "text of tokenizer.json"
    config, base = families.read_config(tmp_path / "new"), families.read_config(source)
    assert config == base | {"dtype": "bfloat16"}
    assert json.loads((tmp_path / "new/generation_config.json").read_text())["eos_token_id"] == 2
    tensors = load_file(tmp_path / "new/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_without_a_base_config_one_is_made(saved, tmp_path):
    source = saved("qwen2-window")
    write(tmp_path / "new", source, base_config=None)
    assert families.from_hf(families.read_config(tmp_path / "new")) == families.from_hf(families.read_config(source))
    assert families.read_config(tmp_path / "new")["torch_dtype"] == "float32"


def test_a_failed_write_leaves_nothing(saved, tmp_path):
    source = saved()
    tensors = list(read_tensors(source))
    for given, words in (
        (tensors[:-1], "were not given"),
        ([*tensors, tensors[0]], "was given twice"),
        ([*tensors, ("extra", torch.zeros(1))], "'extra' is not a parameter"),
        ([(name, tensor[:1]) for name, tensor in tensors], r"is \(1"),
    ):
        with pytest.raises(ModelError, match=words):
            write(tmp_path / "new", source, tensors=iter(given))
        assert not list(tmp_path.glob("*new*"))


def test_existing_folders(saved, tmp_path):
    source, target = saved(), tmp_path / "new"
    target.mkdir()
    write(target, source)
    with pytest.raises(RefusedError, match="exists and is not empty"):
        write(target, source)
    write(target, source, dtype="float16", replace=True)
    assert families.read_config(target)["dtype"] == "float16"


def test_too_little_disk_is_found_before_anything_is_written(saved, tmp_path, monkeypatch):
    source = saved()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(RefusedError, match=r"not enough disk for the model: it needs .* and 1000 B"):
        write(tmp_path / "new", source)
    assert not list(tmp_path.glob("*new*"))


def test_model_card(saved):
    spec = families.from_hf(families.read_config(saved()))
    card = model_card(
        name='a "name"',
        model=spec,
        facts={"steps": "3"},
        base_model="org/base",
        datasets=["a: b"],
        license="apache-2.0",
        tags=["pretraining"],
    )
    header, body = card.removeprefix("---\n").split("\n---\n")
    assert header.splitlines() == [
        'library_name: "transformers"',
        'pipeline_tag: "text-generation"',
        'base_model: "org/base"',
        'base_model_relation: "finetune"',
        'datasets: ["a: b"]',
        'license: "apache-2.0"',
        'tags: ["kumi", "pretraining"]',
    ]
    assert '# a "name"' in body
    assert "| parameters | 21,728 |" in body
    assert "| steps | 3 |" in body
