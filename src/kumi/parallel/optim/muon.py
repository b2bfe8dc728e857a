"""Muon: the update of a matrix is its orthogonalised momentum (Jordan et al., 2024).

Muon updates the matrices of layers, each expert's separately. AdamW with the same settings updates embedding, head,
norms, biases and convolutions. Two matrices in one tensor (the experts' gate and up) are orthogonalised separately. The
update of a (rows, columns) matrix is scaled by 0.2 sqrt(max(rows, columns)), about the size of AdamW's updates, so both
use one learning rate and weight decay (Liu et al., 2025, arXiv:2502.16982, equation 4).

Momenta are sharded like the parameters. For the update, one of the ranks that shard a matrix gathers it. Replicas on
other ranks (over dp_replicate, or over tp if it does not shard the matrix) do the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kumi.parallel.mesh import Mesh
from kumi.parallel.optim.adamw import update_param_group
from kumi.parallel.optim.newton_schulz import newton_schulz_dtype, orthogonalise
from kumi.parallel.optim.optimizer import TrainedParams, drop_grads, local_grad, make_param_groups, zero_states
from kumi.parallel.optim.whole_matrices import MatrixBucket, gather_to_owners, matrix_buckets, scatter_from_owners
from kumi.parallel.stage_modules import local_shard
from kumi.spec.op import Param
from kumi.spec.optim import Optim
from kumi.spec.optim_states import MOMENTUM, is_muon_matrix
from kumi.spec.shard_slices import is_fused_pair

# Liu et al., 2025: the root mean square of AdamW's updates.
_RMS = 0.2


@dataclass(frozen=True)
class MuonGroup:
    """Matrices that are updated together, with the settings `group`."""

    group: dict[str, Any]
    bucket: MatrixBucket


@dataclass(frozen=True)
class Muon:
    """Parameters in groups, and their states.

    `others`: groups of parameters with AdamW's states.
    `batches`: matrices with a momentum.
    `shapes`: (rows, columns) of a matrix in each parameter of `batches`; a parameter may consist of several matrices.
    """

    optim: Optim
    mesh: Mesh
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]
    others: list[dict[str, Any]]
    batches: tuple[MuonGroup, ...]
    shapes: dict[Tensor, tuple[int, int]]

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient. All ranks must call it together."""
        for group in self.others:
            update_param_group(group, self.state)
        for batch in self.batches:
            self._update(batch.group, batch.bucket.with_gradients())

    def zero_grad(self) -> None:
        """Free the gradients."""
        drop_grads(self.param_groups)

    def _update(self, group: dict[str, Any], bucket: MatrixBucket) -> None:
        """Update the matrices of `bucket`, which all have a gradient, with the settings `group`."""
        trained = [entry.parameter for entry in bucket.entries]
        if not trained:
            return
        gradients = [local_grad(parameter) for parameter in trained]
        parts = nesterov(gradients, [self.state[parameter][MOMENTUM] for parameter in trained], self.optim.betas[0])
        owned = gather_to_owners(bucket, parts, self.mesh)
        for place, tensor in owned.items():
            shape = self.shapes[trained[place]]
            matrices = tensor if tensor.shape == shape else tensor.view(-1, *shape)
            owned[place] = orthogonalise(matrices).reshape(tensor.shape)
        for parameter, part in zip(trained, scatter_from_owners(bucket, owned, parts[0], self.mesh), strict=True):
            shard = local_shard(parameter)
            shard.mul_(1 - group["lr"] * group["weight_decay"])
            shard.add_(part, alpha=-group["lr"] * _RMS * max(self.shapes[parameter]) ** 0.5)


def nesterov(gradients: Sequence[Tensor], momenta: Sequence[Tensor], momentum: float) -> list[Tensor]:
    """Add `gradients` to the `momenta` in place, and return the updates before orthogonalisation.

    The updates are in the dtype of `newton_schulz_dtype`.

    As in torch.optim.Muon, a momentum is a moving average. The update is the value that the momentum would have
    next if the gradient repeated.
    """
    torch._foreach_lerp_(list(momenta), list(gradients), 1 - momentum)
    ahead = torch._foreach_lerp(list(gradients), list(momenta), momentum)
    return [update.to(newton_schulz_dtype(update.dtype)) for update in ahead]


def matrix_shape(param: Param) -> tuple[int, int]:
    """Return (rows, columns) of a matrix in `param`: of one expert, and of one of a fused pair."""
    rows, columns = param.shape[-2:]
    return rows // 2 if is_fused_pair(param.dims[-2]) else rows, columns


def build_muon(trained: TrainedParams) -> Muon:
    """Return Muon over `trained`, with its states zero."""
    optim, mesh, params = trained.optim, trained.mesh, list(trained.parameters)
    matrices = {parameter: param for param, parameter in params if is_muon_matrix(param)}
    others = make_param_groups(
        [(parameter, param.decayed) for param, parameter in params if parameter not in matrices], optim
    )
    groups = make_param_groups([(parameter, param.decayed) for parameter, param in matrices.items()], optim)
    batches = tuple(
        MuonGroup(group, bucket)
        for group in groups
        for bucket in matrix_buckets([(matrices[parameter], parameter) for parameter in group["params"]], mesh)
    )
    states: dict[Tensor, dict[str, Tensor]] = {
        parameter: zero_states(param, parameter, optim, mesh) for param, parameter in params
    }
    shapes: dict[Tensor, tuple[int, int]] = {parameter: matrix_shape(param) for parameter, param in matrices.items()}
    return Muon(optim, mesh, [*groups, *others], states, others, batches, shapes)
