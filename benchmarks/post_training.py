"""SFT and DPO on one CPU core: kumi, TRL and a bare loop on transformers' model, with the same tokens and weights.

    python benchmarks/post_training.py [--steps 12] [--json FILE]

Every row trains the same Llama of 9.0 M parameters in float32 with AdamW, in a process of its own with one thread, in
turn. A figure is the tokens of a step, without padding, over the median CPU seconds of the process between two steps,
logging included; the first steps are not counted.

- sft: 8 examples of about 256 tokens a step, 40 % of them prompts.
- dpo: 4 pairs a step, 8 sequences of about 256 tokens. The reference is stored before training, or computed in every
  step (TRL's default).
- packed: examples of 30 to 256 tokens in rows of 1,024, against kumi's own rows of 256 with one example each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
os.environ |= {"PYTHONWARNINGS": "ignore", "OMP_WAIT_POLICY": "PASSIVE"}

VOCAB, WARM = 8192, 3
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROWS = (
    "kumi sft",
    "trl sft",
    "bare sft",
    "kumi dpo",
    "trl dpo stored",
    "trl dpo in the step",
    "bare dpo",
    "kumi packed",
    "kumi padded",
)


def prepare(work: Path, steps: int) -> None:
    """Write the tokenizer, the model with random weights, and the rows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kumi.data import Source, expand, load_tokenizer
    from kumi.data.bpe import train as train_tokenizer

    source = Source("{stdlib}/**/*.py", exclude=("**/site-packages/**", "**/test/**"))
    made = train_tokenizer([source], VOCAB - 8, work / "tokenizer")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(work / "model")
    draw, tokens = random.Random(0), load_tokenizer(made.folder)
    files = sorted(Path(file) for file in expand(source))
    text = "".join(path.read_text(errors="ignore") for path in draw.sample(files, 60))
    ids = tokens.backend.encode(text, add_special_tokens=False).ids

    def piece(count: int) -> str:
        start = draw.randrange(len(ids) - count)
        return str(tokens.decode(ids[start : start + count]))

    def write(name: str, rows: list[dict[str, str]]) -> None:
        (work / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    count = 8 * (steps + 2)
    write("sft.jsonl", [{"prompt": piece(98), "completion": piece(145)} for _ in range(count)])
    write("dpo.jsonl", [{"prompt": piece(98), "chosen": piece(145), "rejected": piece(145)} for _ in range(count)])
    short = [{"prompt": piece(draw.randint(10, 90)), "completion": piece(draw.randint(20, 150))} for _ in range(400)]
    write("packed.jsonl", short)


def run_file(work: Path, kind: str, rows: str, seq_len: int, sequences: int, steps: int) -> Path:
    import tomli_w

    sections = {
        "name": kind,
        "model": {"source": str(work / "model"), "init": "pretrained"},
        "cluster": {"devices_per_node": 1},
        "objective": {"kind": kind},
        "batch": {"seq_len": seq_len, "tokens_per_step": seq_len * sequences},
        "data": {"sources": [{"path": str(work / rows)}], "tokenizer": str(work / "tokenizer"), "validation": 0.0},
        "optim": {"lr": 1e-4, "schedule": "constant", "grad_clip": 1.0},
        "precision": {"kind": "fp32"},
        "layout": {"microbatch": sequences, "recompute": "none"},
        "train": {"steps": steps, "out": str(work / f"run-{rows}-{seq_len}")},
        "checkpoint": {"asynchronous": False},
        "export": {"enabled": False},
        "log": {"every": 1},
    }
    file = work / f"{kind}-{rows}-{seq_len}.toml"
    file.write_text(tomli_w.dumps(sections))
    return file


def kumi_row(work: Path, name: str, steps: int) -> dict[str, Any]:
    """Train with kumi's own loop in this process; a listener reads the CPU clock after every step."""
    import contextlib
    import io

    from kumi.config import load, open_run
    from kumi.config.resolve import with_prepared_data
    from kumi.train.callbacks import Callbacks
    from kumi.train.loop import train_rank
    from kumi.train.prepare_data import prepare_data

    cases = {
        "kumi sft": ("sft", "sft.jsonl", 264, 8),
        "kumi dpo": ("dpo", "dpo.jsonl", 528, 4),
        "kumi packed": ("sft", "packed.jsonl", 1024, 2),
        "kumi padded": ("sft", "packed.jsonl", 264, 8),
    }
    kind, rows, seq_len, sequences = cases[name]
    if name == "kumi padded":
        one_example_a_row()
    run = open_run(load(run_file(work, kind, rows, seq_len, sequences, steps)))
    ends: list[tuple[float, int]] = []

    class Clock(Callbacks):
        def step(self, entry: dict[str, Any]) -> None:
            ends.append((time.process_time(), entry["tokens"]))

    with contextlib.redirect_stdout(io.StringIO()):
        store = prepare_data(run)
        run = with_prepared_data(run)
        source = run_tokens(run, store)
        train_rank(run, store, Clock(run.config, ()))
    return {"ends": [end for end, _ in ends], "tokens": source}


def one_example_a_row() -> None:
    """Make every row of this process one example, as a trainer without packing has it."""
    import numpy as np

    from kumi.data.packing import bins_file
    from kumi.data.packing.best_fit import Bins

    def alone(lengths: Any, seq_len: int, seed: int) -> Bins:
        units = np.random.default_rng(seed).permutation(len(lengths)).astype(np.int32)
        return Bins(units, np.arange(len(units) + 1, dtype=np.int32), 0, 0)

    bins_file.pack = alone


def run_tokens(run: Any, store: Any) -> float:
    """Return the mean tokens of a step, padding left out."""
    from kumi.config.run_length import run_mixture

    mixture = run_mixture(run.config, store)
    [rows] = mixture.sources
    return float(rows.tokens / rows.rows * run.batch.sequences)


def sequences(work: Path, rows: str) -> list[list[tuple[list[int], list[int]]]]:
    """Return the (ids, mask) of the sequences of each row, as kumi makes them."""
    from kumi.config import load, open_run
    from kumi.train.prepare_data import prepare_data

    kind = rows.removesuffix(".jsonl")
    seq_len = 528 if kind == "dpo" else 264
    file = run_file(work, kind, rows, seq_len, 4 if kind == "dpo" else 8, 4)
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):
        store = prepare_data(open_run(load(file, [f"train.out={work / 'tokens'}"])))
    units = store.open_units(store.sources[0], "train")
    result = []
    for number in range(units.unit_count):
        unit, start, parts = units.tokens_of(number), 0, []
        for length in unit.lengths.tolist():
            part = slice(start, start + length)
            parts.append((unit.ids[part].tolist(), [int(mask) & 1 for mask in unit.mask[part]]))
            start += length
        result.append(parts)
    return result


