"""Megatron checkpoints without Megatron: bit for bit there and back; damaged and unsupported ones are refused."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from kumi.convert import convert
from kumi.convert.megatron import dcp_write, read_megatron
from kumi.convert.megatron.dcp_read import Checkpoint, ChunkedTensor, open_checkpoint
from kumi.convert.megatron.write_megatron import ITERATION, MegatronOptions
from kumi.convert.open_model import open_source
from kumi.errors import ConfigError, KumiError, ModelError, RefusedError
from kumi.megatron.args import to_config
from kumi.megatron.model_fields import unsupported_by_megatron
from kumi.megatron.tensor_names import CheckpointKeys, megatron_parts
from kumi.spec import families
from kumi.spec.ledger import tensors
from weights import read_tensors

Saved = Callable[..., Path]


def written(saved: Saved, tmp_path: Path, case: str = "llama", **options: Any) -> Path:
    convert(saved(case), tmp_path / "megatron", to="megatron", verify=False, megatron=MegatronOptions(**options))
    return tmp_path / "megatron"


def contents(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that PyTorch's own reader finds in a distributed checkpoint."""
    reader = dcp.FileSystemReader(folder)
    tensors = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in reader.read_metadata().state_dict_metadata.items()
        if hasattr(one, "size")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.parametrize("options", [MegatronOptions(), MegatronOptions(local=True, multiple=64)])
