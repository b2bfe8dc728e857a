"""Malicious weight files and checkpoints are refused in a sentence, and no file outside is opened."""

import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kumi.convert import convert
from kumi.convert.files.safetensors_read import INDEX, SINGLE, read_header, spans_in_folder
from kumi.convert.open_model import open_source
from kumi.errors import ModelError, RefusedError
from kumi.storage import checkpoint

HERE = Path(__file__).parent


def rewrite(file: Path, edit) -> None:
    """Apply `edit` to the text of the header of `file`."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text = edit(raw[8 : 8 + length].decode()).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def entry(edit):
    """An edit of the header that changes the entry of `b`, the second of two tensors."""

    def change(text):
        header = json.loads(text)
        edit(header["b"])
        return json.dumps(header)

    return change


HEADERS = [
    (lambda text: text[:-20], "invalid JSON header"),
    (lambda text: f"[{text}]", "its header is not a JSON object"),
    (lambda text: "[" * 100_000, "invalid JSON header: it is nested too deeply"),
    (lambda text: text.replace('"b"', '"a"'), "the key 'a' is repeated"),
    (lambda text: text.replace('"dtype":"F32"', '"dtype":"F32","dtype":"F32"', 1), "the key 'dtype' is repeated"),
    (lambda text: text.replace("[3,2]", "[3,NaN]"), "NaN is not a JSON number"),
    (lambda text: text.replace("[3,2]", "[" + "9" * 5000 + "]"), "invalid JSON header"),
    (lambda text: text.replace('"pt"', "1"), "__metadata__ is not an object of strings"),
    (entry(lambda b: b.update(dtype="F99")), "'b' has the unknown dtype 'F99'"),
    (entry(lambda b: b.update(dtype=["F32"])), "has the unknown dtype"),
    (entry(lambda b: b.pop("shape")), "'b' must have exactly the keys dtype, shape and data_offsets"),
    (entry(lambda b: b.update(more=1)), "must have exactly the keys"),
    (entry(lambda b: b.update(shape=[-3, -2])), r"'b' has the invalid shape \[-3, -2\]"),
    (entry(lambda b: b.update(shape=[True, 6])), r"'b' has the invalid shape \[True, 6\]"),
    (entry(lambda b: b.update(shape=[2**40, 2**40])), "'b' has the invalid shape"),
    (entry(lambda b: b.update(shape=[0, 2**70])), "'b' has the invalid shape"),
    (entry(lambda b: b.update(shape=[3, 3])), r"'b' F32 \(3, 3\) takes 36 bytes, but its data_offsets are \[16, 40\]"),
    (entry(lambda b: b.update(dtype="F16")), r"'b' F16 \(3, 2\) takes 12 bytes"),
    (entry(lambda b: b.update(data_offsets=[0, 24])), "'b' overlaps the tensor before it|'a' overlaps"),
    (entry(lambda b: b.update(data_offsets=[20, 44])), "'b' leaves a gap before it"),
    (entry(lambda b: b.update(shape=[3, 1], data_offsets=[16, 28])), r"its tensors end at byte \d+, but the file has"),
    (entry(lambda b: b.update(shape=[2**50], data_offsets=[16, 16 + 4 * 2**50])), "its tensors end at byte"),
]


@pytest.mark.parametrize(("edit", "words"), HEADERS)
def test_headers_are_believed_only_when_they_describe_the_file(edit, words, tmp_path):
    file = tmp_path / SINGLE
    save_file({"a": torch.ones(4), "b": torch.ones(3, 2)}, file, metadata={"format": "pt"})
    assert [(span.name, span.shape) for span in read_header(file).values()] == [("a", (4,)), ("b", (3, 2))]
    rewrite(file, edit)
    with pytest.raises(ModelError, match=rf"not a readable safetensors file \(.*({words})"):
        read_header(file)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "the file has 0"),
        (b"\x02\0\0\0\0\0\0\0{", "length is 2 bytes, but the file has 9"),
        (b"\xff" * 8 + b"{}", "length is 18446744073709551615 bytes, but the file has 10"),
    ],
)
def test_header_lengths_that_cannot_be(raw, words, tmp_path):
    (tmp_path / SINGLE).write_bytes(raw)
    with pytest.raises(ModelError, match=words):
        spans_in_folder(tmp_path)


def test_a_header_of_gigabytes_is_not_read(tmp_path):
    with (tmp_path / SINGLE).open("wb") as file:  # sparse: it takes no room
        file.write((2**33).to_bytes(8, "little"))
        file.truncate(2**34)
    with pytest.raises(ModelError, match="at most 100000000 are allowed"):
        spans_in_folder(tmp_path)


@pytest.fixture
def sharded(tmp_path):
    """A folder of two files with an index, and beside it a file that it must not reach."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(4)}, folder / "one.safetensors")
    save_file({"b": torch.ones(3, 2)}, folder / "two.safetensors")
    save_file({"b": torch.zeros(3, 2)}, tmp_path / "secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert set(spans_in_folder(folder)) == {"a", "b"}
    return folder


INDEXES = [
    (lambda at: at.replace("two.safetensors", "../secret.safetensors"), "'../secret.* is not a plain file name"),
    (lambda at: at.replace("two.saf", "/secret.saf"), "'/secret.safetensors' is not a plain file name"),
    (lambda at: at.replace("two.saf", "x/../two.saf"), "is not a plain file name"),
    (lambda at: at.replace("two.saf", "..\\\\two.saf"), "is not a plain file name"),
    (lambda at: at.replace("two.saf", "two\\u0000.saf"), "is not a plain file name"),
    (lambda at: at.replace("two.saf", "\\ud800.saf"), "half a surrogate pair"),
    (lambda at: at.replace("two.saf", "x" * 300 + ".saf"), "is not a plain file name"),
    (lambda at: at.replace('"two.safetensors"', "7"), "'b' is in 7, which is not a safetensors file"),
    (lambda at: at.replace("two.safetensors", "two.bin"), "which is not a safetensors file"),
    (lambda at: at.replace("two.saf", "three.saf"), "three.safetensors, named by .*, is missing"),
    (lambda at: at.replace('"b"', '"a"'), "the key 'a' is repeated"),
    (lambda at: at.replace("two.saf", "one.saf"), "'b' is not in one.safetensors, although .* says"),
    (lambda at: at.replace(', "b": "two.safetensors"', ', "c": "two.safetensors"'), "two.safetensors holds 'b', which"),
    (lambda at: '{"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}}', "'a' is in one.*, but .* says two"),
    (lambda at: '{"weight_map": []}', "weight_map is empty or not an object"),
    (lambda at: "[1]", "holds a list, not an object"),
    (lambda at: "[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("edit", "words"), INDEXES)
def test_an_index_names_its_own_files_only(edit, words, sharded):
    index = sharded / INDEX
    index.write_text(edit(index.read_text()))
    with pytest.raises(ModelError, match=words):
        spans_in_folder(sharded)


def test_links_out_of_the_folder_are_not_followed(sharded, tmp_path):
    two = sharded / "two.safetensors"
    two.unlink()
    two.symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(ModelError, match=r"'two\.safetensors' is a link to .*secret\.safetensors, out of the folder"):
        spans_in_folder(sharded)
    two.unlink()
    (sharded / "real.safetensors").write_bytes((tmp_path / "secret.safetensors").read_bytes())
    two.symlink_to("real.safetensors")
    assert set(spans_in_folder(sharded)) == {"a", "b"}
    (tmp_path / "link").symlink_to(sharded)
    assert set(spans_in_folder(tmp_path / "link")) == {"a", "b"}


def test_pipes_are_not_waited_for(sharded):
    (sharded / "two.safetensors").unlink()
    os.mkfifo(sharded / "two.safetensors")
    with pytest.raises(ModelError, match="not a regular file"):
        spans_in_folder(sharded)


def test_the_links_of_a_hub_cache_are_followed(saved, tmp_path):
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(saved().iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    assert open_source(snapshot).spec.family == "llama"
    weights = snapshot / SINGLE
    weights.unlink()
    shutil.copy(repository / "blobs" / f"{number:064x}", repository / "other")
    weights.symlink_to("../../other")
    with pytest.raises(ModelError, match=r"is a link to .*other, out of the folder"):
        open_source(snapshot)


def test_both_a_single_file_and_an_index_are_one_too_many(sharded):
    shutil.copy(sharded / "one.safetensors", sharded / SINGLE)
    with pytest.raises(ModelError, match="holds both"):
        spans_in_folder(sharded)


def test_a_tokenizer_that_is_a_link_is_not_copied(saved, tmp_path):
    source = saved()
    (tmp_path / "secret").write_text("a password")
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match=r"'tokenizer\.json' is a link to .*secret, out of the folder"):
        convert(source, tmp_path / "new", to="hf", verify=False)
    assert not (tmp_path / "new").exists()


def seal(path: Path, content) -> None:
    """Write `content` with the checksum that belongs to it, as its maker would."""
    text = json.dumps(content, separators=(",", ":")).encode()[:-1]
    path.write_bytes(text + b',\n"crc32": "%08x"}\n' % zlib.crc32(text))


def piece(**changes):
    return lambda index: index["tensors"]["w"]["pieces"][0].update(changes)


CHECKPOINTS = [
    (lambda i: i["files"][0].update(name="../secret.safetensors"), "is not a plain file name"),
    (lambda i: i["files"][0].update(name="/etc/passwd"), "not a safetensors file"),
    (lambda i: i["files"].append(dict(i["files"][0])), "lists the file 'shard_00000.safetensors' twice"),
    (lambda i: i["files"][0].update(header=10**9), "1000000000 bytes for its header"),
    (lambda i: i["files"][0].update(size=-1), "-1 bytes"),
    (lambda i: i.pop("files"), "the files in the index are no list of objects"),
    (lambda i: i.update(tensors=[]), "lists no tensors"),
    (lambda i: i["tensors"]["w"].update(dtype="F99"), "'w' has an unknown dtype"),
    (lambda i: i["tensors"]["w"].update(shape=[2**50, 2**50]), "'w' has the shape"),
    (lambda i: i["tensors"]["w"].update(shape=[2**50]), "do not tile it"),
    (lambda i: i["tensors"]["w"].update(shape="10"), "'w' has the shape '10'"),
    (lambda i: i["tensors"]["w"].update(pieces=[]), "do not tile it"),
    (lambda i: i["tensors"]["w"]["pieces"].append(i["tensors"]["w"]["pieces"][0]), "is in 2 pieces"),
    (piece(file="../secret.safetensors"), "which the index does not list"),
    (piece(file=["x"]), "which the index does not list"),
    (piece(offset=0), "at offset 0 of shard_00000.safetensors, outside of the data"),
    (piece(offset=-8), "outside of the data of that file"),
    (piece(offset=2**62), "outside of the data of that file"),
    (piece(offset=1.5), r"at offset 1\.5 of"),
    (piece(extent=[11]), "beyond the tensor's end"),
    (piece(start=[-1]), r"has a piece with start=\[-1\]"),
    (piece(crc32=[]), "has a piece with 0 checksums instead of 1"),
    (piece(crc32=["x"]), r"has a piece with crc32=\['x'\]"),
    (lambda i: i["tensors"].update(v=json.loads(json.dumps(i["tensors"]["w"]))), "two pieces overlap"),
    (lambda i: i.update(format=[1]), r"reads checkpoint format 1, not \[1\]"),
]


@pytest.mark.parametrize(("edit", "words"), CHECKPOINTS)
def test_an_index_of_a_checkpoint_with_the_right_checksum_is_not_believed_either(edit, words, tmp_path):
    folder = tmp_path / "step_000001"
    checkpoint.save(folder, [checkpoint.Piece("w", (10,), (0,), torch.ones(10))], {})
    save_file({"w": torch.zeros(10)}, tmp_path / "secret.safetensors")
    index = json.loads((folder / "index.json").read_text())
    del index["crc32"]
    seal(folder / "index.json", index)
    assert checkpoint.open(folder).read("w").equal(torch.ones(10))
    edit(index)
    seal(folder / "index.json", index)
    with pytest.raises(RefusedError, match=words):
        checkpoint.open(folder)


def test_a_shard_that_is_a_link_is_not_followed(tmp_path):
    folder = tmp_path / "step_000001"
    checkpoint.save(folder, [checkpoint.Piece("w", (10,), (0,), torch.ones(10))], {})
    shutil.move(folder / "shard_00000.safetensors", tmp_path / "elsewhere")
    (folder / "shard_00000.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match=r"is a link to .*elsewhere, out of the folder"):
        checkpoint.open(folder)


def test_mutations_crash_nothing_and_reach_nothing(saved, tmp_path):
    """Thousands of damaged folders are opened and read in a process that notes every file it opens."""
    convert(saved("qwen3"), tmp_path / "native", to="kumi", verify=False, layout="tp=2")
    source = saved(max_shard_size="40KB")
    values = load_file(sorted(source.glob("*.safetensors"))[0])
    save_file(values, tmp_path / "secret.safetensors")
    process = subprocess.run(
        [sys.executable, str(HERE / "mutate.py"), str(source), str(tmp_path / "native"), "1500"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.returncode == 0, process.stderr[-3000:]
    report = json.loads(process.stdout.splitlines()[-1])
    assert report["outside"] == []
    assert report["other errors"] == []
    assert report["refused"] > 1000
    assert report["accepted"] > 5
