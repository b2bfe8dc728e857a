"""Device memory of a rank in bytes, by kind.

    states (`kumi.plan.memory.states`) + activations (`kumi.plan.memory.activations`) + logits + buffers
    + libraries and allocator overhead

The formulas take a `LayoutBatch`, for one layout or millions; (rows,) is one value for each layout. Memory can peak at
three moments of a step: the loss, with the logits; the backward pass of a layer, with its gradients and recomputed
activations; and the end of the backward pass. The estimate is the largest of the three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kumi.plan.context_traffic import kv_grad_itemsize
from kumi.plan.estimates import MemoryEstimate
from kumi.plan.layout_batch import CHOICES, Bools, Floats, Ints, LayoutBatch, batch_layouts
from kumi.plan.memory.activations import LayerActivations, ModelActivations, model_activations
from kumi.plan.memory.generation_moment import generation_kinds
from kumi.plan.memory.process import HEAP_OVERHEAD, process_bytes
from kumi.plan.memory.scoring_memory import RewardModelBytes, reward_model_bytes
from kumi.plan.memory.states import (
    RankParams,
    UnshardedBytes,
    num_shards,
    rank_params,
    resident_state_bytes,
    unsharded_bytes,
    update_copy_bytes,
)
from kumi.plan.pipeline.stages import RankStages, rank_stages
from kumi.plan.row_cache import SearchCaches
from kumi.plan.uncertainty.margin import memory_margin
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import CHUNK_LOGITS, MIN_CHUNK_TOKENS, SCORE_CHUNK, head_ops, unique_layer_ops
from kumi.spec.op import Dim
from kumi.spec.precision import ITEMSIZE
from kumi.spec.schedules import FORWARDS_FIRST
from kumi.spec.sharding import shard_size
from kumi.spec.techniques import HOST_BUCKET_ELEMENTS, STAGING_BUFFERS

_NONE, _FULL = (CHOICES["recompute"].index(name) for name in ("none", "full"))
_NOT_OFFLOADED = CHOICES["offload"].index("none")

# Memory that PyTorch's allocator reserves beyond the allocated memory, as a share of transient memory, by the engine's
# kernels. Blocks are rounded up and free space between them is fragmented; states are allocated once and do not count.
# torchtitan's documents of December 2024 and its commits 808 and 822 report three layouts, compiled (0.08, 0.10, 0.13)
# and op by op (0.17, 0.20, 0.20). As a share of all allocated memory the overhead was 0.028 to 0.093 in 43 runs of
# fused kernels on B200 (SimuMax 1.2).
ALLOCATOR_OVERHEAD = {"eager": 0.18, "fused-norms": 0.18, "fused": 0.10, "compiled": 0.10}
_STATES = ("params", "grads", "optimizer")
# The kinds whose bytes differ between the moments of a step, in the order in which they are added up.
_KINDS_OF_MOMENTS = ("grads", "gathered", "optimizer", "activations", "head")

# Bytes of NCCL's buffers for a process group, outside the allocator: 544 MB for two A100 and 688 MB for more
# (NVIDIA/nccl issue 964). A group that runs all-to-all takes 3.3 GB on eight H100 (issue 1685).
_GROUP_BYTES, _ALL_TO_ALL_GROUP_BYTES = 0.65e9, 3.3e9


def usable_memory(job: Job) -> int:
    """Return the bytes of a device that an estimate for `job` may fill: all but the margin."""
    return int((1 - memory_margin(job)) * job.cluster.device.memory)


class InvariantMemory(NamedTuple):
    """The parts of a rank's memory that depend neither on recomputation nor on offloading.

    `params`: sizes of the rank's parameters.
    `activations`: activation bytes per token of the parts of the model.
    `states`: resident bytes of parameters, gradients and optimizer states.
    `update`: transient bytes of the optimizer update.
    `unsharded`: transient bytes of sharded states.
    `buffers`: bytes of communication buffers.
    `libraries`: bytes outside the allocator.
    `rewards`: bytes of the reward models of a run with rollouts.
    `critic`: resident bytes of a critic's states, by kind as in `states`; None without a critic.
    """

    params: RankParams
    activations: ModelActivations
    states: dict[str, Floats]
    update: Floats
    unsharded: UnshardedBytes
    buffers: Floats
    libraries: Floats
    rewards: RewardModelBytes
    critic: dict[str, Floats] | None = None


def invariant_memory(
    job: Job, layouts: LayoutBatch, share: RankStages, caches: SearchCaches | None = None
) -> InvariantMemory:
    """Return the memory of a rank with the `share` of the model that does not depend on recomputation or offloading."""
    params = rank_params(job, layouts, share, None if caches is None else caches.params)
    return InvariantMemory(
        params,
        model_activations(job, layouts, None if caches is None else caches.activations),
        resident_state_bytes(job, layouts, params),
        update_copy_bytes(job, layouts, params),
        unsharded_bytes(job, layouts, params, num_microbatches(job, layouts)),
        _buffers(job, layouts),
        _libraries(job, layouts),
        reward_model_bytes(job, layouts),
        None if job.critic is None else _states_of_critic(job.of_critic, layouts, share),
    )


def _states_of_critic(job: Job, layouts: LayoutBatch, share: RankStages) -> dict[str, Floats]:
    """Return the resident bytes of parameters, gradients and optimizer states of the critic that `job` trains."""
    return resident_state_bytes(job, layouts, rank_params(job, layouts, share))


def stage_memory(
    job: Job, layouts: LayoutBatch, share: RankStages, invariant: InvariantMemory | None = None
) -> dict[str, Floats]:
    """Return the bytes by kind of `MemoryEstimate` on a rank with the `share` of the model, (rows,) each.

    `invariant` is the result of `invariant_memory`, computed here if not given. The peak of a run with rollouts may be
    while it generates or while reward models score.
    """
    invariant = invariant or invariant_memory(job, layouts, share)
    sizes = training_memory(job, layouts, share, invariant)
    for moment in () if job.rollout is None else rollout_moments(job, layouts, invariant):
        sizes = _larger(sizes, moment)
    return sizes


def training_memory(
    job: Job, layouts: LayoutBatch, share: RankStages, invariant: InvariantMemory | None = None
) -> dict[str, Floats]:
    """Return the bytes by kind of `MemoryEstimate` at the peak of an update, (rows,) each.

    A critic is trained when the gradients of the policy are freed, and has the same layers without logits, so that the
    peak is in the policy's update.
    """
    invariant = invariant or invariant_memory(job, layouts, share)
    params, activations = invariant.params, invariant.activations
    resident = resident_activations(job, layouts, share, activations)
    backward = backward_peak(job, layouts, share, activations)
    moments = moments_without_activations(job, layouts, share, invariant)
    moments["activations"] = (resident, resident + backward, np.zeros(len(layouts)))
    sizes = invariant.states | _largest_moment({kind: moments[kind] for kind in _KINDS_OF_MOMENTS})
    sizes["weights"] = weight_casts(job, layouts, params, share.layers.sum(axis=0))
    sizes["buffers"] = invariant.buffers
    if layouts.offload.any():
        moved = np.maximum(0.0, resident - two_layers(job, layouts, activations))
        sizes |= _after_offload(job, layouts, params, sizes, moved)
    transient = np.sum([size for kind, size in sizes.items() if kind not in _STATES], axis=0)
    sizes["reserved"] = invariant.libraries + allocator_overhead(job) * transient
    if job.rollout is None:
        return sizes
    rewards = np.where(_offloads(layouts, "states"), 0.0, invariant.rewards.weights)
    return sizes | {
        "reference": reference_copies(job) * sizes["params"],
        "critic": critic_memory(job, layouts, invariant),
        "cache": np.zeros(len(layouts)),
        "reward_models": rewards,
    }


def _larger(sizes: dict[str, Floats], others: dict[str, Floats]) -> dict[str, Floats]:
    """Return the bytes by kind of `others` where their sum is larger, else those of `sizes`.

    A kind that is missing in `others` counts as 0.
    """
    larger = np.sum(list(others.values()), axis=0) > np.sum(list(sizes.values()), axis=0)
    return {kind: np.where(larger, others.get(kind, 0.0), size) for kind, size in sizes.items()}


def reference_copies(job: Job) -> int:
    """Return the number of models in memory beside the one that is trained: 1 for a reference of a run with rollouts.

    The reference has the layout and the dtypes of the trained model.
    """
    return int(job.rollout is not None and job.rollout.reference)


def critic_memory(job: Job, layouts: LayoutBatch, invariant: InvariantMemory) -> Floats:
    """Return the bytes of a critic's states while it is not trained, (rows,); 0 without one."""
    if invariant.critic is None:
        return np.zeros(len(layouts))
    return np.asarray(sum(_states_at_rest(job, layouts, invariant.critic).values()))


