"""Train the benchmark's model with the Hugging Face Trainer, with its defaults unless the comparison needs others.

python benchmarks/hf_trainer.py --model FOLDER --batches FILE --metrics FILE [--dtype amp]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batches", type=Path, required=True)
    parser.add_argument("--metrics", type=Path, required=True)
    parser.add_argument("--dtype", choices=("fp32", "amp"), default="fp32")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-4)
    return parser.parse_args()


class Rows(torch.utils.data.Dataset):
    """One sequence an item; the model itself shifts the labels."""

    def __init__(self, path: Path, count: int) -> None:
        self.ids = np.load(path)["input_ids"]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.ids[index % len(self.ids)].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


class WriteSteps(TrainerCallback):
    """A callback that writes a line whenever the Trainer logs a step's loss."""

    def __init__(self, path: Path) -> None:
        self.out = path.open("w")

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:
            line = {"step": state.global_step, "loss": float(logs["loss"]), "time": time.time()}
            self.out.write(json.dumps(line) + "\n")
            self.out.flush()


def _distributed() -> dict:
    """Return settings that are allowed only in processes of torchrun."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return {}
    return {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}


def main() -> None:
    args = arguments()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.config.use_cache = False
    with tempfile.TemporaryDirectory() as out:
        settings = TrainingArguments(
            output_dir=out,
            max_steps=args.steps,
            per_device_train_batch_size=args.microbatch,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            use_cpu=True,
            bf16=args.dtype == "amp",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            dataloader_pin_memory=False,
            **_distributed(),
        )
        rows = Rows(args.batches, args.steps * args.microbatch * settings.world_size)
        Trainer(model, settings, train_dataset=rows, callbacks=[WriteSteps(args.metrics)]).train()


if __name__ == "__main__":
    main()
