"""The fewest recomputed layers that make a layout fit, for every kind of recomputation and offloading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kumi.plan.estimate import rank_share, representative_ranks
from kumi.plan.layout_batch import CHOICES, Bools, Floats, Ints, LayoutBatch
from kumi.plan.memory import device_memory
from kumi.plan.memory.total_memory import TotalMemory
from kumi.plan.pipeline.stages import RankStages
from kumi.plan.row_cache import SearchCaches
from kumi.plan.search.candidates import Pins
from kumi.spec.job import Job

# Indices into `CHOICES` of "none", for recomputation and offloading, and of offloaded activations.
NO_RECOMPUTE, NO_OFFLOAD, _OFFLOAD_ACTIVATIONS = 0, 0, CHOICES["offload"].index("activations")


class Candidates(NamedTuple):
    """Layouts whose recomputation and offloading are not chosen yet, with the content of their pipeline ranks.

    Memory is computed for a few ranks of each pipeline (`kumi.plan.estimate.representative_ranks`).

    `layouts`: one row per layout.
    `per_rank`: the rows of `layouts` repeated for each of the ranks.
    `stages`, `content`, `memory`: the layers, the tensors, and the device memory of each row of `per_rank`.
    `rank_layers`: the number of layers of each rank, (ranks, rows).
    `most_layers`: the largest number of layers of a rank, at least 1, (rows,).
    """

    job: Job
    layouts: LayoutBatch
    per_rank: LayoutBatch
    stages: RankStages
    content: device_memory.InvariantMemory
    memory: TotalMemory
    rank_layers: Floats
    most_layers: Ints

    def device_bytes(self, recompute: int, layers: int, offload: int) -> Floats:
        """Return the bytes of each rank, (ranks, rows), if `layers` of its layers recompute (-1: all)."""
        return self.memory.total(recompute, layers, offload).reshape(self.rank_layers.shape)

    def generation_bytes(self, offload: int) -> Floats:
        """Return the bytes of the fullest rank while a run with rollouts generates or scores, (rows,); 0 for others."""
        largest: Floats = self.memory.generation(offload).reshape(self.rank_layers.shape).max(axis=0)
        return largest

    def host_bytes(self, offload: int) -> Floats:
        """Return the largest number of bytes of host memory that a rank needs for offloading, (rows,)."""
        rows = self.per_rank.replaced(offload=np.full(len(self.per_rank), offload))
        size: Floats = device_memory.host_memory(self.job, rows, self.stages, self.content)
        largest: Floats = size.reshape(self.rank_layers.shape).max(axis=0)
        return largest

    def fits_host(self, offload: int) -> Bools:
        """Return whether a rank's share of the host memory, and of the drives, holds its offloaded bytes, (rows,)."""
        if offload == NO_OFFLOAD:
            return np.ones(len(self.layouts), np.bool_)
        host, devices = self.job.cluster.host, self.job.cluster.devices_per_node
        fits = self.host_bytes(offload) <= host.memory / devices
        word = CHOICES["offload"][offload]
        if word.endswith("-nvme"):
            fits &= self.host_bytes(CHOICES["offload"].index(word.removesuffix("-nvme"))) <= host.nvme / devices
        return fits


class Variant(NamedTuple):
    """A kind of recomputation and of offloading, applied to every row of `Candidates`.

    `recompute`, `offload`: indices into `CHOICES`.
    `bytes_one`, `bytes_all`: bytes of each rank if one of its layers recomputes, and if all do, (ranks, rows). Each
    further layer saves the same number of bytes.
    `fits_host`: whether the host holds the offloaded bytes, (rows,).
    `generation`: bytes of the fullest rank while a run with rollouts generates or scores, (rows,).
    `layers`: the pinned number of recomputed layers (-1: all), or None. If it is pinned, `bytes_one` and `bytes_all`
    are both the bytes with this number of layers.
    """

    recompute: int
    offload: int
    bytes_one: Floats
    bytes_all: Floats
    fits_host: Bools
    generation: Floats
    layers: int | None = None


