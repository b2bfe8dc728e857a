"""How many bytes of device memory a rank needs, by kind.

    states (`kumi.plan.memory.states`) + what microbatches keep (`kumi.plan.memory.activations`) + logits + buffers +
    what the allocator and the libraries take besides

Formulas are written on `Columns`, for millions of layouts or for one. The loss, where logits are held, the backward of
a layer, where its gradients and what is recomputed are, and the end of the backward do not meet: the fullest counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kumi.plan.context_traffic import gradient_itemsize
from kumi.plan.estimates import MemoryEstimate
from kumi.plan.layout_batch import WORDS, Columns, Floats, Ints, columns
from kumi.plan.memory.activations import Kept, Ledger, ledger
from kumi.plan.memory.states import Gathered, Held, divided, gathered, held, state_bytes, update_bytes
from kumi.plan.pipeline.stages import Share, share
from kumi.spec.cluster import Device
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import LEAST_CHUNK, LOGITS, kind_ops
from kumi.spec.op import Dim
from kumi.spec.precision import ITEMSIZE
from kumi.spec.schedules import FORWARDS_FIRST
from kumi.spec.sharding import cut
from kumi.spec.techniques import BUCKET, ROOMS

NONE, FULL = (WORDS["recompute"].index(word) for word in ("none", "full"))

# What PyTorch's allocator reserves beyond what is allocated, as a share of what comes and goes in a step, by the
# engine's kernels: blocks are rounded up, and pieces between them stay free; states are allocated once. torchtitan's
# documents of December 2024 and its commits 808 and 822 have three layouts, compiled (0.08, 0.10, 0.13) and op by op
# (0.17, 0.20, 0.20). Of all that is allocated it was 0.028 to 0.093 in 43 runs of fused kernels on B200 (SimuMax 1.2).
ROUNDING = {"eager": 0.18, "fused": 0.10, "compiled": 0.10}
STATES = ("params", "grads", "optimizer")

# Bytes that NCCL takes for a group of ranks: 544 MB for two A100 and 688 MB for more (NVIDIA/nccl issue 964), and for
# one whose ranks all send to all, 3.3 GB on eight H100 (issue 1685). They lie outside of the allocator.
GROUP, ALL_TO_ALL_GROUP = 0.65e9, 3.3e9

# Share of a device's memory that an estimate may fill: of 3,700 published runs whose tables say how they were laid out,
# 1.5 % were estimated above it, and of 263 layouts that ran out of memory 92 % (benchmarks/planner_accuracy.py).
USABLE = 0.98

Words = NDArray[np.str_]


def usable(device: Device) -> int:
    """Bytes of `device` that an estimate may fill."""
    return int(USABLE * device.memory)


@dataclass(frozen=True)
class Content:
    """What a rank has whatever is recomputed and offloaded: its parameters, what the parts of the model keep, bytes of
    its states and of the update at the end of a step, what passes through it, buffers, and what libraries hold."""

    own: Held
    kept: Ledger
    states: dict[str, Floats]
    update: Floats
    passing: Gathered
    buffers: Floats
    libraries: Floats


def content(job: Job, x: Columns, share: Share) -> Content:
    """What a rank of every row that holds `share` has."""
    own = held(job, x, share)
    passing = gathered(job, x, own, microbatches_of(job, x))
    states, update = state_bytes(job, x, own), update_bytes(job, x, own)
    return Content(own, ledger(job, x), states, update, passing, _buffers(job, x), _libraries(job, x))


def stage_memory(job: Job, x: Columns, share: Share, known: Content | None = None) -> dict[str, Floats]:
    """Bytes of every kind of `MemoryEstimate` on a rank that holds `share`, (rows,) each. `known` is its content where
    that is at hand."""
    known = known or content(job, x, share)
    own, kept, passing, optimizer = known.own, known.kept, known.passing, known.states["optimizer"]
    stay, in_hand = _stay(job, x, share, kept), _in_hand(job, x, share, kept)
    logits, head_gradient = _logits(job, x, share), _head_gradient(job, x, share)
    grads = known.states["grads"]
    sizes = known.states | _fullest(
        {
            "grads": (np.where(_grads_begin_empty(job, x), 0.0, grads), grads, grads),
            "gathered": (passing.loss, passing.layer, passing.end),
            "optimizer": (optimizer, optimizer, optimizer + known.update),
            "activations": (stay, stay + in_hand, np.zeros(len(x))),
            "head": (logits + head_gradient, _later(job, x, logits), np.zeros(len(x))),
        }
    )
    sizes["weights"] = _weight_copies(job, x, own, share)
    sizes["buffers"] = known.buffers
    if x.offload.any():
        sizes |= _offloaded(job, x, own, sizes, np.maximum(0.0, stay - _two_layers(job, x, kept)))
    passing_by = np.sum([size for kind, size in sizes.items() if kind not in STATES], axis=0)
    sizes["reserved"] = known.libraries + _rounding(job) * passing_by
    return sizes


def _fullest(moments: dict[str, tuple[Floats, ...]]) -> dict[str, Floats]:
    """Every kind's bytes at the moment when they are most together."""
    first, *others = (np.sum(sizes, axis=0) for sizes in zip(*moments.values(), strict=True))
    found = {kind: sizes[0] for kind, sizes in moments.items()}
    for number, total in enumerate(others, start=1):
        fuller = total > first
        first = np.where(fuller, total, first)
        found = {kind: np.where(fuller, sizes[number], found[kind]) for kind, sizes in moments.items()}
    return found