def rollout_moments(job: Job, layouts: LayoutBatch, invariant: InvariantMemory) -> list[dict[str, Floats]]:
    """Return the bytes by kind while a run with rollouts generates, and while its reward models score, if any."""
    moments = [generation_memory(job, layouts, invariant)]
    if job.rollout is not None and job.rollout.reward_models:
        moments.append(scoring_memory(job, layouts, invariant))
    return moments


def generation_memory(job: Job, layouts: LayoutBatch, invariant: InvariantMemory) -> dict[str, Floats]:
    """Return the bytes by kind of `MemoryEstimate` while a run with rollouts generates, (rows,) each."""
    return _between_updates(job, layouts, invariant, generation_kinds(job, layouts, invariant.params))


def scoring_memory(job: Job, layouts: LayoutBatch, invariant: InvariantMemory) -> dict[str, Floats]:
    """Return the bytes by kind of `MemoryEstimate` while reward models score, (rows,) each."""
    rewards, none = invariant.rewards, np.zeros(len(layouts))
    kinds = {"gathered": rewards.gathered, "weights": none, "activations": rewards.activations, "cache": none}
    return _between_updates(job, layouts, invariant, kinds)


def _states_at_rest(job: Job, layouts: LayoutBatch, states: dict[str, Floats]) -> dict[str, Floats]:
    """Return the bytes of `states` on the device between updates, by kind, (rows,) each.

    Gradients are freed, unless they have persistent buffers.
    """
    no_optimizer = _offloads(layouts, "states") | _offloads(layouts, "optimizer")
    return {
        "params": np.where(_offloads(layouts, "states"), 0.0, states["params"]),
        "grads": np.where(_persistent_grads(job, layouts), states["grads"], 0.0),
        "optimizer": np.where(no_optimizer, 0.0, states["optimizer"]),
    }


