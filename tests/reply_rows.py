"""Replies with the columns of policy gradients, packed into rows of a batch, for tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kumi.objectives import IGNORED

COLUMNS = ("advantages", "old_log_probs", "sampler_log_probs", "reference_log_probs")


@dataclass
class Reply:
    """A prompt and its reply. `values`: the columns of the tokens of the reply, by name."""

    prompt: np.ndarray
    ids: np.ndarray
    values: dict[str, np.ndarray]


def random_replies_of(count, longest, vocab, seed=0, *, spread=0.3, middle=None, tokenwise=False):
    """Return `count` replies of 1 to `longest` tokens, with log-probs around `middle`, by default those of a uniform
    prediction. `tokenwise`: every token has its own advantage."""
    random, middle = np.random.default_rng(seed), -np.log(vocab) if middle is None else middle
    replies = []
    for _ in range(count):
        prompt, length = random.integers(0, vocab, random.integers(1, 4)), int(random.integers(1, longest + 1))
        values = {name: middle + spread * random.normal(size=length) for name in COLUMNS[1:]}
        values["advantages"] = random.normal(size=length) if tokenwise else np.full(length, random.normal())
        replies.append(Reply(prompt, random.integers(0, vocab, length), values))
    return replies


def make_rows(replies, rows, seq_len):
    """Return the batch of `rows`, lists of numbers of `replies`, as float64 and int64 tensors; the rest is padding."""
    shape, groups = (len(rows), seq_len), max(map(len, rows))
    batch = {name: np.zeros(shape, np.int64) for name in ("input_ids", "segments", "document_ids")}
    batch |= {name: np.zeros(shape) for name in COLUMNS}
    batch |= {"labels": np.full(shape, IGNORED), "trained": np.zeros((len(rows), groups), np.int64)}
    for at, numbers in enumerate(rows):
        batch["document_ids"][at] = len(numbers)
        begin = 0
        for segment, number in enumerate(numbers):
            reply = replies[number]
            inputs = np.concatenate([reply.prompt, reply.ids[:-1]])
            here, last = slice(begin, begin + len(inputs)), slice(begin + len(reply.prompt) - 1, begin + len(inputs))
            batch["input_ids"][at, here] = inputs
            batch["segments"][at, here] = batch["document_ids"][at, here] = segment
            batch["labels"][at, last] = reply.ids
            for name, values in reply.values.items():
                batch[name][at, last] = values
            batch["trained"][at, segment] = len(reply.ids)
            begin += len(inputs)
    tensors = {name: torch.from_numpy(column) for name, column in batch.items()}
    return tensors | {"document_ids": tensors["document_ids"].int()}


def row_sums(x, segments, count):
    """Return the sums of `x` (B, S) over segments, (B, count): the `SegmentSums` of a rank with complete rows."""
    return x.new_zeros(len(x), count).scatter_add(1, segments, x)