def trl_row(work: Path, name: str, steps: int) -> dict[str, Any]:
    """Train with TRL on kumi's tokens; a callback reads the CPU clock after every step."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    torch.set_num_threads(1)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.process_time())

    tokens = PreTrainedTokenizerFast(tokenizer_file=str(work / "tokenizer" / "tokenizer.json"))
    tokens.pad_token = tokens.eos_token = tokens.convert_ids_to_tokens(0)
    kind = "sft" if "sft" in name else "dpo"
    units = sequences(work, f"{kind}.jsonl")
    settings: dict[str, Any] = {
        "output_dir": str(work / "trl"),
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "max_steps": steps,
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "max_length": None,
        "dataloader_pin_memory": False,
        "activation_checkpointing": False,
        "disable_tqdm": True,
    }
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    if kind == "sft":
        data = Dataset.from_list([{"input_ids": ids, "completion_mask": mask} for [(ids, mask)] in units])
        config = trl.SFTConfig(per_device_train_batch_size=8, **settings)
        trainer = trl.SFTTrainer(model, args=config, train_dataset=data, processing_class=tokens, callbacks=[Clock()])
        each = 8
    else:
        rows = [json.loads(line) for line in (work / "dpo.jsonl").read_text().splitlines()]
        config = trl.DPOConfig(per_device_train_batch_size=4, precompute_ref_log_probs="stored" in name, **settings)
        trainer = trl.DPOTrainer(
            model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokens, callbacks=[Clock()]
        )
        each = 4
    trainer.train()
    mean = sum(len(ids) for unit in units for ids, _ in unit) / len(units)
    return {"ends": ends, "tokens": each * mean}


def bare_row(work: Path, name: str, steps: int) -> dict[str, Any]:
    """Train with a plain loop over transformers' model, padded to the longest sequence of a step."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    kind = name.removeprefix("bare ")
    units, ends, count = sequences(work, f"{kind}.jsonl"), [], 8 if kind == "sft" else 4
    total = 0
    for step in range(steps):
        chosen = units[step * count : (step + 1) * count]
        rows = [sequence for side in range(len(chosen[0])) for sequence in (unit[side] for unit in chosen)]
        longest = max(len(ids) for ids, _ in rows)
        ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
        attention = torch.zeros_like(ids)
        for number, (tokens, mask) in enumerate(rows):
            ids[number, : len(tokens)] = torch.tensor(tokens)
            is_label = torch.tensor(mask, dtype=torch.bool)
            labels[number, : len(tokens)] = torch.where(is_label, ids[number, : len(tokens)], -100)
            attention[number, : len(tokens)] = 1
            total += len(tokens)
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
        if kind == "sft":
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        else:
            nll = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none").sum(1)
            better, worse = nll.chunk(2)
            loss = -F.logsigmoid(0.1 * (worse - better)).mean()  # the reference's sums are constants
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        ends.append(time.process_time())
    return {"ends": ends, "tokens": total / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        measure = {"kumi": kumi_row, "trl": trl_row, "bare": bare_row}[arguments.row.split()[0]]
        print("RESULT " + json.dumps(measure(arguments.work, arguments.row, arguments.steps)))
        return
    speeds: dict[str, list[float]] = {row: [] for row in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), arguments.steps)
        for _ in range(arguments.repeats):
            for row in ROWS:
                subprocess.run(["rm", "-rf", *map(str, Path(folder).glob("run-*"))], check=True)
                command = [sys.executable, __file__, "--row", row, "--work", folder, "--steps", str(arguments.steps)]
                done = subprocess.run(command, capture_output=True, text=True)
                lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                if not lines:
                    sys.exit(f"{row}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
                result = json.loads(lines[0].removeprefix("RESULT "))
                ends = result["ends"]
                times = [after - before for before, after in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]
                speeds[row].append(result["tokens"] / median(times))
                print(f"{row:22} {speeds[row][-1]:7.0f} tokens a CPU second", flush=True)
    best = {row: max(values) for row, values in speeds.items()}
    ratios = {
        "sft, TRL": best["kumi sft"] / best["trl sft"],
        "sft, bare loop": best["kumi sft"] / best["bare sft"],
        "dpo, TRL with a stored reference": best["kumi dpo"] / best["trl dpo stored"],
        "dpo, TRL's default": best["kumi dpo"] / best["trl dpo in the step"],
        "dpo, bare loop": best["kumi dpo"] / best["bare dpo"],
        "packed, padded": best["kumi packed"] / best["kumi padded"],
    }
    for name, ratio in ratios.items():
        print(f"kumi against {name}: {ratio:.2f}x")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"tokens_per_cpu_second": best, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