def _between_updates(
    job: Job, layouts: LayoutBatch, invariant: InvariantMemory, sizes: dict[str, Floats]
) -> dict[str, Floats]:
    """Return `sizes`, the bytes of generation or scoring by kind, with the states of training and the other models."""
    states = _states_at_rest(job, layouts, invariant.states)
    transient = sizes["gathered"] + sizes["weights"] + sizes["activations"]
    return {
        **states,
        "reference": reference_copies(job) * states["params"],
        "critic": critic_memory(job, layouts, invariant),
        "reward_models": np.where(_offloads(layouts, "states"), 0.0, invariant.rewards.weights),
        **sizes,
        "reserved": invariant.libraries + allocator_overhead(job) * transient,
    }


def moments_without_activations(
    job: Job, layouts: LayoutBatch, share: RankStages, invariant: InvariantMemory
) -> dict[str, tuple[Floats, Floats, Floats]]:
    """Return the bytes by kind at the loss, in the backward pass of a layer, and at the end of the backward pass.

    These bytes depend neither on recomputation nor on offloading.
    """
    unsharded, logits = invariant.unsharded, _logits(job, layouts, share)
    grads, optimizer = invariant.states["grads"], invariant.states["optimizer"]
    none = np.zeros(len(layouts))
    at_loss = logits + _head_gradient(job, layouts, share)
    return {
        "grads": (np.where(_no_grads_at_loss(job, layouts), 0.0, grads), grads, grads),
        "gathered": (unsharded.at_loss, unsharded.at_layer, unsharded.at_end),
        "optimizer": (optimizer, optimizer, optimizer + invariant.update),
        "head": (at_loss, _deferred_logits(job, layouts, logits), none),
    }