def make_candidates(job: Job, layouts: LayoutBatch, caches: SearchCaches | None = None) -> Candidates:
    """Return `layouts` with the content of their first, an inner and their last pipeline rank."""
    ranks = _distinct_ranks(representative_ranks(job.model, layouts)[0])
    per_rank = layouts.take(np.tile(np.arange(len(layouts)), len(ranks)))
    stages = rank_share(job, per_rank, ranks.ravel())
    rank_layers = stages.layers.sum(axis=0).reshape(ranks.shape)
    content = device_memory.invariant_memory(job, per_rank, stages, caches)
    return Candidates(
        job,
        layouts,
        per_rank,
        stages,
        content,
        TotalMemory(job, per_rank, stages, content),
        rank_layers,
        np.maximum(rank_layers.max(axis=0), 1).astype(np.int64),
    )


def _distinct_ranks(ranks: Ints) -> Ints:
    """Return `ranks`, (ranks, rows), without those that equal an earlier one in all rows, as in short pipelines."""
    return ranks[[not any(np.array_equal(rank, other) for other in ranks[:place]) for place, rank in enumerate(ranks)]]


def variants(candidates: Candidates, pinned: Pins) -> Iterator[Variant]:
    """Yield every kind of recomputation and offloading that `pinned` allows, from the least to the most offloaded.

    Where states are offloaded, `bytes_one` follows from `bytes_all`: recomputing the other layers saves as many bytes
    as it does without offloading.
    """
    modes = _allowed("recompute", CHOICES["recompute"], pinned)
    plain = candidates.device_bytes(NO_RECOMPUTE, -1, NO_OFFLOAD)
    layers = pinned_recompute_layers(pinned)
    if layers is not None and layers > 0:
        modes = [mode for mode in modes if mode != NO_RECOMPUTE]
    few, many = (1, -1) if layers is None else (layers, layers)

    def bytes_with(mode: int, offload: int) -> tuple[Floats, Floats]:
        return candidates.device_bytes(mode, few, offload), candidates.device_bytes(mode, many, offload)

    not_offloaded = {mode: bytes_with(mode, NO_OFFLOAD) if mode != NO_RECOMPUTE else (plain, plain) for mode in modes}
    sizes: dict[tuple[str, int], tuple[Floats, Floats]] = {("none", mode): not_offloaded[mode] for mode in modes}
    for offload in _allowed("offload", possible_offloads(candidates.job), pinned):
        fits_host, generation = candidates.fits_host(offload), candidates.generation_bytes(offload)
        # Offloading to drives leaves as many bytes of device memory as offloading to the host.
        word = CHOICES["offload"][offload].removesuffix("-nvme")
        for mode in modes:
            if (word, mode) not in sizes:
                if offload == _OFFLOAD_ACTIVATIONS and mode != NO_RECOMPUTE:
                    sizes[word, mode] = bytes_with(mode, offload)
                else:
                    with_all = candidates.device_bytes(mode, many, offload)
                    bytes_one, bytes_all = not_offloaded[mode]
                    sizes[word, mode] = with_all + (bytes_one - bytes_all), with_all
            bytes_one, bytes_all = sizes[word, mode]
            own_layers = None if mode == NO_RECOMPUTE else layers
            yield Variant(mode, offload, bytes_one, bytes_all, fits_host, generation, own_layers)


def pinned_recompute_layers(pinned: Pins) -> int | None:
    """Return the pinned number of recomputed layers, -1 for all, or None if it is not pinned.

    A pinned kind of recomputation without a number of layers means all layers, as in a run file.
    """
    if "recompute_layers" not in pinned and pinned.get("recompute", "none") == "none":
        return None
    count = pinned.get("recompute_layers")
    return -1 if count is None else int(count)


def _allowed(name: str, words: Sequence[str], pinned: Pins) -> list[int]:
    """Return the indices of the `words` that agree with the pin of the field `name`."""
    return [CHOICES[name].index(word) for word in words if pinned.get(name, word) == word]


def possible_offloads(job: Job) -> list[str]:
    """Return the kinds of offloading; only "none" if the host's memory or its bandwidth is not described."""
    host = job.cluster.host
    if not (host.memory and host.device_bandwidth):
        return ["none"]
    return [word for word in CHOICES["offload"] if not word.endswith("-nvme") or (host.nvme and host.nvme_bandwidth)]


