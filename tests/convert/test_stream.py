"""Streaming: pieces of any layout, dtypes, blocks of any size, and failures."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kumi.cli import main
from kumi.convert import convert, kumi_checkpoint
from kumi.convert.files import byte_runs, stored_tensor, stream
from kumi.convert.hf import read_folder, write_folder
from kumi.convert.open_model import open_source
from kumi.errors import ConfigError, LayoutError, ModelError
from kumi.spec.layout import Layout
from kumi.spec.ledger import tensors as tensors_of
from kumi.spec.shard_slices import slices
from kumi.spec.sharding import rank_params
from kumi.storage import checkpoint
from tiny_models import CASES


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def same(first, other):
    return first.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in first.items()
    )


LAYOUTS = [
    ("llama", "tp=2,pp=2"),
    ("qwen3", "tp=4,dp_shard=3,zero=3"),
    ("mixtral", "dp_shard=2,ep=2,zero=3"),
    ("olmoe", "tp=2,expert_tp=2"),
    ("deepseek-v3", "pp=2,dp_shard=4,ep=2,zero=1"),
]


@pytest.mark.parametrize(("case", "layout"), LAYOUTS)
def test_pieces_are_those_of_the_layout_s_ranks(case, layout, saved, tmp_path, monkeypatch):
    """Each rank's pieces are one of the files, each element is in one piece, and converting back is exact."""
    monkeypatch.setattr("kumi.storage.write.BLOCK_BYTES", 700)
    monkeypatch.setattr(stored_tensor, "GAPPED_BYTES", 300)
    source = saved(case, torch.bfloat16, max_shard_size="20KB")
    convert(source, tmp_path / "cut", to="kumi", layout=layout, verify=False)
    degrees = {key: int(value) for key, value in (word.split("=") for word in layout.split(","))}
    ranks = Layout(**degrees)
    stored = checkpoint.open(tmp_path / "cut")
    assert len(stored.files) == ranks.world_size
    spec = open_source(source).spec
    for param in tensors_of(spec):
        expected = {
            (region.start, region.shape)
            for rank in range(ranks.world_size)
            if param in rank_params(spec, ranks, rank)
            for region in slices(param, ranks, rank)
        }
        pieces = stored.tensors[f"model/{param.name}"].pieces
        if expected:
            assert sorted((piece.start, piece.extent) for piece in pieces) == sorted(expected)
    convert(tmp_path / "cut", tmp_path / "back", to="hf", verify=False)
    assert same(tensors(source), tensors(tmp_path / "back"))


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_any_size_give_the_same_files(case, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_tensor, "GAPPED_BYTES", 100)
    monkeypatch.setattr(read_folder, "BLOCK_BYTES", 1000)
    source = saved(case)
    convert(source, tmp_path / "new", to="hf", verify=False)
    assert same(tensors(source), tensors(tmp_path / "new"))


def test_dtypes_change_only_when_asked(saved, tmp_path):
    source = saved("deepseek-v3")
    convert(source, tmp_path / "native", to="kumi", dtype="bfloat16")
    convert(tmp_path / "native", tmp_path / "new", to="hf")
    expected = {
        name: value if "e_score_correction_bias" in name else value.bfloat16()
        for name, value in tensors(source).items()
    }
    assert same(expected, tensors(tmp_path / "new"))
    with pytest.raises(
        ConfigError,
        match=r"--dtype int8: kumi writes weights as float64, float32, bfloat16, float16; choose one of these",
    ):
        convert(source, tmp_path / "other", to="hf", dtype="int8")


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tp=3", r"--layout tp=3: tp=3 does not divide num_attention_heads=4"),
        ("tp", r"'tp' must be one of pp, dp_replicate, dp_shard, .* with a number"),
        ("tp=2,tp=2", r"each at most once"),
        ("size=2", r"'size=2' must be one of"),
        ("dp_shard=2", r"zero=0 shards no states, but dp_shard=2"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout, words, saved, tmp_path):
    with pytest.raises(LayoutError, match=words):
        convert(saved(), tmp_path / "new", to="kumi", layout=layout)
    assert not (tmp_path / "new").exists()


def test_a_layout_is_for_checkpoints_only(saved, tmp_path):
    with pytest.raises(ConfigError, match="only kumi checkpoints are sharded"):
        convert(saved(), tmp_path / "new", to="hf", layout="tp=2")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("to", ["hf", "kumi"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_half_way_leaves_nothing(dtype, to, error, saved, tmp_path, monkeypatch):
    source, count = saved(max_shard_size="20KB"), iter(range(100))

    def failing(target, nbytes):
        if next(count) == 7:
            raise error
        return advance(target, nbytes)

    advance = byte_runs.Target.advance
    monkeypatch.setattr(byte_runs.Target, "advance", failing)
    with pytest.raises(type(error)):
        convert(source, tmp_path / "new", to=to, dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["llama-source"]


def test_what_fails_while_rows_are_written_leaves_nothing(saved, tmp_path, monkeypatch):
    """GPT-2's files have matrices transposed, so that they are no copies of bytes."""
    source, count = saved("gpt2"), iter(range(100))

    def failing(handle, data, offset):
        if next(count) == 3:
            raise OSError(28, "No space left on device")
        return write_at(handle, data, offset)

    write_at = stream.write_at
    monkeypatch.setattr(kumi_checkpoint, "write_at", failing)
    with pytest.raises(OSError, match="No space left"):
        convert(source, tmp_path / "new", to="kumi")
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2-source"]


def test_a_file_that_shrinks_while_it_is_read_is_an_error(saved, tmp_path):
    source = open_source(saved())
    weights = source.folder / "model.safetensors"
    shutil.copy(weights, tmp_path / "kept")
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    with pytest.raises(ModelError, match="earlier than when it was opened"):
        write_folder.write_hf_folder(
            tmp_path / "new",
            source.spec,
            source.reader,
            base_config=source.config,
            dtype=source.dtypes,
            tokenizer_folder=None,
            card="",
        )


def test_the_command_takes_dtype_and_layout(saved, tmp_path, capsys):
    source = saved()
    words = ["convert", str(source), str(tmp_path / "new"), "--to", "kumi"]
    assert main([*words, "--dtype", "bfloat16", "--layout", "tp=2"]) == 0
    stored = checkpoint.open(tmp_path / "new")
    assert stored.tensors["model/lm_head.weight"].dtype == torch.bfloat16
    assert len(stored.tensors["model/lm_head.weight"].pieces) == 2
    assert main([*words, "--layout", "tp=5"]) == 2
    assert "--layout tp=5" in capsys.readouterr().err
