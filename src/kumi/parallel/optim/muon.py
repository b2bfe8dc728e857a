"""Muon: the momentum of a matrix, orthogonalised, is its update (Jordan et al., 2024).

The matrices of layers are updated so, each expert's for itself; embedding, head, norms, biases and convolutions by
AdamW with the same settings. Two matrices that lie side by side in one tensor (the experts' gate and up) are two. The
update of a (rows, columns) matrix is scaled by 0.2 sqrt(max(rows, columns)), about the size of AdamW's, so that AdamW's
learning rate and weight decay serve both (Liu et al., 2025, arXiv:2502.16982, equation 4).

Momenta stay sharded as the parameters are. For the update each matrix is whole on one of the ranks that hold its parts;
copies on other ranks (of dp_replicate, or of tp where it does not shard the matrix) do the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kumi.parallel.grad_norm import local
from kumi.parallel.mesh import Mesh
from kumi.parallel.optim.adamw import update_group
from kumi.parallel.optim.newton_schulz import compute_dtype, orthogonalise
from kumi.parallel.optim.optimizer import Trained, drop_gradients, gradient_of, groups_of, new_states
from kumi.parallel.optim.whole_matrices import Bucket, bring, buckets_of, send_back
from kumi.spec.op import Param
from kumi.spec.optim import Optim
from kumi.spec.optim_states import MOMENTUM, is_muon_matrix
from kumi.spec.shard_slices import is_fused_pair

# Liu et al., 2025: the root mean square of AdamW's updates.
RMS = 0.2


@dataclass(frozen=True)
class Batch:
    """Matrices with the settings `group` that are updated together."""

    group: dict[str, Any]
    bucket: Bucket


@dataclass(frozen=True)
class Muon:
    """Parameters in groups, and their states: AdamW's in the groups `others`, the momentum of those in `batches`.

    `shapes` are the (rows, columns) of the matrices that such a parameter holds, one or several.
    """

    optim: Optim
    mesh: Mesh
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]
    others: list[dict[str, Any]]
    batches: tuple[Batch, ...]
    shapes: dict[Tensor, tuple[int, int]]

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient. All ranks must call it together."""
        for group in self.others:
            update_group(group, self.state)
        for batch in self.batches:
            self._update(batch.group, batch.bucket.with_gradients())

    def zero_grad(self) -> None:
        """Drops the gradients and their memory."""
        drop_gradients(self.param_groups)

    def _update(self, group: dict[str, Any], bucket: Bucket) -> None:
        trained = [entry.parameter for entry in bucket.entries]
        if not trained:
            return
        gradients = [gradient_of(parameter) for parameter in trained]
        parts = nesterov(gradients, [self.state[one][MOMENTUM] for one in trained], self.optim.betas[0])
        wholes = bring(bucket, parts, self.mesh)
        for place, whole in wholes.items():
            shape = self.shapes[trained[place]]
            matrices = whole if whole.shape == shape else whole.view(-1, *shape)
            wholes[place] = orthogonalise(matrices).reshape(whole.shape)
        for parameter, part in zip(trained, send_back(bucket, wholes, parts[0], self.mesh), strict=True):
            own = local(parameter)
            own.mul_(1 - group["lr"] * group["weight_decay"])
            own.add_(part, alpha=-group["lr"] * RMS * max(self.shapes[parameter]) ** 0.5)


def nesterov(gradients: Sequence[Tensor], momenta: Sequence[Tensor], momentum: float) -> list[Tensor]:
    """Add `gradients` to the `momenta`, in place; return what is to be orthogonalised, in the dtype for that.

    As in torch.optim.Muon, a momentum is a moving average, and its next value is what the update looks ahead to.
    """
    torch._foreach_lerp_(list(momenta), list(gradients), 1 - momentum)
    ahead = torch._foreach_lerp(list(gradients), list(momenta), momentum)
    return [update.to(compute_dtype(update.dtype)) for update in ahead]


def matrix_shape(param: Param) -> tuple[int, int]:
    """Return (rows, columns) of the matrices that `param` holds: an expert's, and of a pair side by side each."""
    rows, columns = param.shape[-2:]
    return rows // 2 if is_fused_pair(param.dims[-2]) else rows, columns


def build_muon(trained: Trained) -> Muon:
    """Return Muon over `trained`, with its states zero."""
    optim, mesh, decayed = trained.optim, trained.mesh, {one: param.decayed for param, one in trained.parameters}
    matrices = {one: param for param, one in trained.parameters if is_muon_matrix(param)}
    others = groups_of([(one, decayed[one]) for _, one in trained.parameters if one not in matrices], optim)
    groups = groups_of([(one, decayed[one]) for one in matrices], optim)
    batches = tuple(
        Batch(group, bucket)
        for group in groups
        for bucket in buckets_of([(matrices[one], one) for one in group["params"]], mesh)
    )
    states: dict[Tensor, dict[str, Tensor]] = {
        one: new_states(param, one, optim, mesh) for param, one in trained.parameters
    }
    shapes: dict[Tensor, tuple[int, int]] = {one: matrix_shape(param) for one, param in matrices.items()}
    return Muon(optim, mesh, [*groups, *others], states, others, batches, shapes)
