"""What one microbatch costs a rank in one layer of each kind, in the embedding and in the head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from kumi.plan.columns import Columns, Floats, Ints
from kumi.plan.comm import collective_seconds
from kumi.plan.context import dealt_elements, gradient_itemsize, kv_elements
from kumi.plan.distinct import distinct
from kumi.plan.kernels import alignment, matmul_seconds, peak_flops, stream_seconds
from kumi.plan.scans import AGAIN, kernels, product_seconds, score_seconds
from kumi.plan.tensor import regions
from kumi.spec.job import Job
from kumi.spec.layout import CONTEXT
from kumi.spec.ledger import Op, embedding_ops, head_ops, kind_ops, logit_chunk

# What decides a layer's cost on a rank; layouts that agree in these share one row of the table.
KEYS = ("tp", "cp", "ep", "expert_tp", "microbatch", "sequence_parallel", "context")

# Passes over an op's elements going forward and backward, in elements read or written, and kernels launched, for
# kernels that run op by op ("eager"), fused by hand and compiled. Eager norms and rotations compute in float32.
PASSES: dict[str, dict[str, tuple[float, float, int, int]]] = {
    "norm": {"eager": (15, 24, 6, 12), "fused": (2, 4, 1, 2), "compiled": (2, 4, 1, 2)},
    "rope": {"eager": (10, 10, 8, 8), "fused": (2, 2, 1, 1), "compiled": (2, 2, 1, 1)},
    "gated_norm": {"eager": (20, 33, 8, 16), "fused": (3, 6, 1, 2), "compiled": (3, 6, 1, 2)},
    "convolution": {"eager": (24, 60, 10, 40), "fused": (2, 4, 1, 2), "compiled": (2, 4, 1, 2)},
    "gate": {"eager": (5, 9, 2, 4), "fused": (3, 5, 1, 1), "compiled": (3, 5, 1, 1)},
    "activation": {"eager": (4, 6, 2, 2), "fused": (2, 3, 1, 1), "compiled": (2, 3, 1, 1)},
    "add": {"eager": (3, 2, 1, 1), "fused": (3, 1, 1, 1), "compiled": (1, 1, 0, 0)},
    "dropout": {"eager": (2.5, 2.5, 1, 1), "fused": (1, 1, 0, 0), "compiled": (1, 1, 0, 0)},
    "logits": {"eager": (14, 10, 6, 4), "fused": (5, 4, 2, 2), "compiled": (5, 4, 2, 2)},
    "softmax": {"eager": (12, 8, 4, 3), "fused-softmax": (2, 3, 1, 1)},
}

ROUNDED = ("float8", "float4")

# Launch intervals that the host spends on a collective: the library's own bookkeeping, and the rearranging around it.
COLLECTIVE_LAUNCHES = 4.4

# Bytes moved for an element on its way into a product in float8 or float4: it is read in two bytes and written rounded;
# what is transposed for the backward pass besides is mostly part of other kernels.
ROUNDING_BYTES = 3.0


@dataclass
class Cost:
    """What a rank spends on one microbatch, (rows,) each.

    Seconds of computing forward, for the input gradients and for the weight gradients; kernels launched; the parts of
    the forward that attention takes (its softmax included), that fused attention takes ("core") and that cheap,
    element-wise work and unfused attention take; communication that nothing hides, by axis: of the forward, of the
    backward, and what a forward sends again that is recomputed whole.
    """

    forward: Floats
    backward: Floats
    weight: Floats
    kernels_forward: Floats
    kernels_backward: Floats
    attention: Floats
    core: Floats
    cheap: Floats
    comm_forward: dict[str, Floats]
    comm_backward: dict[str, Floats]
    comm_again: dict[str, Floats]

    @classmethod
    def zero(cls, rows: int) -> Cost:
        empty = {one.name: np.zeros(rows) for one in fields(cls) if not one.name.startswith("comm")}
        forward, backward, again = ({axis: np.zeros(rows) for axis in ("tp", "cp", "ep")} for _ in range(3))
        return cls(**empty, comm_forward=forward, comm_backward=backward, comm_again=again)


@dataclass(frozen=True)
class Table:
    """`Cost` of each distinct combination of `KEYS`: of every kind of layer, of the embedding and of the head."""

    layers: tuple[Cost, ...]
    embedding: Cost
    head: Cost


def table(job: Job, x: Columns) -> tuple[Table, Ints]:
    """The costs of all combinations in `x`, and for every row of `x` its row in them."""
    first, index = distinct(*(getattr(x, name) for name in KEYS))
    rows = _Rows(job, x.take(first))
    layers = tuple(rows.total(ops, True) for ops in kind_ops(job.model))
    return Table(layers, rows.total(embedding_ops(job.model)), rows.total(head_ops(job.model))), index


def fused(ops: Iterable[Op]) -> list[Op]:
    """`ops` with linears that read the same input, one after another, joined to one: query, key and value, or the two
    halves of a gated layer."""
    found: list[Op] = []
    for op in ops:
        last = found[-1] if found else None
        if last and op.kind == last.kind == "linear" and op.source == last.source and op.experts == last.experts:
            target = replace(last.target, size=last.target.size + op.target.size)
            found[-1] = replace(last, target=target, params=last.params + op.params)
        else:
            found.append(op)
    return found


class _Rows:
    """The distinct rows, as floats, with what every op needs of them."""

    def __init__(self, job: Job, x: Columns) -> None:
        self.job, self.device, self.engine = job, job.cluster.device, job.engine
        self.gpu = self.device.kind == "cuda"
        self.tp, self.cp, self.ep = (column.astype(np.float64) for column in (x.tp, x.cp, x.ep))
        self.expert_tp = x.expert_tp.astype(np.float64)
        self.ulysses = x.context == CONTEXT.index("ulysses")
        self.parallel = x.sequence_parallel.astype(bool) & (x.tp > 1)
        self.tokens = x.microbatch * job.batch.seq_len / self.cp
        self.sequences = x.microbatch.astype(np.float64)
        self.size = job.itemsize
        self.experts = max((op.experts for ops in kind_ops(job.model) for op in ops), default=0)

    def total(self, ops: Sequence[Op], layer: bool = False) -> Cost:
        """The cost of `ops` together; of a layer with its communication."""
        cost = Cost.zero(len(self.tp))
        for op in fused(ops) if self.engine.kernels == "fused" else ops:
            self._add(cost, op)
        if layer:
            self._tensor_parallel(cost, ops)
        return cost

    def _add(self, cost: Cost, op: Op) -> None:
        if op.kind in ("linear", "router"):
            self._linear(cost, op)
        elif op.kind == "lora":
            self._adapter(cost, op)
        elif op.kind == "attention":
            self._attention(cost, op)
        elif op.kind == "log_prob":
            self._head(cost, op)
        elif op.kind in ("dispatch", "combine"):
            self._exchange(cost, op)
        elif op.kind == "embedding":
            self._embedding(cost, op)
        elif op.kind == "scan":
            self._scan(cost, op)
        elif op.kind in PASSES:
            self._elements(cost, op.kind, self._elements_of(op))
            if op.kind == "convolution":
                self._products(cost, op)

    def _cut(self, dim_name: str, op: Op) -> Floats:
        """How many ranks share `dim_name` of `op` among them."""
        if dim_name not in ("heads", "kv_heads", "groups", "ffn", "vocab"):
            return np.ones_like(self.tp)
        return self.expert_tp if op.experts else self.tp

    def _matmul_dtype(self, op: Op) -> str:
        return self.job.precision.matmul_dtype if op.kind == "linear" else self.job.precision.compute

    def _linear(self, cost: Cost, op: Op) -> None:
        """A product forward and two backward; an expert's rows are its share of the tokens."""
        weight_columns = np.ceil(op.target.size / self._cut(op.target.name, op))
        inner = np.ceil(op.source.size / self._cut(op.source.name, op))
        rows, dtype, repeats = self._rows_of(op), self._matmul_dtype(op), np.ones_like(self.tp)
        if op.experts:
            # The tokens of all ranks that share the experts meet; each expert gets an equal part.
            repeats = op.experts / self.ep
            rows = rows / repeats
        shapes = ((rows, inner, weight_columns), (rows, weight_columns, inner), (weight_columns, rows, inner))
        slower = GROUPED if op.experts and self.gpu else 1.0
        one = [matmul_seconds(self.device, dtype, *shape) / slower for shape in shapes]
        cost.forward += repeats * one[0]
        cost.backward += repeats * one[1]
        cost.kernels_forward += 1
        cost.kernels_backward += 1
        if op.frozen:
            self._unpack(cost, op, inner * weight_columns)
            return
        cost.weight += repeats * one[2]
        cost.weight += stream_seconds(self.device, 2 * self.engine.grad_itemsize * repeats * inner * weight_columns)
        cost.kernels_backward += 1
        if len(op.params) > 1:
            # The gradient of a bias is summed over the rows.
            cost.weight += stream_seconds(self.device, self.size * rows * repeats * weight_columns)
            cost.kernels_backward += 1
            if op.experts:
                # Products of experts leave the bias to a kernel of its own.
                cost.forward += stream_seconds(self.device, 2 * self.size * rows * repeats * weight_columns)
                cost.kernels_forward += 1
        entering, leaving = rows * repeats * inner, rows * repeats * weight_columns
        self._casts(cost, op, entering, leaving, repeats * inner * weight_columns)

    def _unpack(self, cost: Cost, op: Op, elements: Floats) -> None:
        """What is kept in few bits is unpacked in the forward and again in the backward pass."""
        if op.params[0].quantized:
            packed = self.job.precision.itemsize(quantized=op.params[0].quantized)
            seconds = stream_seconds(self.device, (packed + self.size) * elements)
            cost.forward += seconds
            cost.backward += seconds
            cost.kernels_forward += 1
            cost.kernels_backward += 1

    def _adapter(self, cost: Cost, op: Op) -> None:
        """Two thin products, and what they give added to what the matrix does, in DoRA multiplied besides."""
        a, b, *more = op.params
        for source, target, param in ((op.source, a.dims[0], a), (b.dims[1], op.target, b)):
            self._linear(cost, Op(param.name, "linear", source, target, (param,)))
        leaving = self._rows_of(op) * np.ceil(op.target.size / self._cut(op.target.name, op))
        for kind in ("add", *(["gate"] if more else [])):
            self._elements(cost, kind, leaving)

    def _rows_of(self, op: Op) -> Floats:
        """Tokens that pass through `op` on a rank. Experts see those of a rank's share of the sequence, `top_k` times,
        and where experts are cut themselves, those of all ranks that hold a part."""
        return self.tokens * op.passes * (self.expert_tp / self.tp if op.experts else 1.0)

    def _casts(self, cost: Cost, op: Op, entering: Floats, leaving: Floats, weights: Floats) -> None:
        """Products in float8 and float4 read rounded copies, of the gradient that comes back, too; float32 weights are
        cast where they are used."""
        if self._matmul_dtype(op) in ROUNDED:
            cost.forward += stream_seconds(self.device, ROUNDING_BYTES * entering)
            cost.backward += stream_seconds(self.device, ROUNDING_BYTES * leaving)
            cost.kernels_forward += 1
            cost.kernels_backward += 1
        if not self.engine.half_weights and self.job.precision.compute != self.job.precision.param:
            cost.forward += stream_seconds(self.device, 6.0 * weights)
            cost.kernels_forward += 1

    def _attention(self, cost: Cost, op: Op) -> None:
        seq_len = self.job.batch.seq_len
        each = self.tokens * (op.source.size + op.target.size) / self.tp
        if self.engine.attention in FLASH:
            self._flash(cost, op, 2.0 * each * op.reach(seq_len))
        else:
            self._scores(cost, op, 2.0 * each * seq_len, self.tokens * seq_len * op.heads / self.tp)
        ring, hidden = self._ring(op), cost.attention * (1 - 1 / self.cp)
        dealt = sum(self._cp_seconds("all_to_all", self.size * size) for size in dealt_elements(op, self.tp, self.cp))
        passes = ((0, cost.comm_forward, hidden), (0, cost.comm_again, hidden), (1, cost.comm_backward, 2.5 * hidden))
        for which, comm, compute in passes:
            comm["cp"] += np.where(self.ulysses, dealt, np.maximum(0.0, ring[which] - compute))

    def _ring(self, op: Op) -> tuple[Floats, Floats]:
        """Seconds that keys and values take round the ring, and with their gradients again."""
        elements = kv_elements(op, self.tp)
        once, gradients = (
            (self.cp - 1) * self._cp_seconds("send", size * elements)
            for size in (self.size, gradient_itemsize(self.job))
        )
        return once, once + gradients

    def _cp_seconds(self, kind: str, size: Floats) -> Floats:
        """Seconds of a message of `size` bytes a token among context-parallel ranks."""
        return collective_seconds(self.job.cluster, kind, self.tokens * size, self.cp, self.tp)

    def _flash(self, cost: Cost, op: Op, flops: Floats) -> None:
        """Fused attention does 2.5 times the forward's products in its backward, scores computed again."""
        speed = peak_flops(self.device, self.job.precision.compute) * FLASH[self.engine.attention]
        if "float8" in self.device.dtypes and self.engine.attention != "flash-3":
            speed *= BEFORE_HOPPER
        forward, backward = (speed * share for share in self.device.attention)
        # A head narrower than 128 leaves part of each processor's products idle.
        narrow = min(1.0, max(0.6, (op.source.size / max(1, op.heads) / 128) ** 0.25))
        flops = flops / np.where((self.cp > 1) & self.gpu, RING, 1.0)
        seconds = flops / (forward * narrow)
        cost.attention += seconds
        cost.core += seconds
        cost.forward += seconds
        cost.backward += 2.5 * flops / (backward * narrow)
        cost.kernels_forward += 1
        cost.kernels_backward += 3

    def _scores(self, cost: Cost, op: Op, flops: Floats, scores: Floats) -> None:
        """Attention that writes the scores: four batched products of half the FLOPs each way, and the softmax."""
        width = op.source.size / op.heads
        length = self.job.batch.seq_len
        dtype = self.job.precision.compute
        shapes = ((length / self.cp, np.asarray(width), np.asarray(length)),
                  (length / self.cp, np.asarray(length), np.asarray(width)))  # fmt: skip
        # Products of one head are dealt out together with those of the others: a head alone is the least it can take.
        alone = np.asarray(sum(matmul_seconds(self.device, dtype, *shape) for shape in shapes))
        aligned = float(alignment(np.asarray(width))) if width % 8 == 0 else ODD_HEADS
        speed = peak_flops(self.device, dtype) * SCORES * aligned
        one = np.maximum(alone, flops / speed)
        cost.attention += one
        cost.cheap += one
        cost.forward += one
        cost.backward += 2 * one
        kind = "fused-softmax" if self.engine.attention == "fused-softmax" else "eager"
        before = cost.forward.copy()
        self._passes(cost, PASSES["softmax"][kind], scores)
        if self.engine.dropout:
            self._passes(cost, PASSES["dropout"]["eager"], scores)
        cost.attention += cost.forward - before
        cost.kernels_forward += 2
        cost.kernels_backward += 4

    def _scan(self, cost: Cost, op: Op) -> None:
        """Products of chunks; besides, a fused kernel reads what goes in and writes what comes out, others scores."""
        self._products(cost, op)
        if self.engine.kernels != "eager":
            self._passes(cost, PASSES["gated_norm"]["fused"], self._elements_of(op))
            return
        forward, backward = score_seconds(self.job, op, self.tokens, self.tp)
        kernels_forward, kernels_backward = kernels(self.job, op)
        cost.forward += forward
        cost.backward += backward
        cost.kernels_forward += kernels_forward
        cost.kernels_backward += kernels_backward

    def _products(self, cost: Cost, op: Op) -> None:
        seconds = product_seconds(self.job, op, self.sequences, self.tp)
        cost.forward += seconds
        cost.backward += AGAIN * seconds

    def _elements_of(self, op: Op) -> Floats:
        """Elements of what `op` returns on a rank; between the tensor-parallel regions divided only under SP."""
        cut = np.where(self.parallel, self.tp, 1.0)
        if op.target.name in ("heads", "kv_heads", "groups", "ffn"):
            cut = self._cut(op.target.name, op)
        extra = op.kv_size / 2 if op.kind == "rope" else 0
        return self._rows_of(op) * (op.target.size + extra) / cut

    def _elements(self, cost: Cost, kind: str, elements: Floats) -> None:
        self._passes(cost, PASSES[kind][self.engine.kernels], elements)

    def _passes(self, cost: Cost, passes: tuple[float, float, int, int], elements: Floats) -> None:
        forward, backward, kernels_forward, kernels_backward = passes
        seconds = stream_seconds(self.device, forward * self.size * elements)
        cost.forward += seconds
        cost.cheap += seconds
        cost.backward += stream_seconds(self.device, backward * self.size * elements)
        cost.kernels_forward += kernels_forward
        cost.kernels_backward += kernels_backward

    def _embedding(self, cost: Cost, op: Op) -> None:
        """A gather forward; backward a sum into a table of gradients that is written whole."""
        elements = self.tokens * op.target.size
        cost.forward += stream_seconds(self.device, 2 * self.size * elements)
        table = self.engine.grad_itemsize * np.ceil(op.source.size / self.tp) * op.target.size
        cost.kernels_forward += 2
        if not op.frozen:
            cost.weight += stream_seconds(self.device, 3 * self.size * elements + 2 * table)
            cost.kernels_backward += 4
        if self.engine.dropout:
            self._elements(cost, "dropout", elements)
        self._gather(cost, elements * self.size, (1, 0, 0), (1, 1, 0))

    def _head(self, cost: Cost, op: Op) -> None:
        columns = np.ceil(op.target.size / self.tp)
        shapes = ((self.tokens, op.source.size, columns), (self.tokens, columns, op.source.size),
                  (columns, self.tokens, op.source.size))  # fmt: skip
        one = [matmul_seconds(self.device, self.job.precision.compute, *map(np.asarray, shape)) for shape in shapes]
        cost.forward += one[0]
        cost.backward += one[1]
        cost.weight += one[2] * (not op.frozen)
        cost.kernels_forward += 1
        cost.kernels_backward += 2
        # A loss that keeps float32 copies of the logits makes them one operation after another.
        how = "eager" if self.engine.logit_bytes >= FLOAT_LOGITS else self.engine.kernels
        self._passes(cost, PASSES["logits"][how], self.tokens * columns)
        again = 1 + self.engine.recompute_whole
        self._gather(cost, self.tokens * op.source.size * self.size, (0, 1, 0), (1, again, 0))
        self._log_probs(cost, columns)

    def _log_probs(self, cost: Cost, columns: Floats) -> None:
        """Two numbers a token, in messages of as many tokens as logits are formed of at a time."""
        chunk = np.minimum(np.vectorize(logit_chunk)(columns.astype(np.int64), self.device.kind), self.tokens)
        each = 2.0 * self.tp * max(4, self.size)
        whole = np.floor(self.tokens / chunk)
        one, rest = (
            collective_seconds(self.job.cluster, "all_gather", each * tokens, self.tp, np.ones_like(self.tp))
            for tokens in (chunk, self.tokens - whole * chunk)
        )
        cost.comm_forward["tp"] += whole * one + rest

    def _gather(self, cost: Cost, size: Floats, whole: tuple[int, ...], halves: tuple[int, ...]) -> None:
        """Tensor-parallel messages going forward, backward and forward again: so many all-reduces or, with SP, of their
        halves, an all-gather and a reduce-scatter: of these `halves`."""
        one, half = (
            collective_seconds(self.job.cluster, kind, size, self.tp, np.ones_like(self.tp))
            for kind in ("all_reduce", "all_gather")
        )
        calls = np.where(self.tp > 1, COLLECTIVE_LAUNCHES, 0.0)
        for comm, all_of, half_of in zip(
            (cost.comm_forward, cost.comm_backward, cost.comm_again), whole, halves, strict=True
        ):
            comm["tp"] += np.where(self.parallel, half_of * half, all_of * one)
        cost.kernels_forward += calls * np.where(self.parallel, halves[0], whole[0])
        cost.kernels_backward += calls * np.where(self.parallel, halves[1], whole[1])

    def _tensor_parallel(self, cost: Cost, ops: Sequence[Op]) -> None:
        """What enters and leaves the regions of a layer (see `kumi.plan.tensor`): an all-reduce for each forward and
        backward (Shoeybi et al., 2019); with SP their halves, and what enters gathered again for the weights' gradients
        (Korthikanti et al., 2022, section 4.2)."""
        found, each = regions(ops), self.tokens * self.size
        for width in found.enter:
            self._gather(cost, each * width, (0, 1, 0), (1, 2, 1))
        for width in found.share:
            self._gather(cost, each * width, (0, 1, 0), (1, 1, 1))
        for number, width in enumerate(found.leave):
            ends = found.ends and number == len(found.leave) - 1 and not self.engine.recompute_whole
            again = int(not ends)
            self._gather(cost, each * width, (1, 0, again), (1, 1, again))
        square = collective_seconds(
            self.job.cluster, "all_reduce", self.tokens * max(4, self.size), self.tp, np.ones_like(self.tp)
        )
        for comm in (cost.comm_forward, cost.comm_backward, cost.comm_again):
            comm["tp"] += found.norms * square
        if self.engine.overlap_tp:
            self._hide(cost)

    def _hide(self, cost: Cost) -> None:
        """Tensor-parallel traffic that pipelined products hide."""
        sides = (
            (cost.forward, cost.comm_forward),
            (cost.backward, cost.comm_backward),
            (cost.forward, cost.comm_again),
        )
        for compute, comm in sides:
            comm["tp"] = comm["tp"] - np.minimum(TP_HIDDEN * comm["tp"], 0.5 * compute)

    def _exchange(self, cost: Cost, op: Op) -> None:
        """Every token goes to its experts, after word of how many come, or comes back: an all-to-all among the ranks
        that share the experts."""
        size = self.size * self.tokens * op.passes * self.job.model.hidden_size / np.where(self.parallel, self.tp, 1.0)
        copies = round(op.passes) if self.engine.tokens_once else 1
        seconds = self._among_experts(size * self.expert_tp, copies)
        counts = self._among_experts(np.full_like(self.tp, 8.0 * self.experts), 1) if op.kind == "dispatch" else 0.0
        cost.comm_forward["ep"] += seconds + counts
        cost.comm_again["ep"] += seconds + counts
        cost.comm_backward["ep"] += seconds
        self._expert_parts(cost, op, size)
        self._passes(cost, EXCHANGE, size / self.size)

    def _among_experts(self, size: Floats, copies: int) -> Floats:
        return collective_seconds(self.job.cluster, "all_to_all", size, self.ep, self.expert_tp, copies=copies)

    def _expert_parts(self, cost: Cost, op: Op, size: Floats) -> None:
        """Where experts are cut, their ranks gather each other's tokens, weights and choices before (dispatch), and
        divide the sums after (combine)."""
        parts, rows = self.expert_tp, size / self.size / self.job.model.hidden_size
        hidden, weights, choices = (each * rows * parts for each in (size / rows / op.passes, max(4, self.size), 8.0))

        def seconds(bytes_: Floats) -> Floats:
            return collective_seconds(self.job.cluster, "all_gather", bytes_, parts, np.ones_like(parts))

        if op.kind == "dispatch":
            both = seconds(hidden) + seconds(weights)
            cost.comm_forward["ep"] += both + seconds(choices)
            cost.comm_again["ep"] += both + seconds(choices)
            cost.comm_backward["ep"] += both
        else:
            cost.comm_forward["ep"] += seconds(hidden)
            cost.comm_backward["ep"] += seconds(hidden)