def microbatches_of(job: Job, x: Columns) -> Ints:
    """Return `BatchSpec.microbatches`, (rows,), and 1 where a microbatch has more sequences than a rank."""
    count: Ints = np.maximum(1, job.batch.microbatches(x))
    return count


def tokens_of(job: Job, x: Columns) -> Floats:
    """Tokens of a microbatch that a rank sees."""
    return np.asarray(x.microbatch * job.batch.seq_len / x.cp)


def _weight_copies(job: Job, x: Columns, own: Held, part: Share) -> Floats:
    """Bytes of weights cast where they are used and kept for the backward; of one layer, where that is recomputed.

    Weights that are kept or gathered in the compute dtype already need no copies.
    """
    unpacked = np.full(len(x), float(job.itemsize * _largest_packed(job)))
    if job.engine.half_weights or job.precision.compute == job.precision.param:
        return unpacked
    again = _recomputed(x, part)
    copies = (1 - again) * own.total.products + np.where(again > 0, own.layer.products, 0.0)
    return np.asarray(unpacked + job.itemsize * np.where(divided(x) > 1, 0.0, copies))


def _largest_packed(job: Job) -> int:
    """Elements of the largest matrix that is kept in few bits, and unpacked where it is used."""
    packed = (param.numel for ops in kind_ops(job.model) for op in ops for param in op.params if param.quantized)
    return max(packed, default=0)


def recomputed_share(x: Columns, layers: Floats) -> Floats:
    """Share of a rank's `layers` that recompute where it does, the same of every kind and in every stage."""
    some = np.minimum(1.0, x.recompute_layers / np.maximum(layers, 1.0))
    return np.where(x.recompute_layers < 0, 1.0, some)


def _recomputed(x: Columns, part: Share) -> Floats:
    return np.where(x.recompute == NONE, 0.0, recomputed_share(x, part.layers.sum(axis=0)))


def _stay(job: Job, x: Columns, part: Share, kept: Ledger) -> Floats:
    """Bytes that all microbatches in flight keep. The head's go before the next microbatch comes
    unless all forwards come first."""
    again = _recomputed(x, part)
    found = part.embedding * kept.embedding
    for count, layer in zip(part.layers, kept.layers, strict=True):
        less = np.where(x.recompute == FULL, layer.full, layer.selective)
        found = found + count * ((1 - again) * layer.none + again * less)
    if job.engine.stage_output:
        found = found + np.where(x.pp > 1, kept.boundary, 0.0)
    heads = _waiting_heads(x, part) * part.head
    return np.asarray(tokens_of(job, x) * (part.in_flight * found + heads * kept.head))


def _waiting_heads(x: Columns, part: Share) -> Floats:
    """For how many microbatches the head keeps what its backward needs: one, or all where all forwards come first."""
    return np.where(x.one_of("schedule", FORWARDS_FIRST), part.in_flight, 1.0)


def _in_hand(job: Job, x: Columns, part: Share, kept: Ledger) -> Floats:
    """Bytes that the backward of one layer makes besides: its gradients, and what it makes again."""
    most = np.zeros(len(x))
    for count, layer in zip(part.layers, kept.layers, strict=True):
        again = np.where(x.recompute == FULL, layer.again_full, layer.again_selective)
        made = np.where(x.recompute == NONE, 0.0, again) + layer.gradients
        most = np.maximum(most, np.where(count > 0, made, 0.0))
    return np.asarray(tokens_of(job, x) * most)


