"""The RankState of a run without a run folder, to measure only its training step, on random weights and tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from kumi.accelerator import GPU
from kumi.config import ResolvedRun, from_dict
from kumi.config.assemble import assemble_cluster
from kumi.config.cluster_file import DeviceFile, NodeFile
from kumi.config.cluster_source import cluster_spec
from kumi.config.job_sections import ClusterSection
from kumi.config.optim_section import choose_optim
from kumi.data import Batch
from kumi.errors import ConfigError
from kumi.parallel.build import build
from kumi.parallel.mesh import RankInfo, build_mesh, init_distributed
from kumi.parallel.optim.adamw import init_adamw
from kumi.parallel.stage_modules import unwrap
from kumi.plan.estimate import estimate
from kumi.plan.search.select import with_peak_flops
from kumi.spec import families
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import decayed_names
from kumi.spec.lora import Lora
from kumi.spec.peft import with_adapters
from kumi.spec.precision import PRECISIONS
from kumi.train.train_state import RankState
from kumi.units import write_bytes

SINGLE_DEVICE = Layout()


def make_run(
    config: dict[str, Any],
    *,
    seq_len: int,
    microbatch: int,
    recompute: str,
    compile: bool,
    precision: str,
    layout: Layout = SINGLE_DEVICE,
    microbatches: int = 1,
    async_tp: bool = False,
    lora: Lora | None = None,
) -> ResolvedRun:
    """Return a run of `layout`, without checking that it fits the memory.

    `config`: the model's config.json.
    `microbatch`: rows of a microbatch; `microbatches`: how many of them a rank computes in a step.
    `lora`: train these adapters of the model, whose weights are frozen.
    """
    tokens = seq_len * microbatch * microbatches * layout.dp
    run_config = from_dict(
        {
            "name": "benchmark",
            "model": {"config": config, "init": "random"},
            "batch": {"seq_len": seq_len, "tokens_per_step": tokens},
            "comm": {"async_tp": async_tp},
            "data": {"sources": [{"path": "unused"}], "tokenizer": "unused"},
            "optim": {"schedule": "constant"},
            "train": {"steps": 1, "out": "unused", "compile": compile},
        }
    )
    cluster = replace(this_cluster(), devices_per_node=layout.world_size)
    optim = choose_optim(run_config.optim, 1)
    model = families.from_hf(config)
    adapted = model if lora is None else with_adapters(model, lora)
    job = Job(adapted, cluster, BatchSpec(seq_len, tokens), PRECISIONS[precision], optim)
    device = with_peak_flops(cluster.device, job.precision.matmul_dtype)
    layout = replace(layout, microbatch=microbatch, recompute=recompute)
    estimated = estimate(replace(job, cluster=replace(cluster, device=device)), layout)
    return ResolvedRun(run_config, config, None, job, estimated)


@cache
def this_cluster() -> ClusterSpec:
    """Return this machine. Its GPU is as PyTorch sees it if the driver does not list it: AMD's, or a partition."""
    section = ClusterSection(source="auto")
    try:
        return cluster_spec(section)
    except ConfigError:
        if not torch.cuda.is_available():
            raise
    properties = torch.cuda.get_device_properties(0)
    device = DeviceFile.model_validate(
        {
            "name": properties.name,
            "kind": GPU,
            "memory": write_bytes(properties.total_memory),
            "dtypes": ("float32", "bfloat16", "float16"),
        }
    )
    return assemble_cluster(
        section.model_copy(update={"devices_per_node": 1}), NodeFile(device=device, devices_per_node=1), "auto"
    )


def make_rank_state(config: dict[str, Any], device: torch.device, **options: Any) -> RankState:
    """Return a decoder and its optimizer on `device`, with random weights drawn there.

    With a layout of several ranks, these are the rank's shards.
    """
    run = make_run(config, **options)
    alone = run.layout.world_size == 1
    mesh = build_mesh(run.layout, RankInfo(0, 1, 0, device) if alone else init_distributed(device.type))

    def weights(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=device)
        return torch.randn(shape, device=device) * run.model.initializer_range

    model = build(run.model, mesh, run.precision, weights=weights, compile=run.config.train.compile, comm=run.comm)
    optimizer = init_adamw(unwrap(model).named_parameters(), decayed_names(run.model), run.optim)
    nothing: Any = None  # no data, and no store of it
    return RankState(run, mesh, model, optimizer, nothing, None, nothing, nothing)


def synthetic(rows: int, seq_len: int, vocab_size: int, documents: int) -> Batch:
    """Return random tokens; each row has `documents` documents of equal length."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, (rows, seq_len + 1))
    place = np.arange(seq_len)
    length = -(-seq_len // documents)
    labels = tokens[:, 1:].copy()
    if documents > 1:
        labels[:, (place + 1) % length == 0] = -100
    positions, numbers = (np.broadcast_to(values, (rows, seq_len)) for values in (place % length, place // length))
    return {
        "input_ids": tokens[:, :-1].copy(),
        "labels": labels,
        "position_ids": positions.copy(),
        "document_ids": numbers.astype(np.int32),
    }
