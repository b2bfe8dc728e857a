"""The constants of the planner that no document states and that published runs have to give: names, values, bounds.

    constants_of(job)  ->  those that a job's estimate depends on
    estimator(factors) ->  the step times that the planner estimates with constants multiplied by `factors`

Of devices and networks, those whose file says "fitted"; of engines, the host's time per kernel; and the planner's own,
which are the same on all devices.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

import kumi
from kumi.plan.estimate import representative_ranks
from kumi.plan.layout_batch import batch_layouts
from kumi.plan.time import attention_costs, collective_times, expert_costs, layer_costs, update_time
from kumi.plan.time.step_time import step_times
from kumi.spec.job import Job
from kumi.spec.layout import Layout

Floats = NDArray[np.float64]
CLUSTERS = Path(kumi.__file__).parent / "clusters"


@dataclass(frozen=True)
class Constant:
    """`lower` and `upper`: bounds of the value. `scaled`: a job with the constant multiplied; None for one of the
    planner's own, which is an attribute of a module (`OWN`)."""

    name: str
    value: float
    lower: float
    upper: float
    scaled: Callable[[Job, float], Job] | None = None


def _numbers(module: ModuleType, name: str, lower: float, upper: float) -> tuple[ModuleType, str, Constant]:
    value = getattr(module, name)
    value = value["cuda"] if isinstance(value, dict) else value[0] if isinstance(value, tuple) else value
    return module, name, Constant(f"planner: {name.strip('_').lower()}", value, lower, upper)


# The planner's own: how long ranks wait for each other, how much communication slows the compute that hides it, the
# share of tensor-parallel messages that pipelined matmuls hide, and the speeds of attention by blocks, of attention
# with scores in memory, of heads that are no multiple of eight, of experts' matmuls, and of the sorting of tokens.
OWN = (
    _numbers(collective_times, "_PASS_SECONDS", 1e-5, 1e-3),
    _numbers(update_time, "_OVERLAP_SLOWDOWN", 0.02, 1.0),
    _numbers(layer_costs, "_TP_OVERLAP", 0.1, 1.0),
    _numbers(layer_costs, "_GROUPED_MATMUL_SPEED", 0.2, 1.0),
    _numbers(attention_costs, "_RING_SPEED", 0.3, 1.0),
    _numbers(attention_costs, "_SCORE_MATMULS", 0.1, 1.0),
    _numbers(attention_costs, "_UNALIGNED_HEADS", 0.02, 1.0),
    _numbers(expert_costs, "_EXCHANGE_PASSES", 1.0, 30.0),
)


def constants_of(job: Job) -> Iterator[Constant]:
    """The constants that may be fitted and on which the estimate of `job` may depend."""
    device, dtype = job.cluster.device, job.precision.matmul_dtype
    if _fitted("devices", device.name, "matmul"):
        share = device.matmul_share(dtype)
        yield Constant(f"{device.name}: matmul {dtype}", share, 0.2, 1.0, _scale_matmul)
    if _fitted("devices", device.name, "stream"):
        yield Constant(f"{device.name}: stream", device.stream, 0.2, 1.0, _scale_stream)
    if _fitted("devices", device.name, "attention"):
        yield Constant(f"{device.name}: attention", device.attention[0], 0.1, 1.0, _scale_attention)
    network = job.cluster.links[-1] if job.cluster.links else None
    if network is not None and _fitted("networks", network.name, "efficiency"):
        yield Constant(f"{network.name}: efficiency", network.efficiency, 0.2, 1.0, _scale_network)
    yield Constant(f"{job.engine.name}: dispatch", job.engine.dispatch, 0.5, 20.0, _scale_dispatch)
    yield from (constant for _, _, constant in OWN)


def estimator(factors: Mapping[str, float]) -> Callable[[Job, Sequence[Layout]], tuple[Floats, Floats]]:
    """Step times with every constant multiplied by its factor, 1 where `factors` has none; and zeros for memory."""

    def seconds(job: Job, layouts: Sequence[Layout]) -> tuple[Floats, Floats]:
        for constant in constants_of(job):
            if constant.scaled is not None and factors.get(constant.name, 1.0) != 1.0:
                job = constant.scaled(job, factors[constant.name])
        with _own(factors):
            return _seconds(job, layouts), np.zeros(len(layouts))

    return seconds


def _seconds(job: Job, layouts: Sequence[Layout]) -> Floats:
    result = np.empty(len(layouts))
    for stage_layers in dict.fromkeys(layout.stage_layers for layout in layouts):
        members = [index for index, layout in enumerate(layouts) if layout.stage_layers == stage_layers]
        batch = batch_layouts([layouts[index] for index in members])
        if stage_layers:
            ranks = np.repeat(np.arange(len(stage_layers))[:, None], len(members), axis=1)
            counts = np.ones(ranks.shape)
        else:
            ranks, counts = representative_ranks(job.model, batch)
        result[members] = step_times(job, batch, ranks, counts, stage_layers).seconds
    return result


@contextmanager
def _own(factors: Mapping[str, float]) -> Iterator[None]:
    """The planner's own constants multiplied by their factors, inside the block."""
    before = [getattr(module, name) for module, name, _ in OWN]
    try:
        for (module, name, constant), value in zip(OWN, before, strict=True):
            setattr(module, name, _times(value, factors.get(constant.name, 1.0)))
        yield
    finally:
        for (module, name, _), value in zip(OWN, before, strict=True):
            setattr(module, name, value)


def _times(value: object, factor: float) -> object:
    if isinstance(value, dict):
        return {key: factor * item for key, item in value.items()}
    return tuple(factor * item for item in value) if isinstance(value, tuple) else factor * value


def _scale_matmul(job: Job, factor: float) -> Job:
    device, dtype = job.cluster.device, job.precision.matmul_dtype
    return _with_device(job, matmul=(*device.matmul, (dtype, device.matmul_share(dtype) * factor)))


def _scale_stream(job: Job, factor: float) -> Job:
    return _with_device(job, stream=job.cluster.device.stream * factor)


def _scale_attention(job: Job, factor: float) -> Job:
    forward, backward = job.cluster.device.attention
    return _with_device(job, attention=(forward * factor, backward * factor))


def _with_device(job: Job, **fields: object) -> Job:
    return replace(job, cluster=replace(job.cluster, device=replace(job.cluster.device, **fields)))


def _scale_network(job: Job, factor: float) -> Job:
    *inner, network = job.cluster.links
    links = (*inner, replace(network, efficiency=network.efficiency * factor))
    return replace(job, cluster=replace(job.cluster, links=links))


def _scale_dispatch(job: Job, factor: float) -> Job:
    return replace(job, engine=replace(job.engine, dispatch=job.engine.dispatch * factor))


@lru_cache(maxsize=1024)
def _fitted(folder: str, name: str, field: str) -> bool:
    """Whether the file of a device or network with this name says that `field` was fitted."""
    return any(
        source.startswith("fitted")
        for file in _files(folder)
        if file["name"] == name
        for fields, source in file["sources"].items()
        if field in fields.split(", ")
    )


@lru_cache(maxsize=2)
def _files(folder: str) -> tuple[dict, ...]:
    return tuple(tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted((CLUSTERS / folder).glob("*.toml")))
