"""Gradients of whole replicas, summed as products of low rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from kumi.spec.comm import Comm


def low_rank(group: dist.ProcessGroup, comm: Comm) -> tuple[Any, int]:
    """The state of `sum_low_rank`: what earlier steps have left out of every bucket, and how many ranks there are."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    made = PowerSGDState(group, matrix_approximation_rank=comm.powersgd_rank, start_powerSGD_iter=comm.powersgd_start)
    return made, group.size()


def sum_low_rank(state: tuple[Any, int], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Adds a bucket of gradients up over the ranks, about. PyTorch's hook averages; DDP inspects this signature."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    made, ranks = state
    summed: torch.futures.Future[torch.Tensor] = powerSGD_hook(made, bucket).then(lambda done: done.value().mul_(ranks))
    return summed