@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "llama-tied",
        "qwen2",
        "qwen3",
        "mixtral",
        "qwen3-moe",
        "olmoe",
        "deepseek-v2-lite",
        "deepseek-v3",
        "gemma2",
        "gpt-oss",
        "gpt-neox",
    ],
)
def test_there_and_back_is_exact(case: str, options: MegatronOptions, saved: Saved, tmp_path: Path) -> None:
    source = saved(case, torch.bfloat16 if case == "llama-tied" else torch.float32)
    done = convert(source, tmp_path / "megatron", to="megatron", verify=True, megatron=options)
    assert "written as megatron; verified against" in done
    convert(tmp_path / "megatron", tmp_path / "native", to="kumi", verify=False)
    convert(tmp_path / "native", tmp_path / "again", to="megatron", verify=False)
    convert(tmp_path / "again", tmp_path / "back", to="hf", verify=False)
    before, after = (dict(read_tensors(folder)) for folder in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and before[name].equal(after[name]) for name in before)
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_the_layout_is_megatrons(saved: Saved, tmp_path: Path) -> None:
    """Every tensor, read by PyTorch, equals the model's tensors stacked by hand."""
    source = saved("qwen3")
    convert(source, tmp_path / "out", to="megatron", verify=False, megatron=MegatronOptions(multiple=64))
    theirs, ours = contents(tmp_path / "out" / ITERATION), dict(read_tensors(source))

    def stacked(make: Callable[[int], torch.Tensor]) -> torch.Tensor:
        return torch.stack([make(layer) for layer in range(2)])

    def of(layer: int, name: str) -> torch.Tensor:
        return ours[f"model.layers.{layer}.{name}.weight"]

    def qkv(layer: int) -> torch.Tensor:
        q, k, v = (of(layer, f"self_attn.{one}_proj") for one in "qkv")
        return torch.cat([q.view(2, 2, 8, 32), k.view(2, 1, 8, 32), v.view(2, 1, 8, 32)], 1).reshape(64, 32)

    padded = {
        name: torch.cat([ours[name], torch.zeros(31, 32)]) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    layer = {
        "self_attention.linear_qkv.weight": qkv,
        "self_attention.linear_qkv.layer_norm_weight": lambda i: of(i, "input_layernorm"),
        "self_attention.q_layernorm.weight": lambda i: of(i, "self_attn.q_norm"),
        "self_attention.k_layernorm.weight": lambda i: of(i, "self_attn.k_norm"),
        "self_attention.linear_proj.weight": lambda i: of(i, "self_attn.o_proj"),
        "mlp.linear_fc1.layer_norm_weight": lambda i: of(i, "post_attention_layernorm"),
        "mlp.linear_fc1.weight": lambda i: torch.cat([of(i, "mlp.gate_proj"), of(i, "mlp.up_proj")]),
        "mlp.linear_fc2.weight": lambda i: of(i, "mlp.down_proj"),
    }
    expected = {
        "embedding.word_embeddings.weight": padded["model.embed_tokens.weight"],
        "output_layer.weight": padded["lm_head.weight"],
        "decoder.final_layernorm.weight": ours["model.norm.weight"],
        **{f"decoder.layers.{name}": stacked(make) for name, make in layer.items()},
    }
    assert theirs.keys() == expected.keys()
    assert all(theirs[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize("case", ["qwen3", "mixtral", "deepseek-v3"])
def test_parts_of_tensors_and_blocks_of_rows(case: str, saved: Saved, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(read_megatron, "BLOCK_BYTES", 600)
    source = open_source(written(saved, tmp_path, case))
    draw = Random(0)
    for name, whole in source.tensors():
        for _ in range(4):
            start = tuple(draw.randrange(n) for n in whole.shape)
            shape = tuple(draw.randint(1, n - a) for n, a in zip(whole.shape, start))
            expected = whole[tuple(slice(a, a + n) for a, n in zip(start, shape))]
            assert source.reader.read(name, start, shape).equal(expected), name
        row, ends = 0, []
        while row < whole.shape[0]:
            row = source.reader.block_end(name, row)
            ends.append(row)
        assert ends == sorted(set(ends))
        assert ends[-1] == whole.shape[0]


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "llama-head-dim",
        "llama-linear",
        "qwen2-tied",
        "qwen3",
        "mixtral",
        "mistral-window",
        "qwen3-moe-norm",
        "deepseek-v2-lite",
        "deepseek-v3",
    ],
)
def test_arguments_alone_say_what_the_model_is(case: str, saved: Saved, tmp_path: Path) -> None:
    """Both where megatron-core 0.16 looks for them and where 0.19 does."""
    folder = written(saved, tmp_path, case)
    expected = families.from_hf(families.read_config(folder / "hf"))
    shutil.rmtree(folder / "hf")
    for _ in range(2):
        spec = open_source(folder).spec
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            spec = replace(spec, **{key: getattr(expected, key)})
        assert _alone(spec) == _alone(expected)
        (folder / ITERATION / "common.pt").unlink(missing_ok=True)


def _alone(spec: Any) -> Any:
    """Return `spec` without the fields that arguments do not have: the auxiliary loss and passthrough tensors."""
    return replace(
        spec, layers=tuple(_without_loss(layer) for layer in spec.layers), weights=replace(spec.weights, passthrough=())
    )


def _without_loss(layer: Any) -> Any:
    coefficient = {"router_aux_loss_coef": 0.0} if hasattr(layer.mlp, "router_aux_loss_coef") else {}
    return replace(layer, mlp=replace(layer.mlp, **coefficient))


def test_a_configuration_of_megatron_bridge(saved: Saved, tmp_path: Path) -> None:
    folder = written(saved, tmp_path, "qwen3")
    expected = families.from_hf(families.read_config(folder / "hf"))
    shutil.rmtree(folder / "hf")
    rewritten(folder / ITERATION, lambda tensors: tensors)
    with pytest.raises(ModelError, match=r"neither Megatron-LM's arguments nor run_config\.yaml, .* with --config"):
        open_source(folder)
    (folder / ITERATION / "run_config.yaml").write_text(
        "model:\n  _target_: megatron.bridge.models.qwen.qwen_provider.Qwen3ModelProvider\n  num_layers: 2\n"
        "  hidden_size: 32\n  ffn_hidden_size: 48\n  num_attention_heads: 4\n  num_query_groups: 2\n  kv_channels: 8\n"
        "  activation_func: {_target_: torch.nn.functional.silu, _call_: false}\n  gated_linear_unit: true\n"
        "  normalization: RMSNorm\n  layernorm_epsilon: 1.0e-06\n  add_bias_linear: false\n  qk_layernorm: true\n"
        "  add_qkv_bias: false\n  share_embeddings_and_output_weights: false\n  vocab_size: 97\n  seq_length: 64\n"
        "  rotary_base: 10000.0\n  position_embedding_type: rope\n  init_method_std: 0.3\n  window_size: null\n"
        "  attention_backend: {_args_: [5], _call_: true, _target_: megatron.core.transformer.enums.AttnBackend}\n"
    )
    spec = open_source(folder).spec
    assert replace(spec, eos_token_id=expected.eos_token_id, bos_token_id=expected.bos_token_id) == expected


ARGS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "swiglu": True,
    "normalization": "RMSNorm",
    "vocab_size": 97,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("name", ["norm_epsilon", "layernorm_epsilon"])
def test_the_epsilon_of_norms_has_had_two_names(name: str) -> None:
    assert families.from_hf(to_config({**ARGS, name: 3e-7})).norm_eps == 3e-7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swiglu": False}, "swiglu=False, unlike all models"),
        ({"normalization": None}, r"normalization=None"),
        ({"num_layers": None}, "lack num_layers"),
        ({"moe_layer_freq": "1"}, "moe_layer_freq='1', which does not fit 2 layers"),
        ({"num_experts": 4, "moe_router_topk": 2, "moe_router_score_function": "sigmoid"}, "sigmoid scores"),
        ({"window_size": (3, 0), "qk_layernorm": True}, "window_size"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset=1.0, unlike all models"),
        ({"attention_output_gate": True}, "attention_output_gate=True"),
    ],
)
def test_arguments_of_no_known_model_are_refused(changes: dict[str, Any], words: str) -> None:
    args = dict[str, Any](ARGS)
    if "moe_layer_freq" in changes:
        args |= {"num_experts": 4, "moe_router_topk": 2, "ffn_hidden_size": 48}
    with pytest.raises(ModelError, match=words):
        to_config(args | changes)


def rewritten(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Replace the checkpoint in `folder` by one of the tensors that `edit` returns for its own."""
    tensors = edit(contents(folder))
    shutil.rmtree(folder)
    folder.mkdir()
    pieces = [dcp_write.ChunkData(name, tuple(one.shape), (0,) * one.ndim, one) for name, one in tensors.items()]
    dcp_write.write_dcp(folder, [pieces], [])


def test_optimizer_state_is_left_out_with_a_notice(saved: Saved, tmp_path: Path) -> None:
    folder = written(saved, tmp_path)
    rewritten(folder / ITERATION, lambda t: t | {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(3)})
    done = convert(folder, tmp_path / "back", to="hf", verify=True)
    assert "note: left out of iter_0000000: optimizer state" in done


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: {k: v for k, v in t.items() if k != "output_layer.weight"}, r"'output_layer\.weight' is missing .*"),
        (
            lambda t: t | {"decoder.layers.mlp.extra": torch.zeros(2)},
            r"'decoder\.layers\.mlp\.extra' \(2,\) is in the checkpoint, but the",
        ),
        (
            lambda t: t | {"decoder.final_layernorm.weight": torch.zeros(31)},
            r"is \(31,\) in the checkpoint, but the configuration gives \(32,\)",
        ),
        (lambda t: t | {"embedding.word_embeddings.weight": torch.zeros(90, 32)}, "has 90 rows, but vocab_size=97"),
        (
            lambda t: t | {"decoder.final_layernorm.weight": torch.zeros(32, dtype=torch.int8)},
            "is int8, and kumi reads parameters in float32, bfloat16, float16, float64 only",
        ),
        (lambda t: t | {"decoder.final_norm.weight": torch.zeros(32)}, "HybridModel"),
    ],
)
def test_tensors_that_do_not_fit_are_named(edit: Any, words: str, saved: Saved, tmp_path: Path) -> None:
    folder = written(saved, tmp_path)
    rewritten(folder / ITERATION, edit)
    with pytest.raises(ModelError, match=words):
        open_source(folder)


def test_parts_of_one_tensor_in_two_dtypes_are_named_with_both(saved: Saved) -> None:
    spec = families.from_hf(families.read_config(saved("mixtral")))
    param = next(tensor for tensor in tensors(spec) if tensor.name.endswith("experts.gate_up_proj"))
    keys = CheckpointKeys(homogeneous=False, vocab=spec.vocab_size, halves=True)
    names = [part.name for part in megatron_parts(spec, param, keys)]
    stored = {name: ChunkedTensor(torch.bfloat16 if name == names[-1] else torch.float32, (), ()) for name in names}
    words = f"'{names[-2]}' is float32 and '{names[-1]}' is bfloat16, but both are parts of '{param.name}'"
    with pytest.raises(ModelError, match=re.escape(words)):
        read_megatron._dtype(Path("folder"), spec, param, keys, Checkpoint(Path("folder"), stored, {}))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("attention_multiplier", 0.5, "scores are multiplied by 0.5; Megatron-LM multiplies by 1 / sqrt(head_dim)"),
        ("logits_scaling", 4.0, "logits are multiplied by 0.25; Megatron-Core's GPT model multiplies by 1"),
    ],
)
def test_the_reasons_against_megatron_are_complete(field: str, value: float, words: str, saved: Saved) -> None:
    spec = families.from_hf(families.read_config(saved("granite")) | {field: value})
    assert words in list(unsupported_by_megatron(spec))


class Command:
    """Pickled, it runs a command where it is read without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_pickles_that_run_commands_do_not(file: str, saved: Saved, tmp_path: Path) -> None:
    folder = written(saved, tmp_path)
    shutil.rmtree(folder / "hf")
    with (folder / ITERATION / file).open("wb") as out:
        (pickle.dump if file == ".metadata" else torch.save)(Command(tmp_path / "ran"), out)
    with pytest.raises(RefusedError, match=r"its pickle asks for \w+\.(getattr|Path\.touch), which no"):
        open_source(folder)
    assert not (tmp_path / "ran").exists()


def change(folder: Path, edit: Callable[[Any], None]) -> None:
    """Apply `edit` to the metadata of a checkpoint."""
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    edit(metadata)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def place(metadata: Any, **changes: Any) -> None:
    metadata.storage_data[MetadataIndex("output_layer.weight", (0, 0))].__dict__.update(changes)


def resize(metadata: Any, size: Any) -> None:
    metadata.state_dict_metadata["output_layer.weight"].size = size


def chunks(metadata: Any) -> list[Any]:
    chunks: list[Any] = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"].chunks
    return chunks


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: place(m, relative_path="../secret"), r"not a plain file name"),
        (lambda m: place(m, relative_path="/etc/passwd"), "out of the folder|not a plain file name"),
        (lambda m: place(m, relative_path="__9_9.distcp"), r"__9_9\.distcp: is missing"),
        (lambda m: place(m, length=10**15), r"ends at byte 1\d+, so the file is truncated"),
        (lambda m: place(m, offset=-1), "lacks the location of"),
        (lambda m: place(m, offset=0), "overlap at byte 0"),
        (lambda m: place(m, offset=64), "overlap at byte|cannot be read"),
        (lambda m: m.storage_data.pop(MetadataIndex("output_layer.weight", (0, 0))), "lacks the location of"),
        (lambda m: chunks(m).pop(), "do not tile it"),
        (lambda m: chunks(m).append(chunks(m)[0]), "do not tile it"),
        (lambda m: resize(m, torch.Size([2**50, 2**50])), "not tile it"),
        (lambda m: resize(m, "x"), "malformed tensor description"),
        (lambda m: m.state_dict_metadata.update(x=3), "neither a tensor nor an object"),
        (lambda m: setattr(m, "storage_data", None), "lacks the storage locations"),
    ],
)
def test_metadata_that_lie_are_refused(edit: Any, words: str, saved: Saved, tmp_path: Path) -> None:
    folder = written(saved, tmp_path)
    change(folder / ITERATION, edit)
    with pytest.raises(RefusedError, match=words):
        convert(folder, tmp_path / "back", to="hf", verify=False)


