"""Compare the log-probs of the policy before its first step with the stored ones of the reference, the same model.

The policy is the model in training. The data of a source has two sides, "train" and "validation", and consists of
units: examples of one or several sequences.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from kumi.config import ResolvedRun
from kumi.data import Batch, Store
from kumi.data.binfile import Array
from kumi.data.reference_file import read_sums
from kumi.errors import ConfigError
from kumi.objectives import Objective
from kumi.parallel.mesh import Mesh, all_reduce_max
from kumi.parallel.run_microbatches import evaluating, shard_batch, sum_sequences
from kumi.train.reference_sums import source_sides, sums_path, token_checks, weights_fingerprint
from kumi.train.step import as_tensors

_EPS_FLOAT32 = torch.finfo(torch.float32).eps


def check_reference(
    run: ResolvedRun, store: Store, mesh: Mesh, model: nn.Module, objective: Objective, batch: Batch
) -> None:
    """Raise ConfigError unless the policy `model` gives the sequences of `batch` the reference's log-probs.

    `batch`: this rank's rows of the first step. The policy's log-prob of a sequence with n trained tokens may differ
    from the reference's, R, by `log_prob_tolerance(dtype, R, n)`. Where both are equal, DPO's loss begins at log 2.
    """
    size = run.layout.microbatch
    parts = [
        {name: column[at : at + size] for name, column in batch.items()} for at in range(0, len(batch["labels"]), size)
    ]
    with evaluating(model):
        sharded = [shard_batch(objective, as_tensors(part), mesh) for part in parts]
        totals = sum_sequences(model, mesh, sharded)
    # For the sequence with the largest difference relative to its tolerance: this ratio, the sums of log-probs by the
    # policy and by the reference, and the number of trained tokens.
    worst = torch.zeros(4, dtype=torch.float64)
    for part, values in zip(parts, totals):
        reference, trained = torch.from_numpy(part["reference"]), torch.from_numpy(part["trained"])
        policy = values.cpu()
        excess = (policy - reference).abs() / log_prob_tolerance(run.precision.matmul_dtype, reference, trained)
        excess = torch.where(trained > 0, excess, torch.zeros_like(excess)).nan_to_num(nan=torch.inf)
        place = int(excess.argmax())
        if excess.numel() and excess.flatten()[place] > worst[0]:
            worst = torch.stack([column.flatten()[place].double() for column in (excess, policy, reference, trained)])
    largest = float(all_reduce_max(worst[0].clone().to(mesh.device), mesh))
    if largest <= 1:
        return
    blame = _blame(run, store, mesh, model, batch)
    # The ranks that have the largest difference all report it.
    own = worst if float(worst[0]) == largest else torch.full_like(worst, -torch.inf)
    _, policy_sum, reference_sum, tokens = all_reduce_max(own.to(mesh.device), mesh).tolist()
    raise ConfigError(
        f"the reference is the policy before its first step, but a sequence of {tokens:.0f} trained tokens has the "
        f"log-prob {policy_sum:.6g} by the policy and {reference_sum:.6g} by the stored reference, {largest:.3g} times "
        f"as far apart as rounding may put them; {blame}"
    )


def log_prob_tolerance(dtype: str, log_prob: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return how far two sums of log-probs of `tokens` tokens may be apart by rounding in `dtype`.

    A token's log-prob is computed from hidden states and logits that are rounded to `dtype`. Two layouts or packings
    round them differently, by a relative error of a few units of the last place eps, independently for each token, so
    that the error of a sum grows with the square root of the number n of tokens:

        c eps sqrt(n) (1 + |log_prob| / n)

    c is 8 for float32, whose sums over the hidden size and the vocabulary round as well, and 2 for smaller dtypes,
    whose sums are float32. By `benchmarks/reference_tolerance.py`, errors are at most 0.4 times this tolerance.
    """
    count = tokens.double().clamp(min=1)
    eps = torch.finfo(getattr(torch, dtype)).eps
    return (2 if eps > _EPS_FLOAT32 else 8) * eps * count.sqrt() * (1 + log_prob.abs() / count)


def _blame(run: ResolvedRun, store: Store, mesh: Mesh, model: nn.Module, batch: Batch) -> str:
    """Return which of data, mask, policy and reference disagrees, and the remedy. All ranks call it together."""
    stored_counts: dict[float, float] = {}  # checksum of a sequence's tokens -> its number of trained tokens
    fingerprints: list[Array] = []
    for source, side in source_sides(store):
        units = store.open_units(source, side)
        sums = read_sums(sums_path(run, source, side), units.file.document_count, units.unit_count)
        if sums is not None:
            stored_counts |= dict(zip(sums.tokens.tolist(), sums.trained.tolist(), strict=True))
            fingerprints.append(sums.fingerprint)
    trained, checksums = token_checks(batch)
    used = trained > 0
    unknown = [value not in stored_counts for value in checksums[used].tolist()]
    pairs = zip(checksums[used].tolist(), trained[used].tolist(), strict=True)
    other_mask = [stored_counts.get(value, count) != count for value, count in pairs]
    counts = torch.tensor([sum(unknown), sum(other_mask)], dtype=torch.float64, device=mesh.device)
    data, mask = all_reduce_max(counts, mesh).tolist()
    weights = weights_fingerprint(model, mesh)
    policy = any(not np.allclose(weights, fingerprint, rtol=1e-9, atol=0) for fingerprint in fingerprints)
    files = "the files *.reference.* of the store"
    if data:
        return f"the data disagrees: the reference was computed for other tokens; remove {files}"
    if mask:
        return f"the mask disagrees: the reference was computed for other trained tokens; remove {files}"
    if policy:
        return (
            "the policy disagrees: its weights are not those that the reference was computed with; start from the "
            "reference's weights, or name their folder with reference.model"
        )
    return f"the stored sums themselves disagree: they were computed for these weights, data and mask; remove {files}"