# What bringing tokens to experts, or back, moves besides the exchange, in elements of them: sorted, padded, weighted,
# counted; the host waits for the counts, and starts so many kernels. Fitted to Megatron-Bridge's tables.
EXCHANGE = (6.5, 6.5, 75, 75)

# Speed of many small products, one for each expert, relative to one large one on a GPU. Fitted to Megatron-Bridge's
# tables.
GROUPED = 0.75

# Bytes held for a logit from which on some of them are a float32 copy.
FLOAT_LOGITS = 8.0

# Speed of fused attention relative to its second version; kernels made for processors before Hopper reach this share of
# what kernels made for it do (FlashAttention-3, arXiv:2407.08608, figure 5: 370 against 600 TFLOP/s forward).
FLASH = {"flash": 1.0, "flash-1": 0.6, "flash-3": 1.0}
BEFORE_HOPPER = 0.65
# Share of the peak that batched products of scores reach; and that which they reach where a head's width is no multiple
# of 8, so that tensor cores cannot read it (BigScience's chronicles: 134 TFLOP/s with 64 heads of 216, 100 with 128
# heads of 108). Both fitted to vTrain's and BLOOM's searches on A100.
ODD_HEADS = 0.08
SCORES = 0.42
# Speed of fused attention over a part of the keys at a time on a GPU, whose results are merged, relative to one over
# all of them. Fitted to NVIDIA's runs with context parallelism on H100 (DGX Cloud benchmarks).
RING = 0.8
# Share of tensor-parallel traffic that pipelined products hide, where the trainer overlaps them.
TP_HIDDEN = 0.6
