"""Random requests of `kumi plan`: models of the examples on presets of machines, with random batches and pins."""

from __future__ import annotations

import random
from pathlib import Path

from kumi.config import plan_input
from kumi.config.model_plan import plan_of_model
from kumi.errors import FitError, LayoutError
from kumi.plan.session import plan

MODELS = sorted((Path(__file__).parents[2] / "examples" / "models").iterdir())
MACHINES = ("a100-sxm-40gb", "a100-sxm-80gb", "aws-p5", "b200", "h100-sxm", "h200-sxm", "l40s", "mi300x", "rtx-4090")
PINS = {
    "pp": (1, 1, 2, 4),
    "tp": (1, 2, 4, 8),
    "cp": (1, 1, 2),
    "zero": (0, 1, 2, 3),
    "microbatch": (1, 2),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "none", "optimizer", "states"),
    "ep": (1, 2, 8),
}


def random_request(seed):
    """Return the name, the job, the pinned fields and the arguments of `plan` of a random request."""
    draw = random.Random(seed)
    model, machine = draw.choice(MODELS), draw.choice(MACHINES)
    large = any(word in model.name for word in ("405b", "176b", "175b", "deepseek"))
    cluster = {"source": machine, "nodes": draw.choice((8, 16, 32) if large else (1, 1, 2, 3, 4, 8))}
    if cluster["nodes"] == 1 and draw.random() < 0.4:
        cluster["devices_per_node"] = draw.choice((1, 2, 4))
    # At least two pins of large requests, whose search is slow otherwise.
    pins = draw.sample(sorted(PINS), draw.randint(2 if cluster["nodes"] > 2 else 0, 4))
    overrides = [f"layout.{name}={draw.choice(PINS[name])}" for name in pins]
    overrides.append(f"batch.seq_len={draw.choice((2048, 4096, 8192, 32768))}")
    if model.name.startswith("gpt-3"):
        overrides[-1] = "batch.seq_len=2048"
    if draw.random() < 0.3:
        overrides.append(f"cluster.price_per_hour={draw.choice((1.5, 2, 40))}")
    if draw.random() < 0.1:
        overrides.append("lora.r=16")
    if draw.random() < 0.2:
        overrides.append(f"plan.margin={draw.choice((0, 0.02, 0.3))}")
    config, _ = plan_of_model(str(model), cluster, overrides)
    inputs = plan_input(config)
    arguments = {"tokens": draw.choice((None, 1e9, 3e11)), "other_nodes": True, "top": 6}
    arguments["trainable"] = draw.random() < 0.25
    name = f"{seed}: {model.name} {cluster} {' '.join(overrides)}{' --trainable' * arguments['trainable']}"
    return name, inputs.job, inputs.pinned, arguments


def random_reports(first, count):
    """Yield (name, report) of `count` requests from seed `first` on that have a plan; others are refused."""
    seed = first
    while count:
        try:
            name, job, pinned, arguments = random_request(seed)
            report = plan(job, pinned, **arguments)
        except (FitError, LayoutError):
            seed += 1
            continue
        yield name, report
        seed, count = seed + 1, count - 1
