"""The baseline: a bare PyTorch training loop on transformers' Llama.

It has the shapes, data and optimizer of the compared runs: fused AdamW, SDPA attention, gradient clipping, and
DistributedDataParallel under torchrun. It neither evaluates nor saves checkpoints.

    python benchmarks/bare_loop.py --model FOLDER --batches FILE --metrics FILE [--dtype amp] [--compile]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--model", type=Path, required=True, help="folder with config.json, and weights unless --random"
    )
    parser.add_argument("--random", action="store_true", help="random weights from config.json alone")
    parser.add_argument("--batches", type=Path, help="batches.npz of workload.py; random tokens without it")
    parser.add_argument("--metrics", type=Path, required=True, help="JSONL file to write: one line a step")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "amp", "bf16"),
        default="fp32",
        help="fp32; amp: float32 weights, bf16 autocast; bf16: weights and states in bf16",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--recompute", action="store_true", help="transformers' gradient checkpointing, layer by layer")
    parser.add_argument("--packed", action="store_true", help="keep documents apart by their position ids")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-4)
    return parser.parse_args()


def load_model(args: argparse.Namespace) -> torch.nn.Module:
    """Return the model on its device, in training mode."""
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    if args.random:
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device)
    model.config.use_cache = False
    if args.recompute:
        # transformers 5.2x renamed it.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model.train()


class Batches:
    """`batch(step)` -> input_ids, labels, position_ids of this rank's rows, on the device."""

    def __init__(self, args: argparse.Namespace, vocab_size: int, rank: int, world: int) -> None:
        self.args, self.rank, self.world = args, rank, world
        if args.batches:
            stored = np.load(args.batches)
            self.rows = [torch.from_numpy(stored[key]) for key in ("input_ids", "labels", "position_ids")]
        else:
            generator = torch.Generator().manual_seed(rank)
            ids = torch.randint(vocab_size, (args.microbatch * 4, args.seq_len + 1), generator=generator)
            positions = torch.arange(args.seq_len).repeat(args.microbatch * 4, 1)
            self.rows = [ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions]

    def __call__(self, step: int) -> list[torch.Tensor]:
        size, count = self.args.microbatch, len(self.rows[0])
        first = (step * self.world + self.rank) * size
        index = torch.arange(first, first + size) % count
        return [rows[index].long().to(self.args.device) for rows in self.rows]


def make_optimizer(args: argparse.Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def train_step(args, model, optimizer, batch) -> torch.Tensor:
    """Make one update and return its loss."""
    input_ids, labels, positions = batch
    extra = {"position_ids": positions} if args.packed else {}
    with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "amp"):
        logits = model(input_ids=input_ids, **extra).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    del logits
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train(args, model, rank: int, world: int) -> None:
    """Run all steps and write one line of metrics for each."""
    vocab_size = model.config.vocab_size
    if world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = make_optimizer(args, model)
    forward = torch.compile(model) if args.compile else model
    batches = Batches(args, vocab_size, rank, world)
    with args.metrics.open("w") if rank == 0 else contextlib.nullcontext() as out:
        for step in range(args.steps):
            began = time.perf_counter()
            loss = train_step(args, forward, optimizer, batches(step))
            if world > 1:
                torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.AVG)
            line = {"step": step + 1, "loss": loss.item(), "seconds": time.perf_counter() - began}
            if args.device == "cuda":
                line["peak_memory"] = torch.cuda.max_memory_allocated()
            if out:
                out.write(json.dumps(line) + "\n")
                out.flush()


def main() -> None:
    args = arguments()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    if world > 1:
        torch.distributed.init_process_group("gloo")
    train(args, load_model(args), rank, world)
    if world > 1:
        torch.distributed.barrier()  # gloo aborts a rank if its neighbour has left
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
