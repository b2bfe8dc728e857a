"""How much must be recomputed so that a layout fits, for every way to recompute and to offload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kumi.plan.estimate import rank_share, representative_ranks
from kumi.plan.layout_batch import CHOICES, Floats, Ints, LayoutBatch
from kumi.plan.memory import device_memory
from kumi.plan.pipeline.stages import Share
from kumi.plan.search.candidates import Pins
from kumi.spec.job import Job

NONE, ACTIVATIONS = 0, CHOICES["offload"].index("activations")

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Bases:
    """Rows of which recomputation and offloading are open, and what each of the looked-at pp ranks holds of them.

    `every` are the rows of `x` once for each rank, `part` what that rank holds and `known` what that is; `layers` how
    many layers it has, (ranks, rows), and `most` the largest number a rank has, (rows,).
    """

    job: Job
    x: LayoutBatch
    every: LayoutBatch
    part: Share
    known: device_memory.InvariantMemory
    layers: Floats
    most: Ints

    def bytes(self, recompute: int, layers: int, offload: int) -> Floats:
        """Bytes on each of the ranks, (ranks, rows), when `layers` of it recompute (-1: all)."""
        same = np.ones(len(self.every), np.int64)
        rows = self.every.replaced(recompute=recompute * same, recompute_layers=layers * same, offload=offload * same)
        sizes = device_memory.stage_memory(self.job, rows, self.part, self.known).values()
        return np.asarray(sum(sizes)).reshape(self.layers.shape)

    def host_bytes(self, offload: int) -> Floats:
        """Bytes that a rank keeps on its host, the most of the ranks looked at, (rows,)."""
        rows = self.every.replaced(offload=np.full(len(self.every), offload))
        size: Floats = device_memory.host_memory(self.job, rows, self.part, self.known)
        largest: Floats = size.reshape(self.layers.shape).max(axis=0)
        return largest

    def held(self, offload: int) -> Mask:
        """Whether a rank's share of its host, and of the drives, can take what is offloaded, (rows,)."""
        if not offload:
            return np.ones(len(self.x), np.bool_)
        host, each = self.job.cluster.host, self.job.cluster.devices_per_node
        fits = self.host_bytes(offload) <= host.memory / each
        word = CHOICES["offload"][offload]
        if word.endswith("-nvme"):
            fits &= self.host_bytes(CHOICES["offload"].index(word.removesuffix("-nvme"))) <= host.nvme / each
        return fits


@dataclass(frozen=True)
class Variant:
    """One way to recompute and to offload, of every row of `Bases`.

    `first` and `last` are bytes on every rank when one of its layers recomputes, and when all do, (ranks, rows): every
    further layer saves as much. `held` are the rows whose host can take what is offloaded. Where so many `layers` are
    pinned (-1: all), `first` and `last` are both those of that number.
    """

    recompute: int
    offload: int
    first: Floats
    last: Floats
    held: Mask
    layers: int | None = None


def bases_of(job: Job, x: LayoutBatch) -> Bases:
    """`x` with what the pp ranks hold that are looked at."""
    ranks = representative_ranks(job.model, x)[0]
    every = x.take(np.tile(np.arange(len(x)), len(ranks)))
    part = rank_share(job, every, ranks.ravel())
    layers = part.layers.sum(axis=0).reshape(ranks.shape)
    return Bases(
        job,
        x,
        every,
        part,
        device_memory.invariant_memory(job, every, part),
        layers,
        np.maximum(layers.max(axis=0), 1).astype(np.int64),
    )


