"""PowerSGD: gradients of replicas are summed as products of low-rank matrices."""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from kumi.spec.comm import Comm


def powersgd_state(group: dist.ProcessGroup, comm: Comm) -> tuple[Any, int]:
    """Return the state of `powersgd_hook`: PyTorch's state, with the error feedback, and the number of ranks."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    state = PowerSGDState(group, matrix_approximation_rank=comm.powersgd_rank, start_powerSGD_iter=comm.powersgd_start)
    return state, group.size()


def powersgd_hook(state: tuple[Any, int], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over the ranks, approximately.

    PyTorch's hook averages, so its result is multiplied by the number of ranks. DDP inspects this signature.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    torch_state, ranks = state
    averaged = powerSGD_hook(torch_state, bucket)
    summed: torch.futures.Future[torch.Tensor] = averaged.then(lambda done: done.value().mul_(ranks))
    return summed
