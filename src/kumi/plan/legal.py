"""Which of many layouts are legal: `kumi.spec.checks.problems` on columns, without the sentences."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kumi.plan.columns import WORDS, Columns
from kumi.plan.stages import even_count, v_shaped
from kumi.spec.batch import BatchSpec
from kumi.spec.checks import DEGREES, WHOLE_WHEN_QUANTIZED, cuts, host_lacks
from kumi.spec.cluster import Host
from kumi.spec.job import Job
from kumi.spec.layout import CONTEXT, OFFLOAD
from kumi.spec.model import ModelSpec
from kumi.spec.schedules import SCHEDULES

Bools = NDArray[np.bool_]


def legal(job: Job, x: Columns) -> Bools:
    """Whether nothing is wrong with each row of `x`, (rows,); exactly where `problems` of it is empty."""
    if job.batch.seq_len > job.model.max_position_embeddings or job.batch.tokens_per_step % job.batch.seq_len:
        return np.zeros(len(x), np.bool_)
    found = _words(x)
    # Rows with an impossible degree are left out before anything is divided by it.
    rows = np.flatnonzero(found)
    part = x.take(rows)
    found[rows] = (
        (part.world_size == job.cluster.devices)
        & _zero(part)
        & _offload(job.cluster.host, part)
        & _tensor(job.model, part)
        & _sequence(job.batch, part)
        & _context(job.model, part)
        & _experts(job.model, part)
        & _quantized(job.model, part)
        & _batch(job.batch, part)
        & _schedule(job.batch, part)
        & _stages(job.model, part)
    )
    return found


def _words(x: Columns) -> Bools:
    found = (x.zero >= 0) & (x.zero <= 3)
    for name in DEGREES:
        found &= getattr(x, name) >= 1
    for name, words in WORDS.items():
        found &= (getattr(x, name) >= 0) & (getattr(x, name) < len(words))
    return found


def _zero(x: Columns) -> Bools:
    alone = (x.zero > 0) & (x.dp_shard * x.cp == 1) & (x.dp_replicate > 1)
    found: Bools = ~alone & ((x.zero > 0) | (x.dp_shard == 1)) & ((x.zero != 2) | (x.pp == 1))
    return found


def _offload(host: Host, x: Columns) -> Bools:
    lacks = host_lacks(host)
    able = [name == "none" or not (lacks["host"] or (name.endswith("-nvme") and lacks["nvme"])) for name in OFFLOAD]
    found: Bools = np.array(able)[x.offload]
    return found


def _tensor(model: ModelSpec, x: Columns) -> Bools:
    need, found = cuts(model), np.ones(len(x), np.bool_)
    for _, count in need.tensor:
        found &= count % x.tp == 0
    for count in need.kv_heads:
        found &= (count % x.tp == 0) | (x.tp % count == 0)
    return found


def _sequence(batch: BatchSpec, x: Columns) -> Bools:
    halves = (x.cp == 1) | (batch.seq_len % (2 * x.cp) == 0)
    found: Bools = halves & ((x.tp == 1) | (x.sequence_parallel == 0) | (batch.seq_len % (x.tp * x.cp) == 0))
    return found


def _context(model: ModelSpec, x: Columns) -> Bools:
    if cuts(model).whole_rows:
        return np.asarray(x.cp == 1)
    found: Bools = (x.cp == 1) | (x.context != CONTEXT.index("ulysses")) | cuts(model).deals_heads(x.cp, x.tp)
    return found


def _experts(model: ModelSpec, x: Columns) -> Bools:
    need = cuts(model)
    found: Bools = (x.ep == 1) & (x.expert_tp == 1)
    if not need.experts:
        return found
    found = x.dp_shard * x.cp * x.tp % (x.ep * x.expert_tp) == 0
    for count in need.experts:
        found &= count % x.ep == 0
    for count in need.width:
        found &= count % x.expert_tp == 0
    return found


def _quantized(model: ModelSpec, x: Columns) -> Bools:
    found = np.ones(len(x), np.bool_)
    if model.lora is not None and model.lora.quantize:
        for name, most in WHOLE_WHEN_QUANTIZED.items():
            found &= getattr(x, name) <= most
    return found


def _batch(batch: BatchSpec, x: Columns) -> Bools:
    found: Bools = (batch.sequences % x.dp == 0) & (batch.sequences // x.dp % x.microbatch == 0)
    return found


def _schedule(batch: BatchSpec, x: Columns) -> Bools:
    microbatches = batch.microbatches(x)
    found = np.ones(len(x), np.bool_)
    for number, one in enumerate(SCHEDULES.values()):
        able = one.takes_stages(x.stages) & (microbatches >= one.least * x.pp)
        if one.in_rounds:
            able = able & (microbatches % x.pp == 0)
        found &= able | (x.schedule != number)
    return found


def _stages(model: ModelSpec, x: Columns) -> Bools:
    """Enough layers for all stages, and no more recomputed than the fullest rank has."""
    layers = model.num_hidden_layers
    ranks = (np.zeros_like(x.pp), np.minimum(1, x.pp - 1), x.pp - 1)
    most = np.max([even_count(layers, x.pp, x.stages, rank, v_shaped(x)) for rank in ranks], axis=0)
    most = np.where(x.recompute == 0, 0, most)
    found: Bools = (x.pp * x.stages <= layers + 2) & (x.recompute_layers >= -1) & (x.recompute_layers <= most)
    return found
