"""The kumi commands whose results are compared between two commits, and the folders that they write.

`{work}` in a command stands for the common work folder. Precision, number of threads and numerics are pinned, so that
results are reproducible on one machine.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """One command."""

    name: str
    command: tuple[str, ...]
    folders: tuple[str, ...] = ()  # below the work folder; all their files are recorded
    digests: tuple[str, ...] = ()  # below `folders`; their files are recorded with a digest of their bytes


# From one GPU to a thousand, NVIDIA and AMD, with fast and slow networks.
GPUS = (
    "1xh200-sxm",
    "8xh100-sxm",
    "64xh100-sxm",
    "1024xh100-sxm",
    "16xa100-sxm-80gb",
    "8xl40s",
    "4xrtx-4090",
    "72xgb200-nvl72",
    "32xmi300x",
)

# Models and clusters on which every pin is tried: dense, with grouped-query attention, with experts, with latent
# attention, with Mamba layers, and a model that is too large for its cluster.
PINNED = (
    ("llama-3-8b", "16xh100-sxm"),
    ("llama-2-70b", "64xh100-sxm"),
    ("mixtral-8x7b", "64xh100-sxm"),
    ("deepseek-v3", "128xh200-sxm"),
    ("nemotron-3-nano-30b-a3b", "32xh100-sxm"),
    ("bloom-176b", "8xl40s"),
)

PINS = (
    "layout.tp=2",
    "layout.tp=8",
    "layout.tp=3",
    "layout.pp=4",
    "layout.pp=2 layout.schedule=gpipe",
    "layout.pp=4 layout.schedule=interleaved",
    "layout.pp=2 layout.schedule=zb-v",
    "layout.cp=2",
    "layout.ep=8",
    "layout.zero=0",
    "layout.zero=1",
    "layout.zero=2",
    "layout.zero=3",
    "layout.recompute=full",
    "layout.recompute=selective",
    "layout.recompute=none",
    "layout.microbatch=2",
    "layout.tp=4 layout.pp=2 layout.cp=2",
    "batch.seq_len=32768",
    "batch.tokens_per_step=16777216",
    "precision.kind=fp32",
    "precision.kind=fp8",
    "lora.r=16",
    "optim.kind=muon",
    "optim.kind=adamw-8bit",
    "--trainable",
    "--engine megatron-lm",
    "--engine torchtitan",
    "--top 20 layout.tpp=2",
)


def plans() -> list[Case]:
    """Return plans of every example model on all `GPUS`, and of each pair in `PINNED` with each of `PINS`."""
    models = sorted(path.name for path in (ROOT / "examples/models").iterdir())
    free = [(model, gpus, "") for model in models for gpus in GPUS]
    pinned = [(model, gpus, pin) for model, gpus in PINNED for pin in PINS]
    return [
        Case(
            f"plan {model} {gpus} {pin}".strip(),
            ("plan", str(ROOT / "examples/models" / model), "--gpus", gpus, "--json", *pin.split()),
        )
        for model, gpus, pin in free + pinned
    ]


DENSE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

# Run -> (model, overrides). Model None: the export of run `one`. All runs but `one` have two ranks.
RUNS: dict[str, tuple[dict | None, str]] = {
    "one": (DENSE, "cluster.devices_per_node=1 layout.microbatch=2"),
    "ddp": (DENSE, "layout.dp_replicate=2 layout.zero=0 layout.microbatch=2"),
    "zero1": (DENSE, "layout.dp_shard=2 layout.zero=1 layout.microbatch=2"),
    "zero2": (DENSE, "layout.dp_shard=2 layout.zero=2 layout.microbatch=2"),
    "zero3": (DENSE, "layout.dp_shard=2 layout.zero=3 layout.microbatch=2 layout.recompute=full"),
    "tensor": (DENSE, "layout.tp=2 layout.microbatch=2 layout.recompute=selective"),
    "pipeline": (DENSE, "layout.pp=2 layout.microbatch=1"),
    "context": (DENSE, "layout.cp=2 layout.microbatch=2"),
    "experts": (EXPERTS, "layout.dp_shard=2 layout.zero=1 layout.ep=2 layout.microbatch=2"),
    "bf16": (DENSE, "layout.dp_shard=2 layout.zero=3 layout.microbatch=2 precision.kind=bf16"),
    "lora": (None, "layout.dp_shard=2 layout.microbatch=2 lora.r=4"),
    "chosen": (DENSE, "data.cross_document=true optim.schedule=constant"),
}
_PINNED = ("cluster.devices_per_node=2", "precision.kind=fp32", "precision.numerics=reference")


def runs() -> list[Case]:
    """Return training runs of four steps, each resumed for two more, so that the checkpoint's states matter."""
    cases = []
    for name, (_, settings) in RUNS.items():
        overrides = {pair.partition("=")[0]: pair for pair in (*_PINNED, *settings.split())}
        file, keys = f"{{work}}/{name}.toml", tuple(overrides.values())
        longer = ("train.steps=6", "--allow-change", "train.steps")
        out = (f"runs/{name}",)
        cases += [
            Case(f"run {name}", ("train", file, *keys, "--json"), out, ("hf", "adapter")),
            Case(f"run {name}, resumed", ("train", file, *keys, *longer, "--json"), out, ("hf", "adapter")),
        ]
    return cases


