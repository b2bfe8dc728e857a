"""A model on the ranks of a layout, as one rank sees it: it scores and generates, whatever the layout.

    model = EvaluatedModel(decoder, mesh, max_length=4096)
    result = lead(model, work)      # on rank 0 work(model), None on the others

Rank 0 alone has the tasks and their data. It broadcasts units of work to the others, which wait for them in `lead`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from kumi.data.binfile import Array
from kumi.evaluation.score_requests import PackedBatch, Request, Score, pack_requests, shorten
from kumi.inference.batched_decoder import BatchedDecoder, Reply
from kumi.inference.sampling import Sampling
from kumi.nn.attention.shared_prefix import branching_attention, supports_branches
from kumi.nn.decoder import Decoder
from kumi.nn.logit_chunks import TokenScores
from kumi.objectives import OBJECTIVES
from kumi.parallel import pipeline
from kumi.parallel.mesh import Mesh, all_reduce_sum, broadcast_object, gather_objects
from kumi.parallel.ring_attention import positions_of_rank
from kumi.parallel.run_microbatches import decoder_inputs, evaluating, shard_batch
from kumi.parallel.stage_modules import stages_of, unwrap
from kumi.spec.generation_layout import check_generation_layout

# Receives the indices of some of the requests, and the scores of these requests, as soon as they are computed.
Record = Callable[[Sequence[int], Sequence[Score]], None]
T = TypeVar("T")
# Positions of a batch of one rank. On a CPU, rows in one batch gain little.
_TOKENS = {"cpu": 2048, "cuda": 16384}
# Sequences that a rank decodes at once, and prompts of a rank in a unit of work: their replies are recorded together.
_SLOTS, _PROMPTS = 32, 128


@dataclass(frozen=True)
class _ScoreUnit:
    """Batches to score, which the stages of a pipeline compute at the same time."""

    batches: Sequence[dict[str, Array]]


@dataclass(frozen=True)
class _GenerateUnit:
    """Prompts to answer."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling


