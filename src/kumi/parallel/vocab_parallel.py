"""The head and its log-probabilities where the rows of the vocabulary are dealt out over the tp ranks.

Of every token the ranks tell each other two numbers, the log-sum-exp of their logits and the label's logit; the logits
themselves are never gathered in training (Shoeybi et al., 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kumi.nn.logprob import Vocabulary
from kumi.parallel.token_collectives import gathered, scattered, summed


class VocabularyPart(Vocabulary):
    """This rank's rows: equally many on all ranks, the last of which are padding where they do not go up evenly.

    With `sequence_parallel` hidden states are this rank's part of all tokens.
    """

    def __init__(self, group: dist.ProcessGroup, size: int, sequence_parallel: bool) -> None:
        self.group, self.size, self.sequence_parallel = group, size, sequence_parallel
        self.count = -(-size // group.size())
        self.first = self.count * group.rank()

    def padding(self, weight: Tensor) -> int:
        return max(0, self.first + self.count - self.size)

    def rows(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        rows = labels - self.first
        here = (rows >= 0) & (rows < self.count)
        return rows.clamp(0, self.count - 1), here

    def join(self, log_sum: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        parts = gathered(torch.stack((log_sum, chosen))[None], self.group)
        return torch.logsumexp(parts[:, 0], dim=0), parts[:, 1].sum(0)

    def gather(self, hidden: Tensor) -> Tensor:
        return gathered(hidden, self.group) if self.sequence_parallel else hidden

    def reduce(self, grad_hidden: Tensor) -> Tensor:
        return (scattered if self.sequence_parallel else summed)(grad_hidden, self.group)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """All logits (T, V) on every rank, without a gradient: to look at, not to train with."""
        part = F.linear(self.gather(hidden), weight.to(hidden.dtype))
        whole = gathered(part.T, self.group).T
        return whole[:, : self.size]
