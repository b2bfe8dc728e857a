"""Make the CPU benchmark's model and data once, in a separate folder.

WORK/kumi/data/      tokenizer and tokens of the standard library's sources, made by `kumi data prepare`
WORK/model/          config.json and one set of random weights, from which everyone starts
WORK/batches.npz     the sequences, in kumi's order, for the others to read; attention crosses documents
WORK/packed.npz      the same of rows that keep documents apart

python benchmarks/workload.py --work build/benchmark [--sequences 512]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import shapes

SEQ_LEN, MICROBATCH, SEED = 512, 8, 0


@dataclass(frozen=True)
class Size:
    """A model, and the files of the standard library as its training data."""

    shape: dict[str, Any]
    text: str


SIZES = {
    "w1": Size(shapes.W1, "{stdlib}/**/*.py"),
    # To try the scripts.
    "tiny": Size(shapes.TINY | {"vocab_size": 512}, "{stdlib}/email/*.py"),
}


def run_file(
    work: Path, *, ranks: int, steps: int, precision: str, out: Path, cross_document: bool = True, size: str = "w1"
) -> str:
    """Return a kumi run file for the workload, with kumi's defaults for all other keys."""
    tokens = SEQ_LEN * MICROBATCH * ranks
    return f"""\
name = "benchmark"

[model]
source = {json.dumps(str(work / "model"))}

[cluster]
devices_per_node = {ranks}

[batch]
seq_len = {SEQ_LEN}
tokens_per_step = {tokens}

[data]
sources = [{{ path = {json.dumps(SIZES[size].text)}, exclude = ["**/site-packages/**"] }}]
tokenizer = {{ vocab_size = {SIZES[size].shape["vocab_size"]} }}
cache = {json.dumps(str(work / "data"))}
cross_document = {json.dumps(cross_document)}

[optim]
lr = 3e-4
schedule = "constant"
weight_decay = 0.1
grad_clip = 1.0

[precision]
kind = "{precision}"

[layout]
microbatch = {MICROBATCH}
recompute = "none"

[train]
steps = {steps}
seed = {SEED}
out = {json.dumps(str(out))}

[eval]
sequences = {MICROBATCH * ranks}

[log]
every = 1

[export]
enabled = false
"""


def write_model(folder: Path, size: str) -> None:
    """Write random weights from one seed, initialised and saved by transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shapes.write_config(SIZES[size].shape, folder)
    torch.manual_seed(SEED)
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).save_pretrained(folder)


def write_batches(work: Path, sequences: int) -> None:
    """Write the first `sequences` sequences of the run, in the order in which kumi trains on them."""
    from kumi.data import open_store

    for name, cross_document in (("batches", True), ("packed", False)):
        mixture = open_store(work / "data" / "tokens").mixture(SEQ_LEN, SEED, cross_document=cross_document)
        batch = mixture.batch(0, sequences)
        arrays = {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": batch["position_ids"]}
        np.savez(work / f"{name}.npz", **{key: array.astype(np.int32) for key, array in arrays.items()})


def prepare(work: Path, sequences: int, size: str = "w1") -> None:
    """Make the missing files of the workload."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "model" / "model.safetensors").exists():
        write_model(work / "model", size)
    file = work / "prepare.toml"
    file.write_text(run_file(work, ranks=1, steps=1, precision="fp32", out=work / "unused", size=size))
    done = subprocess.run([sys.executable, "-m", "kumi", "data", "prepare", str(file)], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"kumi data prepare {file} ended with code {done.returncode}: {done.stderr[-2000:]}")
    write_batches(work, sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path("build/benchmark"))
    parser.add_argument("--sequences", type=int, default=512)
    args = parser.parse_args()
    prepare(args.work.resolve(), args.sequences)


if __name__ == "__main__":
    main()