class EvaluatedModel:
    """The model on this rank.

    max_length: tokens that the model reads at most; longer contexts lose their first tokens.
    shortened: the number of requests so far whose contexts have lost tokens.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        max_length: int,
        tokens: int | None = None,
        decode_text: Callable[[list[int]], str] | None = None,
    ) -> None:
        """`module`: a result of `kumi.parallel.build`. `tokens`: positions of a batch of one data-parallel rank.
        `decode_text`: returns the text of token ids, for stop strings; every rank needs it."""
        self.module, self.mesh, self.max_length = module, mesh, max_length
        self.decode_text = decode_text
        self.tokens = tokens or _TOKENS.get(mesh.device.type, _TOKENS["cuda"])
        self.shortened = 0
        self._decoders = [stage for stage in map(unwrap, stages_of(module).values()) if isinstance(stage, Decoder)]
        # True if requests with the same context are computed as branches after a single copy of it. On a GPU, the
        # tokens that this saves cost less time than the small operators of each branch.
        is_cpu, spec = mesh.device.type == "cpu", self._decoders[0].spec
        self.shares_contexts = is_cpu and mesh.layout.cp == 1 and supports_branches(spec)
        # A rank that fails within a unit leaves the others inside of its collectives, where no message reaches them.
        self.is_broken = False

    def score(self, requests: Sequence[Request], record: Record | None = None) -> list[Score]:
        """Return the scores of `requests`, on rank 0; the other ranks are in `lead`.

        Equal requests are computed once. A continuation without tokens has the log-prob 0. `record` is called after
        every unit of work with its scores.
        """
        indices: dict[Request, list[int]] = {}
        for index, request in enumerate(requests):
            if request.continuation:
                indices.setdefault(request, []).append(index)
        unique = [shorten(request, self.max_length) for request in indices]
        indices_of_unique = list(indices.values())
        self.shortened += sum(new is not old for new, old in zip(unique, indices, strict=True))
        result = [Score(0.0, True)] * len(requests)
        for batches in self._units(unique):
            tables = self._run(_ScoreUnit([dict(batch.columns) for batch in batches]))
            complete: dict[int, Score] = {}
            for batch, (log_probs, top) in zip(batches, tables, strict=True):
                for request_index, score in batch.scores(log_probs, top):
                    complete |= dict.fromkeys(indices_of_unique[request_index], score)
            for index, score in complete.items():
                result[index] = score
            if record is not None:
                record(list(complete), list(complete.values()))
        return result

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        record: Callable[[Sequence[Reply]], None] | None = None,
    ) -> list[Reply]:
        """Return the reply to each of `prompts`, on rank 0; the other ranks are in `lead`.

        `record` is called after every unit of work with its replies. Raise LayoutError for pp and cp.
        """
        check_generation_layout(self.mesh.layout)
        size, result = _PROMPTS * self.mesh.layout.dp, []
        for start in range(0, len(prompts), size):
            replies = self._run(_GenerateUnit(prompts[start : start + size], sampling))
            unit = [replace(reply, prompt=start + reply.prompt) for reply in replies]
            if record is not None:
                record(unit)
            result += unit
        return result

    def _units(self, requests: Sequence[Request]) -> Iterator[list[PackedBatch]]:
        """Yield the batches of each unit of work."""
        layout = self.mesh.layout
        # A context-parallel rank has two pieces of a row, a tensor-parallel rank a part of the tokens.
        multiple = (2 * layout.cp if layout.cp > 1 else 1) * layout.tp
        batches = pack_requests(
            requests, tokens=self.tokens, ranks=layout.dp, multiple=multiple, share=self.shares_contexts
        )
        while group := list(islice(batches, 1 if layout.pp == 1 else 4 * layout.pp)):
            yield group

    def _run(self, unit: Any) -> Any:
        """Broadcast `unit` from rank 0 and return its result."""
        broadcast_object(unit, self.mesh)
        return self.execute(unit)

    def execute(self, unit: Any) -> Any:
        """Do this rank's part of `unit`. Every rank must call it; the result is complete on all."""
        self.is_broken = True
        with evaluating(self.module):
            generates = isinstance(unit, _GenerateUnit)
            result = self._replies(unit) if generates else self._scores(unit.batches)
        self.is_broken = False
        return result

    def _scores(self, batches: Sequence[dict[str, Array]]) -> list[tuple[Array, Array]]:
        """Return, for each of `batches`, the log-probs of its labels and whether each is the most probable token, both
        (B, S)."""
        mesh, objective = self.mesh, OBJECTIVES["lm"]()
        inputs = []
        for batch in batches:
            rows = self._own_rows(len(batch["input_ids"]))
            own = {name: torch.from_numpy(column[rows]) for name, column in batch.items()}
            inputs.append({**decoder_inputs(shard_batch(objective, own, mesh)), "statistics": ("top",)})
        with self._branching():
            outputs = pipeline.forward_microbatches(self.module, mesh, inputs)
        shapes = [batch["input_ids"].shape for batch in batches]
        tables = [torch.zeros(2, *shape, dtype=torch.float64, device=mesh.device) for shape in shapes]
        # Ranks without the head have no outputs. All ranks of a tensor-parallel group have the same outputs.
        if mesh.index("tp") == 0:
            for table, scores in zip(tables, outputs):
                self._place(table, scores)
        total = all_reduce_sum(torch.cat([table.flatten() for table in tables]), mesh).cpu().numpy()
        sizes = np.cumsum([table.numel() for table in tables])[:-1]
        parts = [part.reshape(2, *shape) for part, shape in zip(np.split(total, sizes), shapes, strict=True)]
        return [(part[0], part[1] > 0) for part in parts]

    @contextmanager
    def _branching(self) -> Iterator[None]:
        """Let the decoders compute branches of shared contexts within the `with` block, if this model shares them."""
        slots = [decoder.make_attention for decoder in self._decoders]
        for decoder in self._decoders if self.shares_contexts else ():
            decoder.make_attention = branching_attention
        try:
            yield
        finally:
            for decoder, slot in zip(self._decoders, slots, strict=True):
                decoder.make_attention = slot

    def _replies(self, unit: _GenerateUnit) -> list[Reply]:
        """Return the replies to the prompts of `unit`, in their order."""
        mesh = None if self.mesh.is_single else self.mesh
        decoder = unwrap(self.module)
        assert isinstance(decoder, Decoder)
        batch = BatchedDecoder(decoder, slots=_SLOTS, mesh=mesh, decode_text=self.decode_text)
        replies = list(batch.generate(unit.prompts, unit.sampling))
        if mesh is not None:
            # Ranks of a tensor-parallel group have the same replies.
            own = replies if self.mesh.index("tp") == 0 else []
            replies = [reply for part in gather_objects(own, mesh) for reply in part]
        return sorted(replies, key=lambda reply: reply.prompt)

    def _own_rows(self, count: int) -> slice:
        """Return this data-parallel rank's rows of a batch of `count`."""
        share, index = count // self.mesh.layout.dp, self.mesh.layout.dp_index(self.mesh.rank)
        return slice(index * share, (index + 1) * share)

    def _place(self, table: Tensor, scores: TokenScores) -> None:
        """Write this rank's `scores` to its rows and positions of `table` (2, B, S)."""
        layout, (_, count, length) = self.mesh.layout, table.shape
        positions = torch.arange(length)
        if layout.cp > 1:
            positions = positions_of_rank(length, layout.cp, self.mesh.index("cp"))
        assert scores.top is not None
        both = torch.stack([scores.log_probs.double(), scores.top.double()])
        table[:, self._own_rows(count)] = table[:, self._own_rows(count)].index_copy(2, positions.to(both.device), both)


def lead(model: EvaluatedModel, work: Callable[[EvaluatedModel], T]) -> T | None:
    """Return work(model) on rank 0; on the other ranks, compute its units and return None. Every rank must call it."""
    if model.mesh.rank != 0:
        while (unit := _receive(model.mesh)) is not None:
            model.execute(unit)
        return None
    try:
        return work(model)
    finally:
        if not model.is_broken:
            broadcast_object(None, model.mesh)


def lead_and_share(model: EvaluatedModel, work: Callable[[EvaluatedModel], T]) -> T:
    """Return work(model) of rank 0 on every rank. Every rank must call it."""
    return cast(T, broadcast_object(lead(model, work), model.mesh))


def _receive(mesh: Mesh) -> Any:
    """Return the unit of work of rank 0, on another rank."""
    return broadcast_object(None, mesh)