def variants(rows: Bases, pinned: Pins) -> Iterator[Variant]:
    """Every way to recompute and offload that `pinned` allows, from the least to the most offloaded.

    What offloading states saves does not depend on what is recomputed, so that the bytes of most combinations are sums.
    """
    modes, plain = _allowed("recompute", CHOICES["recompute"], pinned), rows.bytes(NONE, -1, NONE)
    layers = pinned_layers(pinned)
    if layers is not None and layers > 0:
        modes = [mode for mode in modes if mode]
    few, many = (1, -1) if layers is None else (layers, layers)
    ends = {
        mode: (rows.bytes(mode, few, NONE), rows.bytes(mode, many, NONE)) if mode else (plain, plain) for mode in modes
    }
    saved = {"none": np.zeros_like(plain)}
    for offload in _allowed("offload", offloads(rows.job), pinned):
        held = rows.held(offload)
        word = CHOICES["offload"][offload]
        # The device does not see whether what left it went on to a drive.
        saving = saved.get(word.removesuffix("-nvme"))
        if saving is None:
            saving = saved[word.removesuffix("-nvme")] = plain - rows.bytes(NONE, -1, offload)
        for mode in modes:
            if offload == ACTIVATIONS and mode:
                between = (rows.bytes(mode, few, offload), rows.bytes(mode, many, offload))
            else:
                between = (ends[mode][0] - saving, ends[mode][1] - saving)
            yield Variant(mode, offload, *between, held, layers if mode else None)


def pinned_layers(pinned: Pins) -> int | None:
    """How many layers are pinned to recompute, -1 for all; None where that is open. Who pins what is recomputed, and
    not in how many layers, means all, as a run file does."""
    if "recompute_layers" not in pinned and pinned.get("recompute", "none") == "none":
        return None
    count = pinned.get("recompute_layers")
    return -1 if count is None else int(count)


def _allowed(name: str, words: Sequence[str], pinned: Pins) -> list[int]:
    return [CHOICES[name].index(word) for word in words if pinned.get(name, word) == word]


def offloads(job: Job) -> list[str]:
    """What can be offloaded: nothing where the host's memory or the way there is not known."""
    host = job.cluster.host
    if not (host.memory and host.device_bandwidth):
        return ["none"]
    return [word for word in CHOICES["offload"] if not word.endswith("-nvme") or (host.nvme and host.nvme_bandwidth)]


@dataclass(frozen=True)
class Fit:
    """For every row, whether a variant `fits`, how few `layers` then recompute, and the `peak` bytes with these.

    `count` variants were told apart, of which `fitting` fit; `least` bytes are needed when all layers recompute.
    """

    fits: Mask
    layers: Ints
    peak: Floats
    count: int
    fitting: int
    least: Floats


def fit(rows: Bases, one: Variant, capacity: float) -> Fit:
    """The fewest layers that must recompute under variant `one` so that no rank needs more than `capacity` bytes."""
    if one.layers is not None:
        return _fixed(rows, one, one.layers, capacity)
    falls = (one.first - one.last) / np.maximum(rows.layers - 1, 1)
    over = np.maximum(one.first - capacity, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        more = np.where(over > 0, np.ceil(over / falls), 0.0)
    fewest = 1 + np.where(np.isfinite(more) & (more >= 0), more, np.inf).max(axis=0)
    most = rows.most if one.recompute else np.ones_like(rows.most)
    least = np.where(one.held, one.last.max(axis=0), np.inf)
    fits = (least <= capacity) & (fewest <= most)
    layers = np.where(fits, fewest, 1).astype(np.int64)
    peak = (one.first - falls * np.minimum(layers - 1, np.maximum(rows.layers - 1, 0))).max(axis=0)
    fitting = np.where(fits, most - layers + 1, 0)
    return Fit(fits, layers, peak, int(most.sum()), int(fitting.sum()), least)


def _fixed(rows: Bases, one: Variant, layers: int, capacity: float) -> Fit:
    """The same where `layers` recompute, -1 for all: rows that have fewer are not legal."""
    legal, peak = layers <= rows.most, one.last.max(axis=0)
    least = np.where(one.held & legal, peak, np.inf)
    fits = least <= capacity
    count = rows.most if layers < 0 else np.full_like(rows.most, layers)
    return Fit(fits, count, peak, int(legal.sum()), int(fits.sum()), least)


def picked(rows: Bases, one: Variant, found: Fit, index: Ints) -> LayoutBatch:
    """The rows numbered `index`, as they are under variant `one` with the fewest layers recomputed."""
    layers = found.layers[index]
    all_of_them = (layers >= rows.most[index]) & (one.layers in (None, -1)) | (one.recompute == NONE)
    same = np.ones(len(index), np.int64)
    return rows.x.take(index).replaced(
        recompute=one.recompute * same, recompute_layers=np.where(all_of_them, -1, layers), offload=one.offload * same
    )