def _largest_moment(moments: dict[str, tuple[Floats, ...]]) -> dict[str, Floats]:
    """Return the bytes by kind at the moment with the largest sum over all kinds."""
    largest, *others = (np.sum(sizes, axis=0) for sizes in zip(*moments.values(), strict=True))
    result = {kind: sizes[0] for kind, sizes in moments.items()}
    for moment, total in enumerate(others, start=1):
        larger = total > largest
        largest = np.where(larger, total, largest)
        result = {kind: np.where(larger, sizes[moment], result[kind]) for kind, sizes in moments.items()}
    return result


def num_microbatches(job: Job, layouts: LayoutBatch) -> Ints:
    """Return `BatchSpec.microbatches`, (rows,), or 1 where a rank has fewer sequences in a step than a microbatch."""
    count: Ints = np.maximum(1, job.batch.microbatches(layouts))
    return count


def _microbatch_tokens(job: Job, layouts: LayoutBatch) -> Floats:
    """Return the tokens of a microbatch on a rank."""
    return np.asarray(layouts.microbatch * job.batch.seq_len / layouts.cp)


def weight_casts(job: Job, layouts: LayoutBatch, params: RankParams, layers: Floats) -> Floats:
    """Return the bytes of weight copies in the compute dtype that a rank with `layers` layers keeps for the backward
    pass.

    With recomputation only one layer's copies are alive. Weights that are stored or gathered in the compute dtype need
    no copies. With quantized weights, the largest quantized matrix has an unpacked copy.
    """
    unpacked = np.full(len(layouts), float(job.itemsize * _largest_quantized(job)))
    if job.engine.half_weights or job.precision.compute == job.precision.param:
        return unpacked
    recomputed = _recomputed_share(layouts, layers)
    copies = (1 - recomputed) * params.total.matmul_weights + np.where(recomputed > 0, params.layer.matmul_weights, 0.0)
    return np.asarray(unpacked + job.itemsize * np.where(num_shards(layouts) > 1, 0.0, copies))


def _largest_quantized(job: Job) -> int:
    """Return the elements of the largest quantized matrix, which is unpacked for its matmul."""
    sizes = (param.numel for ops in unique_layer_ops(job.model) for op in ops for param in op.params if param.quantized)
    return max(sizes, default=0)


def covered_share(layouts: LayoutBatch, layers: Floats) -> Floats:
    """Return the share of a rank's `layers` that `recompute_layers` covers, whatever kind of recomputation is chosen.

    The share is equal for all kinds of layers and all stages.
    """
    partial = np.minimum(1.0, layouts.recompute_layers / np.maximum(layers, 1.0))
    return np.where(layouts.recompute_layers < 0, 1.0, partial)


def _recomputed_share(layouts: LayoutBatch, layers: Floats) -> Floats:
    """Return the share of a rank's `layers` that are recomputed, 0 without recomputation."""
    return np.where(layouts.recompute == _NONE, 0.0, covered_share(layouts, layers))


def resident_activations(job: Job, layouts: LayoutBatch, share: RankStages, activations: ModelActivations) -> Floats:
    """Return the bytes of saved activations of all microbatches in flight.

    The head's activations are freed before the next microbatch, unless all forward passes come first.
    """
    recomputed = _recomputed_share(layouts, share.layers.sum(axis=0))
    per_token = share.embedding * activations.embedding
    for count, layer in zip(share.layers, activations.layers, strict=True):
        saved = np.where(layouts.recompute == _FULL, layer.full, layer.selective)
        per_token = per_token + count * ((1 - recomputed) * layer.none + recomputed * saved)
    if job.engine.stage_output:
        per_token = per_token + np.where(layouts.pp > 1, activations.boundary, 0.0)
    heads = _heads_in_flight(layouts, share) * share.head
    return np.asarray(_microbatch_tokens(job, layouts) * (share.in_flight * per_token + heads * activations.head))


def _heads_in_flight(layouts: LayoutBatch, share: RankStages) -> Floats:
    """Return the number of microbatches whose head activations are saved: 1, or all where all forwards come first."""
    return np.where(layouts.one_of("schedule", FORWARDS_FIRST), share.in_flight, 1.0)