@dataclass(frozen=True)
class Fit:
    """How a variant fits, for every row.

    `fits`: whether it fits with some number of recomputed layers, (rows,).
    `layers`: the smallest such number, (rows,).
    `peak`: bytes with this number, (rows,).
    `count`, `fitting`: the number of distinct layouts, one per number of layers, and of those that fit.
    `least`: bytes if all layers recompute; infinite if the host is too small, (rows,).
    """

    fits: Bools
    layers: Ints
    peak: Floats
    count: int
    fitting: int
    least: Floats


def fit_variant(candidates: Candidates, variant: Variant, capacity: float) -> Fit:
    """Return the fewest layers that must recompute under `variant` so that no rank needs more than `capacity` bytes."""
    if variant.layers is not None:
        return _fit_pinned_layers(candidates, variant, variant.layers, capacity)
    if variant.recompute == NO_RECOMPUTE:
        return _fit_without_recompute(variant, capacity)
    most = candidates.most_layers
    least = np.where(variant.fits_host, np.maximum(variant.bytes_all.max(axis=0), variant.generation), np.inf)
    fits, layers, peak = least <= capacity, np.ones(len(least), np.int64), np.full(len(least), np.inf)
    # Most variants of most layouts do not fit with any number of layers.
    rows = np.flatnonzero(fits)
    bytes_one, bytes_all = variant.bytes_one[:, rows], variant.bytes_all[:, rows]
    further_layers = np.maximum(candidates.rank_layers[:, rows] - 1, 0)
    saved_per_layer = (bytes_one - bytes_all) / np.maximum(further_layers, 1)
    excess = bytes_one - capacity
    with np.errstate(divide="ignore", invalid="ignore"):
        more = np.where(excess > 0, np.ceil(excess / saved_per_layer), 0.0)
    fewest = 1 + np.where(np.isfinite(more) & (more >= 0), more, np.inf).max(axis=0)
    fits[rows] = fewest <= most[rows]
    layers[rows] = fewest = np.where(fits[rows], fewest, 1).astype(np.int64)
    in_training = (bytes_one - saved_per_layer * np.minimum(fewest - 1, further_layers)).max(axis=0)
    peak[rows] = np.maximum(in_training, variant.generation[rows])
    fitting = (most + 1 - layers)[fits].sum()
    return Fit(fits, layers, peak, int(most.sum()), int(fitting), least)


def _fit_without_recompute(variant: Variant, capacity: float) -> Fit:
    """Return the fit of a variant without recomputation."""
    peak = np.maximum(variant.bytes_all.max(axis=0), variant.generation)
    least = np.where(variant.fits_host, peak, np.inf)
    fits = least <= capacity
    return Fit(fits, np.ones(len(peak), np.int64), peak, len(peak), int(np.count_nonzero(fits)), least)


def _fit_pinned_layers(candidates: Candidates, variant: Variant, layers: int, capacity: float) -> Fit:
    """Return the fit with `layers` recomputed layers, -1 for all; it is illegal where no rank has so many layers."""
    legal = layers <= candidates.most_layers
    peak = np.maximum(variant.bytes_all.max(axis=0), variant.generation)
    least = np.where(variant.fits_host & legal, peak, np.inf)
    fits = least <= capacity
    count = candidates.most_layers if layers < 0 else np.full_like(candidates.most_layers, layers)
    return Fit(fits, count, peak, int(legal.sum()), int(fits.sum()), least)


def apply_variant(candidates: Candidates, variant: Variant, fit: Fit, index: Ints) -> LayoutBatch:
    """Return the layouts `index` under `variant`, with the fewest recomputed layers that fit."""
    layers = fit.layers[index]
    recomputes_all = (layers >= candidates.most_layers[index]) & (variant.layers in (None, -1))
    ones = np.ones(len(index), np.int64)
    return candidates.layouts.take(index).replaced(
        recompute=variant.recompute * ones,
        recompute_layers=np.where(recomputes_all | (variant.recompute == NO_RECOMPUTE), -1, layers),
        offload=variant.offload * ones,
    )
