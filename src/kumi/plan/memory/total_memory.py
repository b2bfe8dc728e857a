"""Total device memory of many layouts under every kind of recomputation and offloading.

`kumi.plan.memory.device_memory` computes the same bytes by kind. A search needs only their sum, for each layout
under a dozen kinds of recomputation and offloading. The terms that these sums share are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kumi.plan.layout_batch import CHOICES, Bools, Floats, LayoutBatch
from kumi.plan.memory.device_memory import (
    InvariantMemory,
    allocator_overhead,
    backward_peak,
    bytes_in_use_of_offloaded_states,
    covered_share,
    critic_memory,
    moments_without_activations,
    reference_copies,
    resident_activations,
    rollout_moments,
    two_layers,
    weight_casts,
)
from kumi.plan.pipeline.stages import RankStages
from kumi.spec.job import Job

_NONE = CHOICES["recompute"].index("none")


class _ActivationBytes(NamedTuple):
    """Activation bytes of a rank with one kind of recomputation in all of its layers, (rows,) each.

    `resident`: saved activations of all microbatches in flight.
    `backward`: transient bytes of one layer's backward pass.
    `two_layers`: saved activations that stay on the device where activations are offloaded.
    """

    resident: Floats
    backward: Floats
    two_layers: Floats


class _Peak(NamedTuple):
    """Bytes of a rank at its fullest moment with some kind and number of recomputed layers, (rows,) each.

    `states`: parameters, gradients and optimizer states.
    `transient`: gathered parameters and gradients, and the head.
    `activations`, `casts`: activations, and copies of weights.
    `resident`: saved activations, which may be offloaded.
    `at_end`, `in_layer`: whether the moment is the end of the backward pass, or the backward pass of a layer.
    """

    states: Floats
    transient: Floats
    activations: Floats
    casts: Floats
    resident: Floats
    at_end: Bools
    in_layer: Bools

    def pick(self, sizes: Sequence[Floats]) -> Floats:
        """Return the bytes at the fullest moment; `sizes` are those at the loss, in a layer and at the end."""
        return np.where(self.at_end, sizes[2], np.where(self.in_layer, sizes[1], sizes[0]))


class TotalMemory:
    """Device bytes of ranks with a share of the model: `total` is the sum over the kinds of `training_memory`.

    A run with rollouts may need more while it generates or scores: see `generation`.
    """

    def __init__(self, job: Job, layouts: LayoutBatch, share: RankStages, invariant: InvariantMemory) -> None:
        self._job, self._layouts, self._share, self._invariant = job, layouts, share, invariant
        self._layers = share.layers.sum(axis=0)
        self._overhead = allocator_overhead(job)
        moments = moments_without_activations(job, layouts, share, invariant)
        # Each of these has an entry for each moment: the loss, a layer's backward pass, the end of the backward pass.
        self._states = [grads + optimizer for grads, optimizer in zip(moments["grads"], moments["optimizer"])]
        self._optimizer = moments["optimizer"]
        self._gathered, self._head = moments["gathered"], moments["head"]
        self._transient = [head + gathered for head, gathered in zip(self._head, self._gathered)]
        self._sums = [states + rest for states, rest in zip(self._states, self._transient)]
        self._in_use = bytes_in_use_of_offloaded_states(job, invariant.params)
        self._activations: dict[int, _ActivationBytes] = {}
        self._peaks: dict[tuple[int, int], _Peak] = {}
        self._critic: dict[int, Floats] = {}

    def total(self, recompute: int, layers: int, offload: int) -> Floats:
        """Return the bytes of each rank, (rows,), if `layers` of its layers recompute (-1: all).

        `recompute`, `offload`: indices into `CHOICES`.
        """
        peak, word = self._peak(recompute, layers), CHOICES["offload"][offload].removesuffix("-nvme")
        outside, buffers = self._invariant.libraries, self._invariant.buffers
        if word == "states":
            transient = np.maximum(self._in_use, peak.pick(self._gathered)) + peak.pick(self._head)
            transient = transient + peak.activations + buffers
            return outside + self._critic_memory(offload) + (1 + self._overhead) * transient
        states = peak.states + self._critic_memory(offload)
        activations = peak.activations
        if word == "activations":
            moved = np.maximum(0.0, peak.resident - self._activation_bytes(recompute).two_layers)
            activations = np.maximum(0.0, activations - moved)
        if word == "optimizer":
            states = states - peak.pick(self._optimizer)
        transient = peak.transient + activations + peak.casts + buffers
        return states + outside + (1 + self._overhead) * transient

    def _critic_memory(self, offload: int) -> Floats:
        """Return the bytes of the states of a critic, (rows,); 0 without one."""
        if offload not in self._critic:
            rows = self._layouts.replaced(offload=np.full(len(self._layouts), offload))
            self._critic[offload] = critic_memory(self._job, rows, self._invariant)
        return self._critic[offload]

    def generation(self, offload: int) -> Floats:
        """Return the bytes of each rank, (rows,), while a run with rollouts generates or scores; 0 for other runs."""
        if self._job.rollout is None:
            return np.zeros(len(self._layouts))
        rows = self._layouts.replaced(offload=np.full(len(self._layouts), offload))
        moments = rollout_moments(self._job, rows, self._invariant)
        return np.asarray(np.max([np.sum(list(moment.values()), axis=0) for moment in moments], axis=0))

    def _peak(self, recompute: int, layers: int) -> _Peak:
        """Return the bytes at the fullest moment, which does not depend on offloading."""
        if (recompute, layers) not in self._peaks:
            rows = self._rows_with(recompute, layers)
            own, plain = self._activation_bytes(recompute), self._activation_bytes(_NONE)
            resident = own.resident
            if layers >= 0:  # saved activations are linear in the recomputed layers
                share = covered_share(rows, self._layers)
                resident = plain.resident + share * (own.resident - plain.resident)
            in_backward = resident + own.backward
            at_loss, in_layer = self._sums[0] + resident, self._sums[1] + in_backward
            is_in_layer, is_at_end = in_layer > at_loss, self._sums[2] > np.maximum(at_loss, in_layer)
            casts = weight_casts(self._job, rows, self._invariant.params, self._layers)
            none = np.zeros_like(resident)
            peak = _Peak(none, none, none, casts, resident, is_at_end, is_in_layer)
            params = (1 + reference_copies(self._job)) * self._invariant.states["params"]
            params = params + self._invariant.rewards.weights
            states = params + peak.pick(self._states)
            activations = peak.pick((resident, in_backward, none))
            self._peaks[recompute, layers] = peak._replace(
                states=states, transient=peak.pick(self._transient), activations=activations
            )
        return self._peaks[recompute, layers]

    def _rows_with(self, recompute: int, layers: int) -> LayoutBatch:
        """Return the layouts with the kind `recompute` of recomputation in `layers` layers (-1: all)."""
        ones = np.ones(len(self._layouts), np.int64)
        return self._layouts.replaced(recompute=recompute * ones, recompute_layers=layers * ones)

    def _activation_bytes(self, recompute: int) -> _ActivationBytes:
        """Return the activation bytes with this kind of recomputation in all layers."""
        if recompute not in self._activations:
            rows, activations = self._rows_with(recompute, -1), self._invariant.activations
            self._activations[recompute] = _ActivationBytes(
                resident_activations(self._job, rows, self._share, activations),
                backward_peak(self._job, rows, self._share, activations),
                two_layers(self._job, rows, activations),
            )
        return self._activations[recompute]