def backward_peak(job: Job, layouts: LayoutBatch, share: RankStages, activations: ModelActivations) -> Floats:
    """Return the transient bytes of one layer's backward pass: its gradients and recomputed activations."""
    per_token = np.zeros(len(layouts))
    for count, layer in zip(share.layers, activations.layers, strict=True):
        recomputed = np.where(layouts.recompute == _FULL, layer.recomputed_full, layer.recomputed_selective)
        transient = np.where(layouts.recompute == _NONE, 0.0, recomputed) + layer.gradients
        per_token = np.maximum(per_token, np.where(count > 0, transient, 0.0))
    return np.asarray(_microbatch_tokens(job, layouts) * per_token)


def _no_grads_at_loss(job: Job, layouts: LayoutBatch) -> Bools:
    """Return True where a rank has no gradients allocated when a loss is computed, (rows,).

    Gradients are allocated in the backward pass of the only microbatch, or under ZeRO-1 of the last, unless they have
    persistent buffers. Engines that materialize all logits always count gradients, as the fit of `ALLOCATOR_OVERHEAD`
    did.
    """
    absent = (num_microbatches(job, layouts) == 1) | (layouts.zero == 1)
    return np.asarray(absent & ~_persistent_grads(job, layouts))


def _persistent_grads(job: Job, layouts: LayoutBatch) -> Bools:
    """Return True where gradients are in buffers that stay between steps, (rows,).

    These are the buckets of DDP without a pipeline, and the buffers of engines with weights in the compute dtype or
    with materialized logits.
    """
    in_buckets = (layouts.zero == 0) & (layouts.dp * layouts.cp > 1) & (layouts.pp * layouts.stages == 1)
    return np.asarray((job.engine.half_weights or job.engine.logit_bytes > 0) | in_buckets)


