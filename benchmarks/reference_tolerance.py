"""How far rounding moves the log-prob of a sequence, in units of the tolerance of the check at step 0.

    python benchmarks/reference_tolerance.py [--json FILE]

A run that compares the policy with a stored reference before its first step allows `log_prob_tolerance`
(kumi.train.check_reference). This measures the share of it that rounding uses, as the distance from float64 with the
same weights, over dtypes, lengths and depths. Two layouts are at most twice as far apart. A share of 1 refuses a run.
Beside it stands the share that one wrong input token of each sequence uses.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from kumi.objectives import IGNORED
from kumi.parallel import build
from kumi.parallel.mesh import build_mesh, init_distributed
from kumi.spec.layout import Layout
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, Rope
from kumi.spec.precision import PRECISIONS
from kumi.train.check_reference import log_prob_tolerance

LENGTHS, DEPTHS, KINDS, VOCAB, SEQUENCES = (16, 128, 1024), (2, 16), ("fp32", "bf16"), 8192, 8


def shares(kind: str, depth: int, length: int) -> tuple[float, float]:
    """Return the largest share of the tolerance that rounding uses, and the smallest that a wrong token uses."""
    layer = LayerSpec(Attention(4, 2, 64, Rope(10000.0)), MLP(704))
    spec = ModelSpec("llama", VOCAB, 256, (layer,) * depth, 1e-5, SEQUENCES * length)
    mesh, dtype = build_mesh(Layout(), init_distributed()), getattr(torch, PRECISIONS[kind].compute)
    model, exact = (build(spec, mesh, PRECISIONS[name], weights=7).eval() for name in (kind, "fp64"))
    # Predictions as sharp as a trained model's, which make rounding matter, and weights that `dtype` has exactly.
    for own, other in zip(model.parameters(), exact.parameters(), strict=True):
        if own.ndim > 1:
            own.data.mul_(3)
        own.data.copy_(own.data.to(dtype))
        other.data.copy_(own.data)
    random = torch.Generator().manual_seed(length)
    ids = torch.randint(0, VOCAB, (SEQUENCES, length + 1), generator=random)
    inputs, labels = ids[:, :-1], ids[:, 1:].clone()
    labels[:, : length // 4] = IGNORED
    changed = inputs.clone()
    changed[:, length // 2] = (changed[:, length // 2] + 1) % VOCAB
    with torch.no_grad():
        rounded, wrong = model(inputs, labels=labels), exact(changed, labels=labels)
        own, other, truth = (part.double().sum(1) for part in (rounded, wrong, exact(inputs, labels=labels)))
    tolerance = log_prob_tolerance(PRECISIONS[kind].matmul_dtype, truth, (labels != IGNORED).sum(1))
    return ((own - truth).abs() / tolerance).max().item(), ((other - truth).abs() / tolerance).min().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how much of the reference's tolerance rounding uses.")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    for kind in KINDS:
        for depth in DEPTHS:
            for length in LENGTHS:
                rounding, wrong = shares(kind, depth, length)
                figures.append({"dtype": kind, "layers": depth, "tokens": length, "rounding": rounding, "wrong": wrong})
                print(
                    f"{kind}  {depth:2} layers  {length:5} tokens  rounding {rounding:.3f}  a wrong token {wrong:.1f}"
                )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
