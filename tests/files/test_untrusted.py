"""Files that others made are read within bounds, or refused in a sentence."""

import os
from pathlib import Path

import pytest

from kumi.errors import ModelError
from kumi.files.untrusted import CONFIG, Bounds, brief, inside, parse_toml, read_object, read_toml, strict_json
from kumi.spec import families

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is repeated"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "Infinity is not a JSON number"),
        (b'{"a": 1e999}', "1e999 is beyond the range"),
        (b'{"a": ' + b"9" * 41 + b"}", "a number has 41 digits"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "nested too deeply: more than 64 levels"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" + b"1," * 200_000 + b"1]", "more than the limit of 200000 values"),
        (b'{"a": "\\ud800"}', "half a surrogate pair"),
        (b'{"a": "\xff"}', "can't decode"),
        (b"{} {}", "Extra data"),
        (b"", "Expecting value"),
    ],
)
def test_json_is_strict(raw, words):
    with pytest.raises(ValueError, match=words):
        strict_json(raw, CONFIG)


def test_strict_json_reads_what_is_valid():
    deep = b"[" * 63 + b"]" * 63
    raw = b'{"a": [1, -2.5e3, "\\ud83d\\ude00", null, true, 1000000000000000019884624838656], "b": ' + deep + b"}"
    assert strict_json(raw, CONFIG)["a"] == [1, -2500.0, "\U0001f600", None, True, 1000000000000000019884624838656]
    assert strict_json(b'{"a": [0.0, Infinity]}', CONFIG, infinity=True) == {"a": [0.0, float("inf")]}


def test_only_regular_files_of_their_folder_are_read(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.json").write_text('{"password": 1}')
    (folder / "real.json").write_text('{"a": 1}')
    (folder / "within.json").symlink_to("real.json")
    (folder / "out.json").symlink_to(tmp_path / "secret.json")
    (folder / "device.json").symlink_to("/dev/zero")
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "pipe.json")
    (folder / "large.json").write_bytes(b" " * (CONFIG.size + 1))
    assert read_object(folder, "within.json") == {"a": 1}
    for name, words in {
        "out.json": "link to .*secret.json, out of the folder",
        "pipe.json": "not a regular file",
        "device.json": "link to /dev/zero",
        "folder.json": "not a regular file",
        "large.json": f"it has {CONFIG.size + 1} bytes, more than",
        "none.json": "does not exist",
        "../secret.json": "not a plain file name",
    }.items():
        with pytest.raises(ModelError, match=words):
            read_object(folder, name)


def test_links_of_a_hub_cache_lead_to_blobs(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    blob = tmp_path / "models--a--b" / "blobs" / ("0" * 64)
    blob.parent.mkdir()
    blob.write_text("{}")
    (snapshot / "config.json").symlink_to(f"../../blobs/{blob.name}")
    assert inside(snapshot, "config.json") == blob


def test_run_files_may_be_links_and_are_bounded(tmp_path):
    (tmp_path / "run.toml").write_text("[a]\nb.c = [1.5, 2]\n")
    (tmp_path / "link.toml").symlink_to("run.toml")
    assert read_toml(tmp_path / "link.toml") == {"a": {"b": {"c": [1.5, 2]}}}
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(OSError, match="not a regular file"):
        read_toml(tmp_path / "pipe.toml")
    for raw, words in {
        b"a." * 100_000 + b"b = 1": "more than 32 parts",
        b"a = " + b"[" * 100_000: "too deeply|values",
        b"#" * (2**20 + 1): "more than the limit of 1048576",
        b"a = " + b"[" * 65 + b"]" * 65: "too deeply",
        b"a = 1\na = 2": "Cannot overwrite",
        b"'a' . \"b\" " + b". c" * 40 + b"= 1": "32 parts",
    }.items():
        (tmp_path / "run.toml").write_bytes(raw)
        with pytest.raises(ValueError, match=words):
            read_toml(tmp_path / "run.toml")
    parse_toml(b"a = [" + b"1.5, " * 2000 + b"1.5]\nb = '" + b"x" * 100_000 + b"'")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 2**62}, "vocab_size=4611686018427387904 is more than the limit of 16,777,216"),
        ({"hidden_size": 10**30}, "hidden_size=1000000000000000000000000000000 is more than the limit of 1,048,576"),
        ({"hidden_size": 1e30}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is more than the limit of 1,024"),
        ({"num_hidden_layers": 1024, "hidden_size": 2**20, "intermediate_size": 2**22}, "parameters, more than the"),
        ({"rope_theta": 1e308}, "rope_theta=1e.308 is more than"),
        ({"architectures": [["x"]]}, r"\['x'\] is not a valid model name"),
        ({"model_type": ["llama"]}, r"\['llama'\] is not a valid model name"),
        ({"architectures": None, "model_type": ["llama"]}, "is not a valid model name"),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\] of a llama model must be a table"),
        ({"rope_scaling": {"rope_type": ["x"]}}, "rope type"),
        ({"architectures": ["x" * 1000]}, "is not a valid model name"),
        ({"a" * 100_000: "b" * 100_000}, "is not a key"),
    ],
)
def test_a_configuration_is_bounded_before_a_model_is_built(change, words):
    assert families.from_hf(LLAMA).num_hidden_layers == 2
    with pytest.raises(ModelError, match=words) as refusal:
        families.from_hf(LLAMA | change)
    assert len(str(refusal.value)) < 1000


def test_many_equal_layers_cost_no_more_than_one():
    spec = families.from_hf(LLAMA | {"num_hidden_layers": 1024})
    assert len(set(map(id, spec.layers))) == 1


def test_brief_cuts_what_is_long():
    assert brief("a" * 1000) == "'" + "a" * 116 + "..."
    assert brief([1, 2]) == "[1, 2]"
    assert Bounds(1, 2).depth == 64


def test_duplicate_keys_are_refused_by_whoever_reads_a_configuration(tmp_path):
    Path(tmp_path / "config.json").write_text('{"model_type": "llama", "model_type": "qwen2"}')
    with pytest.raises(ModelError, match="the key 'model_type' is repeated"):
        families.read_config(tmp_path)
