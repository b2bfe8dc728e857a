"""Every kind of file that kumi reads: a valid one, and its reader."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from kumi.config.load import load, load_plan
from kumi.config.presets import read_node
from kumi.convert import convert, merge
from kumi.convert.hf.write_folder import read_generation, write_hf_folder
from kumi.convert.open_model import open_source
from kumi.convert.vocab.base_tokenizer import load_base
from kumi.data import Source, load_tokenizer, prepare, records, store
from kumi.errors import DataError
from kumi.nn.decoder import Decoder
from kumi.spec import families

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "eos_token_id": 0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": False,
}
RUN = """name = "x"
[model]
init = "random"
[model.config]
{config}
[cluster]
source = "h100-sxm"
nodes = 2
[batch]
seq_len = 64
tokens_per_step = 4096
[layout]
tp = 2
[data]
tokenizer = {{ vocab_size = 300 }}
sources = [{{ path = "a.txt", weight = 2.0 }}]
[optim]
lr = 2e-3
betas = [0.9, 0.95]
[train]
steps = 3
out = "runs/x"
"""


@dataclass(frozen=True)
class Kind:
    """`file` below the folder of good files is the one that is mutated; `read` reads it with all that belongs to it.

    `named`: the user names the very file, so a link may lead to it.
    """

    name: str
    file: str
    read: Callable[[Path], object]
    named: bool = False


def make(root: Path) -> list[Kind]:
    """Write a good file of every kind below `root`."""
    torch.manual_seed(0)
    model, adapter = root / "model", root / "adapter"
    _model(model)
    _adapter(adapter, model)
    convert(model, root / "native", to="kumi", verify=False)
    convert(model, root / "megatron", to="megatron", verify=False)
    for file in (root / "megatron" / "hf").iterdir():
        file.unlink()
    (root / "megatron" / "hf").rmdir()
    inner = "megatron/iter_0000000"
    (root / "bin").mkdir()
    (root / "bin" / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"a": torch.ones(2)}, root / "bin" / "pytorch_model.bin")
    _data(root, model)
    prefix = next((root / "store").glob("*train*.idx")).stem
    (root / "run.toml").write_text(
        RUN.format(config="\n".join(f"{k} = {json.dumps(v)}" for k, v in CONFIG.items() if not isinstance(v, dict)))
    )
    (root / "node.toml").write_text(_node())
    return [
        Kind("config.json", "model/config.json", _read_model),
        Kind("generation_config.json", "model/generation_config.json", _read_generation),
        Kind("tokenizer.json", "model/tokenizer.json", _read_tokenizer),
        Kind("tokenizer_config.json", "model/tokenizer_config.json", _read_tokenizer),
        Kind("weights", f"model/{min((root / 'model').glob('*.safetensors')).name}", _read_model),
        Kind("index", "model/model.safetensors.index.json", _read_model),
        Kind("torch .bin", f"{inner}/common.pt", _read("megatron")),
        Kind("pytorch_model.bin", "bin/pytorch_model.bin", _read("bin")),
        Kind("adapter_config.json", "adapter/adapter_config.json", _read_adapter),
        Kind("adapter weights", "adapter/adapter_model.safetensors", _read_adapter),
        Kind("checkpoint meta", "native/meta.json", _read("native")),
        Kind("checkpoint index", "native/index.json", _read("native")),
        Kind("megatron metadata", f"{inner}/.metadata", _read("megatron")),
        Kind("store meta", "store/meta.json", _read_store),
        Kind("store .idx", f"store/{prefix}.idx", _read_store),
        Kind("store .bin", f"store/{prefix}.bin", _read_store),
        Kind("run file", "run.toml", _read_run, named=True),
        Kind("cluster file", "node.toml", lambda folder: read_node(str(folder / "node.toml")), named=True),
        *(
            Kind(name, f"data.{name}", _read_records(f"data.{name}"), named=True)
            for name in ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt")
        ),
    ]


def _model(folder: Path) -> None:
    spec = families.from_hf(CONFIG)
    decoder = Decoder(spec)
    write_hf_folder(
        folder,
        spec,
        iter(decoder.state_dict().items()),
        base_config=CONFIG,
        dtype="float32",
        tokenizer_folder=None,
        card="---\nlicense: mit\n---\n",
        max_shard_bytes=10_000,
    )
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w0", "bos_token": {"content": "w1"}}))


def _adapter(folder: Path, base: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "bias": "none",
        "base_model_name_or_path": str(base),
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "rank_pattern": {},
        "alpha_pattern": {"q_proj": 8},
        "init_lora_weights": True,
        "revision": None,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file(
        {f"{name}A.weight": torch.ones(2, 16), f"{name}B.weight": torch.ones(16, 2)},
        folder / "adapter_model.safetensors",
    )


def _data(root: Path, model: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    import zstandard

    texts = [f"w{n} w{n + 1} w{n + 2}" for n in range(20)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (root / "data.jsonl").write_bytes(lines)
    (root / "data.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (root / "data.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    (root / "data.txt").write_bytes(b" ".join(text.encode() for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), root / "data.parquet")
    prepare([Source(str(root / "data.jsonl"))], load_tokenizer(model), root / "store", validation=0.2, workers=1)


def _node() -> str:
    from importlib.resources import files

    return files("kumi.clusters").joinpath("nodes").joinpath("h100-sxm.toml").read_text()


def _read(name: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        return [tensor.sum() for _, tensor in open_source(folder / name).tensors()]

    return read


def _read_model(folder: Path) -> object:
    families.to_hf(families.from_hf(families.read_config(folder / "model")))
    return _read("model")(folder)


def _read_generation(folder: Path) -> object:
    return read_generation(folder / "model")


def _read_tokenizer(folder: Path) -> object:
    load_base(folder / "model")
    tokens = load_tokenizer(folder / "model")
    return tokens.decode(tokens.encode("w1 w2 other"))


def _read_adapter(folder: Path) -> object:
    return [tensor.sum() for _, tensor in merge.open_merged(folder / "adapter", str(folder / "model")).tensors()]


def _read_store(folder: Path) -> object:
    opened = store.open_store(folder / "store")
    mixture = opened.mixture(8, 0)
    return [mixture.batch(0, 2)] if hasattr(mixture, "batch") else opened.train_tokens


def _read_run(folder: Path) -> object:
    load_plan(folder / "run.toml")
    return load(folder / "run.toml")


def _read_records(name: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        items = list(records.read(folder / name))
        faults = [item for item in items if isinstance(item, records.Fault)]
        if faults or not items:
            raise DataError(str(faults[:1]))
        return items

    return read