def run_files(work: Path) -> None:
    """Write the run file of each of `RUNS` into the new folder `work`, and texts to train on.

    Raise FileExistsError if `work` exists.
    """
    work.mkdir()
    (work / "text").mkdir()
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "some", "more"]
    for number in range(40):
        picked = [words[(number * 7 + place * place) % len(words)] for place in range(30 + number * 5)]
        text = work / "text" / f"{number:02}.txt"
        text.write_text(" ".join(picked) + "\n")
        os.utime(text, (1e9, 1e9))  # the fingerprint of the data includes file times
    for name, (model, _) in RUNS.items():
        exported = json.dumps(str(work / "runs/one/hf"))
        tokenizer = "{ vocab_size = 512 }" if model else exported
        lines = [f"{key} = {json.dumps(value)}" for key, value in (model or {}).items()]
        section = ['init = "random"', "[model.config]", *lines] if model else [f"source = {exported}"]
        text = _RUN.format(name=name, model="\n".join(section), tokenizer=tokenizer, work=work)
        (work / f"{name}.toml").write_text(text)


_RUN = """name = "{name}"
[model]
{model}
[cluster]
source = "auto"
[batch]
seq_len = 64
tokens_per_step = 512
[data]
tokenizer = {tokenizer}
sources = [{{ path = "{work}/text/*.txt" }}]
validation = 0.1
cache = "{work}/data"
[optim]
lr = 1e-2
[train]
steps = 4
out = "{work}/runs/{name}"
[eval]
every = 2
sequences = 4
[checkpoint]
every = 2
"""


def conversions() -> list[Case]:
    """Return conversions of the runs' checkpoints and exports."""
    work, last = "{work}", "checkpoints/step_000006"
    sources = {
        "kumi to hf": (f"{work}/runs/zero3/{last}", "--to hf --verify"),
        "kumi to hf in bfloat16": (f"{work}/runs/tensor/{last}", "--to hf --dtype bfloat16"),
        "hf to kumi": (f"{work}/runs/one/hf", "--to kumi"),
        "hf to 8 ranks": (f"{work}/runs/one/hf", "--to kumi --layout tp=2,pp=2,dp_shard=2,zero=3"),
        "8 ranks to hf": (f"{work}/converted/hf to 8 ranks", "--to hf --verify"),
        "hf to hf in float16": (f"{work}/runs/one/hf", "--to hf --dtype float16"),
        "hf to megatron": (f"{work}/runs/one/hf", "--to megatron"),
        "megatron to hf": (f"{work}/converted/hf to megatron", "--to hf"),
        "experts to hf": (f"{work}/runs/experts/{last}", "--to hf --verify"),
        "experts to ranks": (f"{work}/runs/experts/hf", "--to kumi --layout ep=2,dp_shard=2,zero=1"),
        "adapters merged": (f"{work}/runs/lora/{last}", "--to hf"),
    }
    return [
        Case(
            f"convert {name}",
            ("convert", source, f"{work}/converted/{name}", *options.split(), "--json"),
            (f"converted/{name}",),
            ("",),
        )
        for name, (source, options) in sources.items()
    ]


def verbs() -> list[Case]:
    """Return the other commands that print JSON."""
    file = "{work}/chosen.toml"
    return [
        Case("describe", ("describe", file, *_PINNED, "--json")),
        Case("describe a file with a wrong key", ("describe", file, "layout.tpp=2", "--json")),
        Case("the schema", ("describe", "--schema")),
        Case("resolved", ("describe", file, *_PINNED, "--resolved")),
        Case("data prepare", ("data", "prepare", file, "--json")),
        Case("data inspect", ("data", "inspect", file, "--json")),
        Case("dry run", ("train", file, *_PINNED, "--dry-run", "--json")),
        Case("init", ("init", "--list", "--json")),
        Case("push", ("push", "{work}/runs/one/hf", "nobody/nothing", "--json")),
        Case(
            "vocab",
            (
                "vocab",
                "extend",
                "{work}/runs/one/hf",
                "{work}/extended",
                "--learn",
                "20",
                "--data",
                "{work}/text",
                "--json",
            ),
            ("extended",),
            ("",),
        ),
        Case("plan a run file", ("plan", file, *_PINNED, "--json")),
    ]


PARTS = {"plans": plans, "runs": runs, "conversions": conversions, "verbs": verbs}