def test_folders_that_are_no_checkpoints(saved: Saved, tmp_path: Path) -> None:
    folder = written(saved, tmp_path)
    latest = folder / "latest_checkpointed_iteration.txt"
    for text, words in (
        ("../..", "has '../..', which is neither a number nor"),
        ("7", "iter_0000007: has no .metadata"),
        ("release", "release: has no .metadata"),
    ):
        latest.write_text(text)
        with pytest.raises(ConfigError, match=words):
            open_source(folder)
    (folder / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    latest.write_text("7")
    with pytest.raises(ModelError, match="old format"):
        open_source(folder)
    assert open_source(folder / ITERATION).spec.family == "llama"
    with pytest.raises(ModelError, match="only Megatron checkpoints need one"):
        open_source(saved("qwen3"), config=folder / "hf")
    with pytest.raises(ConfigError, match="--megatron-local and --megatron-vocab are for --to megatron"):
        convert(saved(), tmp_path / "new", to="hf", megatron=MegatronOptions(multiple=8))
    with pytest.raises(RefusedError, match="exists and is not empty"):
        convert(saved(), folder, to="megatron")


def test_damaged_files_never_crash_the_reader(saved: Saved, tmp_path: Path) -> None:
    """Bytes changed anywhere: the reader says so, or (in the data, which have no checksum) gives other numbers."""
    folder = written(saved, tmp_path, "mixtral") / ITERATION
    expected = {name: one.shape for name, one in open_checkpoint(folder).tensors.items()}
    draw, refused = Random(1), 0
    for file in (".metadata", "__0_0.distcp", "common.pt"):
        good = (folder / file).read_bytes()
        for _ in range(60):
            bad = bytearray(good[: draw.randrange(len(good))] if draw.random() < 0.2 else good)
            for _ in range(draw.choice([1, 1, 8])):
                if bad:
                    bad[draw.randrange(len(bad))] = draw.randrange(256)
            (folder / file).write_bytes(bad)
            try:
                source = open_source(folder)
                for _, tensor in source.tensors():
                    assert tensor.numel() <= max(torch.Size(shape).numel() for shape in expected.values())
            except KumiError:
                refused += 1
        (folder / file).write_bytes(good)
    assert refused > 60


def test_what_megatron_lm_does_not_take_from_a_checkpoint_is_said(saved: Saved, tmp_path: Path) -> None:
    for case, words in {
        "qwen3": ["does not restore these arguments; give them too: --norm-epsilon 1e-06 --qk-layernorm"],
        "llama-llama3": ["--use-rope-scaling", "Megatron-Core has (1.0, 4.0, 8192) built in"],
        "mistral-window": ["--window-size 6,0"],
        "deepseek-v3": [
            "--moe-router-num-groups 4",
            "--rope-type yarn --rotary-scaling-factor 4.0 --mscale 0.7",
            "Megatron-Core sums the 1 best",
        ],
        "granite": ["embeddings are multiplied by"],
    }.items():
        done = convert(saved(case), tmp_path / case, to="megatron", verify=False)
        assert all(word in done for word in words), done
