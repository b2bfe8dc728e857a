"""Total device memory of many layouts under every kind of recomputation and offloading.

`kumi.plan.memory.device_memory` computes the same bytes by kind. A search needs only their sum, a dozen times for each
layout, so that everything that these times share is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kumi.plan.layout_batch import CHOICES, Floats, LayoutBatch
from kumi.plan.memory.device_memory import (
    InvariantMemory,
    allocator_overhead,
    backward_peak,
    bytes_in_use_of_offloaded_states,
    moments_without_activations,
    recomputed_share,
    resident_activations,
    two_layers,
    weight_casts,
)
from kumi.plan.pipeline.stages import RankStages
from kumi.spec.job import Job

_NONE = CHOICES["recompute"].index("none")


@dataclass(frozen=True)
class _ActivationBytes:
    """Activation bytes of a rank with one kind of recomputation in all of its layers, (rows,) each.

    `resident`: saved activations of all microbatches in flight.
    `backward`: transient bytes of one layer's backward pass.
    `two_layers`: saved activations that stay on the device where activations are offloaded.
    """

    resident: Floats
    backward: Floats
    two_layers: Floats


class TotalMemory:
    """Device bytes of ranks with a share of the model; `total` is the sum of `device_memory.stage_memory`."""

    def __init__(self, job: Job, layouts: LayoutBatch, share: RankStages, invariant: InvariantMemory) -> None:
        self._job, self._layouts, self._share, self._invariant = job, layouts, share, invariant
        self._layers = share.layers.sum(axis=0)
        self._overhead = allocator_overhead(job)
        moments = moments_without_activations(job, layouts, share, invariant)
        self._states = [grads + optimizer for grads, optimizer in zip(moments["grads"], moments["optimizer"])]
        self._optimizer = moments["optimizer"]
        self._gathered, self._head = moments["gathered"], moments["head"]
        self._activations: dict[int, _ActivationBytes] = {}

    def total(self, recompute: int, layers: int, offload: int) -> Floats:
        """Return the bytes of each rank, (rows,), if `layers` of its layers recompute (-1: all).

        `recompute`, `offload`: indices into `CHOICES`.
        """
        layouts = self._with(recompute, layers)
        share = recomputed_share(layouts, self._layers)
        own, plain = self._of(recompute), self._of(_NONE)
        # Saved activations are linear in the recomputed layers.
        resident = own.resident if layers < 0 else plain.resident + share * (own.resident - plain.resident)
        activations = (resident, resident + own.backward)
        transient = [head + gathered for head, gathered in zip(self._head, self._gathered)]
        sums = [states + rest for states, rest in zip(self._states, transient)]
        sums = [sums[0] + activations[0], sums[1] + activations[1], sums[2]]
        later = sums[1] > sums[0]
        last = sums[2] > np.where(later, sums[1], sums[0])

        def at_peak(sizes: Sequence[Floats]) -> Floats:
            return np.where(last, sizes[2], np.where(later, sizes[1], sizes[0]))

        word = CHOICES["offload"][offload].removesuffix("-nvme")
        activation_bytes = at_peak((*activations, np.zeros_like(resident)))
        resident_states = self._invariant.states["params"] + at_peak(self._states)
        if word == "activations":
            moved = np.maximum(0.0, resident - own.two_layers)
            activation_bytes = np.maximum(0.0, activation_bytes - moved)
        casts = weight_casts(self._job, layouts, self._invariant.params, self._layers)
        if word == "states":
            resident_states = casts = np.zeros_like(resident)
            in_use = bytes_in_use_of_offloaded_states(self._job, self._invariant.params)
            transient_bytes = np.maximum(in_use, at_peak(self._gathered)) + at_peak(self._head)
        else:
            transient_bytes = at_peak(transient)
        if word == "optimizer":
            resident_states = resident_states - at_peak(self._optimizer)
        transient_bytes = transient_bytes + activation_bytes + casts + self._invariant.buffers
        return resident_states + self._invariant.libraries + (1 + self._overhead) * transient_bytes

    def _with(self, recompute: int, layers: int) -> LayoutBatch:
        ones = np.ones(len(self._layouts), np.int64)
        return self._layouts.replaced(recompute=recompute * ones, recompute_layers=layers * ones)

    def _of(self, recompute: int) -> _ActivationBytes:
        """Return the activation bytes with this kind of recomputation in all layers."""
        if recompute not in self._activations:
            rows, activations = self._with(recompute, -1), self._invariant.activations
            self._activations[recompute] = _ActivationBytes(
                resident_activations(self._job, rows, self._share, activations),
                backward_peak(self._job, rows, self._share, activations),
                two_layers(self._job, rows, activations),
            )
        return self._activations[recompute]
