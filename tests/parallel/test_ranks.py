"""The pool of ranks that the multi-rank tests run on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from ranks import RankError


def _sum_of_ranks(offset: int) -> float:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return value.item()


def _pid() -> int:
    return os.getpid()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the reason")
    dist.barrier()


def _abort() -> None:
    if dist.get_rank() == 1:
        os.abort()
    dist.barrier()


def _hang() -> None:
    time.sleep(60)


def test_ranks_communicate(ranks):
    assert ranks(2, _sum_of_ranks, 1) == [3.0, 3.0]
    assert ranks(4, _sum_of_ranks, 0) == [6.0] * 4


def test_processes_are_kept_between_calls(ranks):
    assert ranks(2, _pid) == ranks(2, _pid)


@pytest.mark.parametrize(
    ("work", "words"), [(_fail_on, "on rank 1:.*the reason"), (_abort, "rank 1 was killed by SIGABRT")]
)
def test_first_failure_is_shown_and_the_pool_recovers(ranks, work, words):
    args = (1,) if work is _fail_on else ()
    with pytest.raises(RankError, match=f"(?s){words}"):
        ranks(2, work, *args)
    assert ranks(2, _sum_of_ranks, 0) == [1.0, 1.0]


def test_a_hanging_rank_is_killed(ranks):
    with pytest.raises(RankError, match="gave no answer in 1 s"):
        ranks(2, _hang, timeout=1.0)
