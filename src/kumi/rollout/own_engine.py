"""The engine inside of the training processes: the batched decoder, on the weights and the mesh that are trained.

Weights that ZeRO shards are gathered for the rollout. No weights are copied, and LoRA adapters are active. Only layouts
without a pipeline and without context parallelism can generate: see `kumi.spec.generation_layout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import numpy as np
from torch import nn

from kumi.inference.batched_decoder import BatchedDecoder, Reply
from kumi.inference.sampling import Sampling
from kumi.nn.decoder import Decoder
from kumi.parallel.mesh import Mesh
from kumi.parallel.stage_modules import unwrap
from kumi.rollout.group import GeneratedReply
from kumi.rollout.rollout_engine import SampleRequest

# The token ids of a prompt, and the requests for replies to it that one rank answers.
_Entry = tuple[Sequence[int], list[SampleRequest]]


class OwnEngine:
    """Generates with `model`, a result of `kumi.parallel.build`. `slots`: sequences that a rank decodes at once."""

    def __init__(self, model: nn.Module, mesh: Mesh, *, slots: int) -> None:
        decoder = unwrap(model)
        assert isinstance(decoder, Decoder), "check_generating_run refuses layouts with stages"
        self._mesh, self._version = mesh, 0
        self._decoder = BatchedDecoder(decoder, slots=slots, mesh=None if mesh.is_single else mesh)

    def generate(
        self, requests: Sequence[SampleRequest], sampling: Sampling
    ) -> Iterator[tuple[SampleRequest, GeneratedReply]]:
        """Yield the replies to this data-parallel rank's share of `requests`; ranks of tp yield the same ones."""
        entries = share_requests(requests, self._mesh.layout.dp)
        prompts = [ids for ids, _ in entries]
        # The decoder takes the noise of a reply from the number of its sample.
        samples = [[request.noise for request in asked] for _, asked in entries]
        by_noise = [{request.noise: request for request in asked} for _, asked in entries]
        for reply in self._decoder.generate(prompts, sampling, samples=samples):
            yield by_noise[reply.prompt][reply.sample], self._generated(reply)

    def _generated(self, reply: Reply) -> GeneratedReply:
        ids, log_probs = list(reply.ids), list(reply.log_probs)
        if reply.stop is not None:
            ids.append(reply.stop[0])
            log_probs.append(reply.stop[1])
        return GeneratedReply(np.array(ids, np.int32), np.array(log_probs, np.float64), reply.finish, self._version)

    def update(self, version: int) -> None:
        """Remember the number of updates, which replies record. The engine shares its weights with the training."""
        self._version = version

    def close(self) -> None:
        """Do nothing: the engine has started nothing."""


def share_requests(requests: Sequence[SampleRequest], ranks: int) -> list[_Entry]:
    """Share `requests` among `ranks`: rank r answers the entries r, r + ranks, r + 2 ranks ... of the result.

    The numbers of requests of two ranks differ by at most 1. Consecutive requests for one prompt stay together where
    they can: they share the prompt's forward pass.
    """
    bounds = [len(requests) * rank // ranks for rank in range(ranks + 1)]
    shares: list[list[_Entry]] = []
    for begin, end in pairwise(bounds):
        grouped = [list(asked) for _, asked in groupby(requests[begin:end], key=lambda request: request.prompt)]
        shares.append([(asked[0].ids, asked) for asked in grouped])
    most = max(map(len, shares))
    # The decoder gives prompt n to rank n % ranks, so shorter shares end with prompts without a request.
    empty: _Entry = (requests[0].ids, []) if requests else ([0], [])
    return [share[index] if index < len(share) else empty for index in range(most) for share in shares]
