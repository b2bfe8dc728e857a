"""The layouts in which a node generates: replicas of tp ranks, whose experts may be shared."""

from __future__ import annotations

from dataclasses import replace

from kumi.spec.checks import not_divisible
from kumi.spec.divisibility import divisibility, divisors
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec


def inference_layouts(model: ModelSpec, devices: int) -> list[Layout]:
    """Return the layouts of one node's `devices` that divide the tensors of `model`, by increasing tp and ep.

    Each expert is either complete on a rank, or sharded over the tp ranks of a replica as a dense layer is. Replicas
    that share experts are `dp_shard` ranks, with the ZeRO stage that leaves weights whole; others are `dp_replicate`.
    """
    layouts: dict[Layout, None] = {}
    for tp in divisors(devices):
        for ep, expert_tp in _expert_degrees(model, devices, tp):
            replicas, shared = devices // tp, ep * expert_tp > tp
            dp = Layout(dp_shard=replicas, zero=1) if shared and replicas > 1 else Layout(dp_replicate=replicas)
            layout = replace(dp, tp=tp, ep=ep, expert_tp=expert_tp)
            if not not_divisible(model, layout):
                layouts[layout] = None
    return list(layouts)


def _expert_degrees(model: ModelSpec, devices: int, tp: int) -> list[tuple[int, int]]:
    """Return the pairs (ep, expert_tp) to try with `tp`: an expert is sharded over tp ranks or complete on a rank."""
    if not divisibility(model).experts:
        return [(1, 1)]
    return [(1, tp), *((ep, tp) for ep in divisors(devices // tp) if ep > 1), *((ep, 1) for ep in divisors(devices))]
