"""The head and its log-probs with a vocabulary that is sharded over tp.

The ranks exchange two numbers for each token: the log-sum-exp of their logits, and the label's logit; and one more for
each statistic of the prediction. Training never all-gathers logits (Shoeybi et al., 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kumi.nn.logit_chunks import Vocabulary
from kumi.parallel.token_collectives import all_gather_no_grad, all_reduce_no_grad, reduce_scatter_no_grad


class VocabularyShard(Vocabulary):
    """This rank's rows of the vocabulary. All ranks have the same number of rows; the last rows may be padding.

    `size`: tokens in the vocabulary, V.
    `sequence_parallel`: hidden states are this rank's tokens only.
    `first`, `count`: token id of this rank's first row, and number of its rows.
    """

    def __init__(self, group: dist.ProcessGroup, size: int, sequence_parallel: bool) -> None:
        self.group, self.size, self.sequence_parallel = group, size, sequence_parallel
        self.count = -(-size // group.size())
        self.first = self.count * group.rank()

    def padding(self, weight: Tensor) -> int:
        """Return the number of this rank's rows beyond the vocabulary."""
        return max(0, self.first + self.count - self.size)

    def rows(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's row of each label, and a mask of the labels that are on this rank. Other rows mean
        nothing."""
        rows = labels - self.first
        here = (rows >= 0) & (rows < self.count)
        return rows.clamp(0, self.count - 1), here

    def join(self, numbers: Tensor) -> Tensor:
        """Return the `numbers` (N, C) of all ranks, (ranks, N, C)."""
        return all_gather_no_grad(numbers[None], self.group)

    def gather(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all tokens (T, D), given those on this rank."""
        return all_gather_no_grad(hidden, self.group) if self.sequence_parallel else hidden

    def reduce(self, grad_hidden: Tensor) -> Tensor:
        """Return the gradient of this rank's hidden states: the sum over ranks of `grad_hidden` (T, D)."""
        return (reduce_scatter_no_grad if self.sequence_parallel else all_reduce_no_grad)(grad_hidden, self.group)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return all logits (T, V) on every rank, without a gradient."""
        part = F.linear(self.gather(hidden), weight.to(hidden.dtype))
        padded = all_gather_no_grad(part.T, self.group).T
        return padded[:, : self.size]