def _grads_begin_empty(job: Job, x: Columns) -> NDArray[np.bool_]:
    """Whether a rank has no gradients of its own yet when a loss is computed: they are made in the backward of the only
    microbatch, and under ZeRO-1 of the last, unless they have buffers of their own. `ROUNDING` was found with gradients
    counted all the time where an engine holds all logits."""
    own_buffers = (job.engine.half_weights or job.engine.logit_bytes > 0) | (
        (x.zero == 0) & (x.dp * x.cp > 1) & (x.pp * x.stages == 1)
    )
    return np.asarray(((microbatches_of(job, x) == 1) | (x.zero == 1)) & ~own_buffers)


def _logits(job: Job, x: Columns, part: Share) -> Floats:
    """Bytes of logits and what the loss makes of them: of a microbatch, in GPipe of all, or of one chunk at a time, as
    the product gives them and, where these are not the same, in float32, and their probabilities."""
    engine, tokens = job.engine, tokens_of(job, x)
    vocab = cut(Dim("vocab", job.model.vocab_size), np.where(engine.whole_logits, 1, x.tp))
    if engine.logit_bytes:
        each = np.where(x.tp > 1, engine.cut_logit_bytes or engine.logit_bytes, engine.logit_bytes)
        return np.asarray(part.head * each * tokens * vocab * _waiting_heads(x, part))
    chunk = np.minimum(tokens, np.maximum(LEAST_CHUNK, LOGITS[job.cluster.device.kind == "cpu"] // vocab))
    return np.asarray(part.head * (2 * ITEMSIZE["float32"] + _rounded(job)) * chunk * vocab)


def _rounded(job: Job) -> int:
    """Bytes of an element of what the loss has besides float32, 0 where it computes in that anyway."""
    return job.itemsize if job.itemsize < ITEMSIZE["float32"] else 0


def _head_gradient(job: Job, x: Columns, part: Share) -> Floats:
    """Bytes of the head's gradients where they are formed in the forward pass, chunk by chunk: of the weight in
    float32, with a chunk's product and, where it is not gathered, the weight as it is multiplied with; of the hidden
    states; and in GPipe those of the microbatches before, which wait for their backward."""
    if job.engine.logit_bytes:
        return np.zeros(len(x))
    matrix = cut(Dim("vocab", job.model.vocab_size), x.tp) * job.model.hidden_size
    whole = divided(x) > 1
    found = ITEMSIZE["float32"] + _rounded(job) * (2.0 - whole)
    kept = np.where(whole, job.itemsize, ITEMSIZE[job.precision.param])
    if job.model.lora is not None:  # the head is frozen, and in the dtype that it is multiplied in
        matrix = np.zeros(len(x))
    waiting = _waiting_heads(x, part) - 1
    hidden = job.itemsize * tokens_of(job, x) * job.model.hidden_size
    return np.asarray(part.head * (matrix * (found + waiting * kept) + hidden * (1 + waiting)))


def _later(job: Job, x: Columns, logits: Floats) -> Floats:
    """Bytes of `logits` that are still there in the backward of the layers: all that an engine holds of GPipe's other
    microbatches, none where they were formed in chunks."""
    return np.where(x.one_of("schedule", FORWARDS_FIRST), logits, 0.0) if job.engine.logit_bytes else np.zeros(len(x))


def _buffers(job: Job, x: Columns) -> Floats:
    """Bytes of communication buffers: of the pipeline's messages each way, of what sequence parallelism gathers, of a
    ring neighbour's keys and values with their gradients, and of tokens on their way to experts and back."""
    compute, tokens = job.itemsize, tokens_of(job, x)
    ops = [op for kind in kind_ops(job.model) for op in kind]
    kv_size = max(op.kv_size for op in ops)
    # Two of each in flight round the ring.
    around = 2 * (1 + gradient_itemsize(job) / compute)
    routed = max((op.passes * op.target.size for op in ops if op.kind == "dispatch"), default=0.0)
    hidden, outside = tokens * job.model.hidden_size, np.where(x.sequence_parallel > 0, x.tp, 1)
    found = np.where(x.pp > 1, 2 * hidden / outside, 0.0) + np.where(outside > 1, hidden, 0.0)
    found = found + np.where(x.cp > 1, around * tokens * kv_size / x.tp, 0.0)
    found = found + np.where(x.ep > 1, 2 * tokens * routed / x.tp, 0.0)
    return np.asarray(compute * found + job.engine.bucket_bytes)


def _libraries(job: Job, x: Columns) -> Floats:
    """Bytes outside of the allocator: the device's context, and buffers of every group of ranks that communicates."""
    device = job.cluster.device
    if device.kind != "cuda":
        return np.full(len(x), float(device.reserved))
    axes = np.sum([degree > 1 for degree in (x.pp, x.dp, x.cp, x.tp)], axis=0)
    # Besides, all ranks together, those that divide a model (for the norm of its gradient), and a tied head's.
    others = 1 * (axes > 1) + ((x.tp > 1) & (x.pp > 1)) + ((x.pp > 1) & job.model.tie_word_embeddings)
    return np.asarray(device.reserved + GROUP * (axes + others) + ALL_TO_ALL_GROUP * (x.ep > 1))


def _rounding(job: Job) -> float:
    return ROUNDING[job.engine.kernels] if job.cluster.device.kind == "cuda" else 0.0


def as_read(job: Job, layout: Layout, reading: str) -> float:
    """Bytes that a `reading` of the fullest rank shows: "nvidia-smi" all of them, "reserved" what PyTorch's allocator
    has taken, "allocated" what it has given out."""
    ranks = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    found = max((rank_memory(job, layout, rank) for rank in ranks), key=lambda one: one.total)
    if reading == "allocated":
        return float(found.total - found.reserved)
    outside = float(_libraries(job, columns([layout]))[0]) if reading == "reserved" else 0.0
    return found.total - outside


def _two_layers(job: Job, x: Columns, kept: Ledger) -> Floats:
    """Bytes of what two layers keep of a microbatch: one is used while another is on its way."""
    return np.asarray(2 * tokens_of(job, x) * np.max([_kept_of(x, layer) for layer in kept.layers], axis=0))


def _kept_of(x: Columns, layer: Kept) -> Floats:
    less = np.where(x.recompute == FULL, layer.full, layer.selective)
    return np.where(x.recompute == NONE, layer.none, less)


def _offload_words(x: Columns) -> tuple[Words, NDArray[np.bool_]]:
    """What is offloaded, and whether to NVMe, (rows,) each."""
    words = np.array([word.removesuffix("-nvme") for word in WORDS["offload"]])
    drives = np.array([word.endswith("-nvme") for word in WORDS["offload"]])
    return words[x.offload], drives[x.offload]


def _offloaded(job: Job, x: Columns, own: Held, sizes: dict[str, Floats], moved: Floats) -> dict[str, Floats]:
    """What is left on the device where something is offloaded: of states a layer in use, the next, and the root with
    their gradients, in the compute dtype; of kept activations what is not `moved`."""
    words, _ = _offload_words(x)
    states, compute = words == "states", job.itemsize
    gone = {"params": states, "grads": states, "weights": states, "optimizer": states | (words == "optimizer")}
    found = {kind: np.where(where, 0.0, sizes[kind]) for kind, where in gone.items()}
    in_use = compute * (2 * own.root.whole + 3 * own.largest_whole)
    found["gathered"] = np.where(states, np.maximum(in_use, sizes["gathered"]), sizes["gathered"])
    kept = np.maximum(0.0, sizes["activations"] - moved)
    found["activations"] = np.where(words == "activations", kept, sizes["activations"])
    return found


def host_memory(job: Job, x: Columns, share: Share, known: Content | None = None) -> Floats:
    """Bytes of its host's memory that a rank holding `share` needs for what is offloaded, (rows,)."""
    if not x.offload.any():
        return np.zeros(len(x))
    known = known or content(job, x, share)
    own, kept, sizes = known.own, known.kept, known.states
    words, drives = _offload_words(x)
    states = np.where(words == "optimizer", sizes["optimizer"], sizes["params"] + sizes["grads"] + sizes["optimizer"])
    if job.engine.nvme_params:
        part = 2 * own.largest_whole / np.maximum(1.0, own.total.whole)
        states = np.where(drives, np.minimum(1.0, part), 1.0) * states
    else:
        states = np.where(drives, states - sizes["optimizer"], states) + _rooms(job, x, own)
    activations = np.maximum(0.0, _stay(job, x, share, kept) - _two_layers(job, x, kept))
    return np.where(words == "none", 0.0, np.where(words == "activations", activations, states))


def _rooms(job: Job, x: Columns, own: Held) -> Floats:
    """Bytes of the host through which parameters and gradients pass where the host updates them, and states that come
    from drives."""
    words, drives = _offload_words(x)
    held = np.where(x.zero > 0, own.total.part, own.total.whole)
    tensors = np.where((words == "optimizer") | drives, np.where(drives, 4, 2), 0)
    return np.asarray(ROOMS * tensors * ITEMSIZE[job.precision.param] * np.minimum(held, BUCKET))


def rank_memory(job: Job, layout: Layout, pp_rank: int = 0) -> MemoryEstimate:
    """What the ranks of pipeline rank `pp_rank` need at most."""
    x = columns([layout])
    part = share(job.model, x, np.array([pp_rank]), microbatches_of(job, x), layout.stage_layers)
    return MemoryEstimate(**{kind: round(float(size[0])) for kind, size in stage_memory(job, x, part).items()})
