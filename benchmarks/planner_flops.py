"""The FLOPs of a run: those of its model, those that are computed again, and those that its table counts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from planner_defaults import FLOPS_COUNTED, first
from planner_rows import Run

from kumi.spec import ledger
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.spec.op import Op


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs for a token: `forward` of the whole model, `layers` of its layers' forward passes, `attention` of the
    products of queries, keys and values therein, S x S; `train` forward and backward, `train_attention` likewise."""

    forward: float
    layers: float
    attention: float
    train: float
    train_attention: float


@lru_cache(maxsize=1024)
def token_flops(model: ModelSpec, seq_len: int) -> TokenFlops:
    kinds, of_layer = ledger.unique_layer_ops(model), model.unique_layers()[1]
    layer_ops = [(op, of_layer.count(kind)) for kind, ops in enumerate(kinds) for op in ops]
    head_ops = [(op, 1) for op in ledger.head_ops(model)]
    attention = [(op, count) for op, count in layer_ops if op.kind == "attention"]

    def forward(counted: list[tuple[Op, int]]) -> float:
        return sum(count * op.forward_flops(seq_len, seq_len) for op, count in counted) / seq_len

    def train(counted: list[tuple[Op, int]]) -> float:
        return sum(count * op.train_flops(seq_len, seq_len) for op, count in counted) / seq_len

    every = [*layer_ops, *head_ops]
    return TokenFlops(forward(every), forward(layer_ops), forward(attention), train(every), train(attention))


def model_flops(job: Job) -> float:
    """FLOPs of a step's forward and backward passes, attention in full."""
    return token_flops(job.model, job.batch.seq_len).train * job.batch.tokens_per_step


def repeated_flops(job: Job, layout: Layout) -> float:
    """FLOPs that a step computes again: the layers' forward passes where recomputation is full."""
    layers = token_flops(job.model, job.batch.seq_len).layers
    return layers * job.batch.tokens_per_step if layout.recompute == "full" else 0.0


def counted_flops(run: Run, job: Job, layout: Layout) -> float:
    """FLOPs of a step as the run's table counts them (`FLOPS_COUNTED`)."""
    counted, each = first(FLOPS_COUNTED, run.text), token_flops(job.model, job.batch.seq_len)
    flops, attention = each.train, each.train_attention
    if counted.recomputed and layout.recompute == "full":
        flops, attention = flops + each.layers, attention + each.attention
    return (flops - (1 - counted.attention) * attention) * job.batch.tokens_per_step


def measured_seconds(run: Run, job: Job, layout: Layout) -> float | None:
    """Seconds of a step: the column, from tokens/s, or from TFLOP/s as their table counts them."""
    if run.seconds:
        return run.seconds
    if run.tokens_per_s_per_gpu:
        return job.batch.tokens_per_step / (run.tokens_per_s_per_gpu * layout.world_size)
    return counted_flops(run, job, layout) / (run.flops_per_gpu * layout.world_size) if run.flops_per_gpu else None