def _logits(job: Job, layouts: LayoutBatch, share: RankStages) -> Floats:
    """Return the bytes of logits and of the loss's intermediates.

    Engines with `logit_bytes` materialize the logits of a microbatch, in GPipe of all microbatches. Other engines
    compute one chunk at a time: logits in the dtype of the matmul, float32 logits where that dtype is another, and
    float32 probabilities. A score head has none.
    """
    if job.model.head == "score":
        return np.zeros(len(layouts))
    engine, tokens = job.engine, _microbatch_tokens(job, layouts)
    vocab = shard_size(Dim("vocab", job.model.vocab_size), np.where(engine.whole_logits, 1, layouts.tp))
    if engine.logit_bytes:
        itemsize = np.where(layouts.tp > 1, engine.cut_logit_bytes or engine.logit_bytes, engine.logit_bytes)
        return np.asarray(share.head * itemsize * tokens * vocab * _heads_in_flight(layouts, share))
    chunk = np.minimum(tokens, np.maximum(MIN_CHUNK_TOKENS, CHUNK_LOGITS[job.cluster.device.kind == "cpu"] // vocab))
    return np.asarray(share.head * (2 * ITEMSIZE["float32"] + _low_precision_itemsize(job)) * chunk * vocab)


def _low_precision_itemsize(job: Job) -> int:
    """Return the bytes per element of tensors that the loss also has in the compute dtype, 0 if that is float32."""
    return job.itemsize if job.itemsize < ITEMSIZE["float32"] else 0


def _head_gradient(job: Job, layouts: LayoutBatch, share: RankStages) -> Floats:
    """Return the bytes of the head's gradients where the forward pass forms them chunk by chunk.

    These are the float32 weight gradient, a chunk's contribution to it, the weight cast for the matmul where it is not
    gathered, and the gradient of the hidden states. In GPipe the gradients of earlier microbatches wait for their
    backward pass. A score head forms the gradient of the hidden states at the beginning of the backward pass, in chunks
    of float32.
    """
    if job.model.head == "score":
        elements = _microbatch_tokens(job, layouts) * job.model.hidden_size
        elements = elements / np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
        chunk = np.minimum(elements, max(SCORE_CHUNK, job.model.hidden_size))
        return np.asarray(share.head * (job.itemsize * elements + ITEMSIZE["float32"] * chunk))
    if job.engine.logit_bytes:
        return np.zeros(len(layouts))
    weight = shard_size(Dim("vocab", job.model.vocab_size), layouts.tp) * job.model.hidden_size
    gathered = num_shards(layouts) > 1
    itemsize = ITEMSIZE["float32"] + _low_precision_itemsize(job) * (2.0 - gathered)
    waiting_itemsize = np.where(gathered, job.itemsize, ITEMSIZE[job.precision.param])
    if head_ops(job.model)[-1].frozen:  # the head is stored in the dtype of its matmul
        weight = np.zeros(len(layouts))
    waiting = _heads_in_flight(layouts, share) - 1
    hidden = job.itemsize * _microbatch_tokens(job, layouts) * job.model.hidden_size
    return np.asarray(share.head * (weight * (itemsize + waiting * waiting_itemsize) + hidden * (1 + waiting)))


def _deferred_logits(job: Job, layouts: LayoutBatch, logits: Floats) -> Floats:
    """Return the bytes of `logits` that are still alive in the backward pass of the layers.

    With materialized logits these are the logits of GPipe's other microbatches; chunked logits are gone.
    """
    if not job.engine.logit_bytes:
        return np.zeros(len(layouts))
    return np.where(layouts.one_of("schedule", FORWARDS_FIRST), logits, 0.0)


def _buffers(job: Job, layouts: LayoutBatch) -> Floats:
    """Return the bytes of communication buffers.

    pp: one message each way. Sequence parallelism: one gathered hidden state. cp: two sets of a ring neighbour's keys
    and values with their gradients. ep: tokens dispatched to experts and back. Also the engine's fixed buckets.
    """
    itemsize, tokens = job.itemsize, _microbatch_tokens(job, layouts)
    ops = [op for kind in unique_layer_ops(job.model) for op in kind]
    kv_size = max(op.kv_size for op in ops)
    # Two sets of keys and values are in flight around the ring.
    kv_tensors = 2 * (1 + kv_grad_itemsize(job) / itemsize)
    routed = max((op.passes * op.target.size for op in ops if op.kind == "dispatch"), default=0.0)
    hidden, outside_tp = tokens * job.model.hidden_size, np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
    elements = np.where(layouts.pp > 1, 2 * hidden / outside_tp, 0.0) + np.where(outside_tp > 1, hidden, 0.0)
    elements = elements + np.where(layouts.cp > 1, kv_tensors * tokens * kv_size / layouts.tp, 0.0)
    elements = elements + np.where(layouts.ep > 1, 2 * tokens * routed / layouts.tp, 0.0)
    return np.asarray(itemsize * elements + job.engine.bucket_bytes)


def _libraries(job: Job, layouts: LayoutBatch) -> Floats:
    """Return the bytes outside the allocator: the device's context, and NCCL's buffers of each process group.

    On a CPU these are the bytes of the interpreter, and of what a process adds to it in training.
    """
    device = job.cluster.device
    if not device.is_gpu:
        return device.reserved + process_bytes(job, layouts)
    axes = np.sum([degree > 1 for degree in (layouts.pp, layouts.dp, layouts.cp, layouts.tp)], axis=0)
    # More groups: the world, the ranks of one model replica (for the gradient norm), and the ends of a tied table.
    others = 1 * (axes > 1) + ((layouts.tp > 1) & (layouts.pp > 1)) + ((layouts.pp > 1) & job.model.tie_word_embeddings)
    return np.asarray(device.reserved + _GROUP_BYTES * (axes + others) + _ALL_TO_ALL_GROUP_BYTES * (layouts.ep > 1))


def allocator_overhead(job: Job) -> float:
    """Return the allocator's overhead as a share of transient memory."""
    return ALLOCATOR_OVERHEAD[job.engine.kernels] if job.cluster.device.is_gpu else HEAP_OVERHEAD


def memory_reading(job: Job, layout: Layout, reading: str, pp_rank: int | None = None) -> float:
    """Return the bytes that a tool would report for the ranks of `pp_rank`, or for the fullest rank if it is None.

    `reading`: "nvidia-smi" for all memory, "reserved" for the memory that PyTorch's allocator has reserved, or
    "allocated" for the memory in use.
    """
    ranks = sorted({0, min(1, layout.pp - 1), layout.pp - 1}) if pp_rank is None else [pp_rank]
    fullest = max((rank_memory(job, layout, rank) for rank in ranks), key=lambda memory: memory.total)
    if reading == "allocated":
        return float(fullest.total - fullest.reserved)
    outside = float(_libraries(job, batch_layouts([layout]))[0]) if reading == "reserved" else 0.0
    return fullest.total - outside


def two_layers(job: Job, layouts: LayoutBatch, activations: ModelActivations) -> Floats:
    """Return the bytes of a microbatch's saved activations in two layers: the layer in use and the one in transfer."""
    largest = np.max([_saved_per_token(layouts, layer) for layer in activations.layers], axis=0)
    return np.asarray(2 * _microbatch_tokens(job, layouts) * largest)


def _saved_per_token(layouts: LayoutBatch, layer: LayerActivations) -> Floats:
    """Return the bytes per token that `layer` saves under the layout's recomputation."""
    recomputed = np.where(layouts.recompute == _FULL, layer.full, layer.selective)
    return np.where(layouts.recompute == _NONE, layer.none, recomputed)


def _offloads(layouts: LayoutBatch, kind: str) -> Bools:
    """Return True where `kind` ("optimizer", "states" or "activations") is offloaded, to the host or to NVMe."""
    return layouts.one_of("offload", [name for name in CHOICES["offload"] if name.removesuffix("-nvme") == kind])


def _to_nvme(layouts: LayoutBatch) -> Bools:
    """Return True where offloaded tensors go to NVMe."""
    return layouts.one_of("offload", [name for name in CHOICES["offload"] if name.endswith("-nvme")])


def _after_offload(
    job: Job, layouts: LayoutBatch, params: RankParams, sizes: dict[str, Floats], moved: Floats
) -> dict[str, Floats]:
    """Return the device memory that offloading changes, by kind.

    Of offloaded states the device still holds, in the compute dtype or packed: the layer in use with its gradient, the
    next layer, and the head with its gradient. Of offloaded activations it holds all but the `moved` bytes.
    """
    states, optimizer = _offloads(layouts, "states"), _offloads(layouts, "optimizer")
    absent = {"params": states, "grads": states, "weights": states, "optimizer": states | optimizer}
    result = {name: np.where(where, 0.0, sizes[name]) for name, where in absent.items()}
    in_use = bytes_in_use_of_offloaded_states(job, params)
    result["gathered"] = np.where(states, np.maximum(in_use, sizes["gathered"]), sizes["gathered"])
    remaining = np.maximum(0.0, sizes["activations"] - moved)
    result["activations"] = np.where(_offloads(layouts, "activations"), remaining, sizes["activations"])
    return result


def bytes_in_use_of_offloaded_states(job: Job, params: RankParams) -> Floats:
    """Return the bytes of offloaded states that stay on the device: see `_after_offload`."""
    ends = params.root + params.head
    trained = np.maximum(params.layer.trained, params.embedding.trained)
    gathered = np.maximum(params.layer.gathered_bytes, params.embedding.gathered_bytes)
    return np.asarray(ends.gathered_bytes + 2 * gathered + job.itemsize * (ends.trained + trained))


def host_memory(job: Job, layouts: LayoutBatch, share: RankStages, invariant: InvariantMemory | None = None) -> Floats:
    """Return the bytes of host memory that a rank with the `share` of the model needs for offloading, (rows,).

    `invariant` is the result of `invariant_memory`, computed here if not given.
    """
    own = _host_memory(job, layouts, share, invariant)
    if job.critic is None or not layouts.offload.any():
        return own
    # Activations of both models are never offloaded at the same time.
    of_critic = _host_memory(job.of_critic, layouts, share, None)
    return np.where(_offloads(layouts, "activations"), np.maximum(own, of_critic), own + of_critic)


def _host_memory(job: Job, layouts: LayoutBatch, share: RankStages, invariant: InvariantMemory | None) -> Floats:
    """Return the bytes of host memory for offloading one model, (rows,)."""
    if not layouts.offload.any():
        return np.zeros(len(layouts))
    offloads_activations = _offloads(layouts, "activations")
    if offloads_activations.all():
        activations = model_activations(job, layouts) if invariant is None else invariant.activations
        return _offloaded_activations(job, layouts, share, activations)
    invariant = invariant or invariant_memory(job, layouts, share)
    params, sizes, to_nvme = invariant.params, invariant.states, _to_nvme(layouts)
    all_states = sizes["params"] + sizes["grads"] + sizes["optimizer"]
    states = np.where(_offloads(layouts, "optimizer"), sizes["optimizer"], all_states)
    if job.engine.nvme_params:
        share_of_two_units = 2 * params.largest_unsharded / np.maximum(1.0, params.total.unsharded)
        states = np.where(to_nvme, np.minimum(1.0, share_of_two_units), 1.0) * states
    else:
        states = np.where(to_nvme, states - sizes["optimizer"], states) + _staging_buffers(job, layouts, params)
    states = np.where(layouts.offload == _NOT_OFFLOADED, 0.0, states)
    if not offloads_activations.any():
        return states
    moved = _offloaded_activations(job, layouts, share, invariant.activations)
    return np.where(offloads_activations, moved, states)


def _offloaded_activations(job: Job, layouts: LayoutBatch, share: RankStages, activations: ModelActivations) -> Floats:
    """Return the bytes of saved activations that leave the device where activations are offloaded."""
    resident = resident_activations(job, layouts, share, activations)
    return np.maximum(0.0, resident - two_layers(job, layouts, activations))


def _staging_buffers(job: Job, layouts: LayoutBatch, params: RankParams) -> Floats:
    """Return the bytes of host staging buffers.

    Parameters and gradients pass through these buffers where the host updates parameters. Where optimizer states are on
    NVMe, two states pass through them, too.
    """
    to_nvme = _to_nvme(layouts)
    shard = np.where(layouts.zero > 0, params.total.shard, params.total.unsharded)
    tensors = np.where(_offloads(layouts, "optimizer") | to_nvme, np.where(to_nvme, 4, 2), 0)
    return np.asarray(
        STAGING_BUFFERS * tensors * ITEMSIZE[job.precision.param] * np.minimum(shard, HOST_BUCKET_ELEMENTS)
    )


def rank_generation_memory(job: Job, layout: Layout) -> MemoryEstimate:
    """Estimate the memory of a rank of the first stage of a run with rollouts while it generates."""
    layouts = batch_layouts([layout])
    share = rank_stages(job.model, layouts, np.array([0]), num_microbatches(job, layouts), layout.stage_layers)
    sizes = generation_memory(job, layouts, invariant_memory(job, layouts, share))
    return MemoryEstimate(**{"head": 0} | {kind: round(float(size[0])) for kind, size in sizes.items()})


def rank_memory(job: Job, layout: Layout, pp_rank: int = 0) -> MemoryEstimate:
    """Estimate the memory of the ranks of pipeline rank `pp_rank`."""
    return _rank_memory(stage_memory, job, layout, pp_rank)


def rank_training_memory(job: Job, layout: Layout, pp_rank: int = 0) -> MemoryEstimate:
    """Estimate the memory of the ranks of pipeline rank `pp_rank` in an update."""
    return _rank_memory(training_memory, job, layout, pp_rank)


def _rank_memory(
    memory: Callable[[Job, LayoutBatch, RankStages], dict[str, Floats]], job: Job, layout: Layout, pp_rank: int
) -> MemoryEstimate:
    """Return the result of the function `memory` for the ranks of pipeline rank `pp_rank` of one layout."""
    layouts = batch_layouts([layout])
    microbatches = num_microbatches(job, layouts)
    rank_share = rank_stages(job.model, layouts, np.array([pp_rank]), microbatches, layout.stage_layers)
    sizes = memory(job, layouts, rank_share)
    return MemoryEstimate(**{kind: round(float(size[0])) for kind, size in sizes.items()})
