"""Compare a checkpoint with the run that resumes from it, before any tensor is read.

The comparison covers the names and global shapes of all tensors of the model and the optimizer, in both directions, the
model's digest, and the digest of the training tokens. It does not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kumi.config import ResolvedRun
from kumi.config.stored_config import load_stored_config
from kumi.data import Store
from kumi.errors import KumiError, RefusedError
from kumi.parallel.grad_norm import LossScale
from kumi.spec import families
from kumi.spec.saved_tensors import model_digest, run_shapes
from kumi.storage import checkpoint
from kumi.storage.checkpoint import Checkpoint
from kumi.storage.folders import checkpoint_root
from kumi.train.reward_model_files import REWARD_MODELS, reward_model_identities
from kumi.train.train_state import TrainState, adapter_base, cpu_arithmetic, critic_meta

_OR_NEW_RUN = "or start a new run in another train.out"


def last_checkpoint(run: ResolvedRun) -> Checkpoint | None:
    """Return the last checkpoint of `run`; None if there is none.

    Raise RefusedError if the checkpoint is damaged or of another optimizer, or if the names or global shapes of its
    tensors differ from those of the run.
    """
    folder = checkpoint.latest(checkpoint_root(run.out))
    if folder is None:
        return None
    saved = checkpoint.open(folder)
    stored, kind = saved.meta.get("optimizer", run.optim.kind), run.optim.kind
    if stored != kind:
        raise RefusedError(
            f"{folder}: has optimizer states of {stored!r}, but optim.kind is {kind!r}; set optim.kind={stored}, "
            f"{_OR_NEW_RUN}"
        )
    if difference := saved.difference(run_shapes(run.model, run.optim, run.job.critic)):
        raise RefusedError(f"{folder}: {difference}; restore the run's model, {_OR_NEW_RUN}")
    return saved


def resume_notes(run: ResolvedRun, allow_change: Sequence[str] = ()) -> list[str]:
    """Return lines for the terminal: changes since the last checkpoint, and comparisons that were impossible.

    Raise RefusedError if `run` cannot resume from its last checkpoint. If `allow_change` names "model" or a key in that
    section, the model's config.json may differ as long as all shapes are the same.
    """
    folder = checkpoint.latest(checkpoint_root(run.out))
    if folder is None:
        return []
    meta = checkpoint.open(folder).meta
    changed = _config_changes(meta, run)
    allowed = any(key.partition(".")[0] == "model" for key in allow_change)
    if changed and not allowed:
        raise RefusedError(
            f"{folder}: was saved by a model with another config.json ({', '.join(changed[:3])}"
            f"{', ...' if len(changed) > 3 else ''}); restore config.json, {_OR_NEW_RUN}, or continue with the new "
            f"values, if they leave all shapes unchanged: --allow-change model"
        )
    last_checkpoint(run)
    _check_position(folder, meta, run)
    lines = [f"continues with {', '.join(changed)}"] if changed else _missing_comparisons(meta, run)
    lines += _arithmetic_changes(meta, run) + _reward_model_changes(folder, meta, run, allow_change)
    return [f"resume     {folder}: {line}" for line in lines]


def _check_position(folder: Path, meta: Mapping[str, Any], run: ResolvedRun) -> None:
    """Raise RefusedError if the steps of a run in epochs do not end where its epochs do, because earlier steps had
    another number of sequences."""
    step, per_step = meta["step"], run.batch.sequences
    sequences = meta.get("sequences", step * per_step)
    if run.config.train.epochs is not None and sequences != step * per_step:
        raise RefusedError(
            f"{folder}: has trained on {sequences} sequences in {step} steps, and batch.tokens_per_step is "
            f"{run.batch.tokens_per_step} now, {per_step} sequences, so the steps of "
            f"train.epochs={run.config.train.epochs:g} would end elsewhere; restore batch.tokens_per_step, or give "
            f"train.steps"
        )


def _reward_model_changes(
    folder: Path, meta: Mapping[str, Any], run: ResolvedRun, allow_change: Sequence[str]
) -> list[str]:
    """Return a line for each reward model that has other files than when the checkpoint was saved.

    Raise RefusedError unless `allow_change` names "rewards": the groups of the checkpoint have the old scores. Rewards
    that were added or removed are changes of the configuration, which `kumi.train.run_folder` compares.
    """
    saved, lines = meta.get(REWARD_MODELS, {}), []
    for name, now in reward_model_identities(run).items():
        before = saved.get(name)
        if before is None or before["digest"] == now["digest"]:
            continue
        if "rewards" not in allow_change:
            raise RefusedError(
                f"{folder}: its replies were scored by the reward model of {name!r} that was in {before['folder']} "
                f"(digest {before['digest'][:12]}), but {now['folder']} has another one now ({now['digest'][:12]}); "
                f"restore it, {_OR_NEW_RUN}, or continue with the new scores: --allow-change rewards"
            )
        lines.append(f"reward {name!r} continues with another reward model, that of {now['folder']}")
    return lines


def _arithmetic_changes(meta: Mapping[str, Any], run: ResolvedRun) -> list[str]:
    """Return a line if the CPU, the compute dtype or the numerics differ from those of the checkpoint.

    A checkpoint of an earlier kumi version does not store these; the numerics are then those of the stored
    configuration.
    """
    now = cpu_arithmetic(run)
    if not now:
        return []
    stored = load_stored_config(run.out).precision.numerics
    fallback = now if stored == "auto" else now | {"numerics": stored}
    before = {key: meta.get(key, fallback[key]) for key in now}
    if before == now:
        return []
    was, becomes = (f"{used['cpu']} in {used['compute']} with {used['numerics']!r}" for used in (before, now))
    return [f"was computed on {was}, and continues on {becomes}; losses are equal up to rounding only"]


def _config_changes(meta: Mapping[str, Any], run: ResolvedRun) -> list[str]:
    """Return "key: old -> new" for each difference between the stored config.json and the run's.

    Return [] if both describe the same model.
    """
    stored = meta.get("hf_config")
    if not isinstance(stored, dict) or meta.get("model") == model_digest(run.model) or _is_read_as(stored, run):
        return []
    keys = dict.fromkeys([*stored, *run.hf_config])
    values = ((key, stored.get(key, "unset"), run.hf_config.get(key, "unset")) for key in keys)
    return [f"{key}: {old!r} -> {new!r}" for key, old, new in values if old != new]


def _is_read_as(hf_config: dict[str, Any], run: ResolvedRun) -> bool:
    """Return True if this version of kumi reads `hf_config` as the model of `run`."""
    try:
        return families.from_hf(hf_config) == run.base
    except KumiError:  # another version of kumi wrote it, and this one cannot read it
        return False


def _missing_comparisons(meta: Mapping[str, Any], run: ResolvedRun) -> list[str]:
    """Return a line if `meta` has no digest of the model, or one that another kumi version computed differently."""
    if "model" not in meta:
        rest = " and config.json" if isinstance(meta.get("hf_config"), dict) else ""
        return [
            f"has no digest of the model, so only names, shapes{rest} were compared; the next checkpoint will have one"
        ]
    if meta["model"] != model_digest(run.model):
        version = meta.get("kumi")
        return [
            f"kumi {version} computed the model's digest otherwise, so only names, shapes and config.json were compared"
        ]
    return []


def restore_state(saved: Checkpoint, store: Store, run: ResolvedRun) -> TrainState:
    """Return the TrainState in `saved`. Raise RefusedError if its training data differ from those in `store`, or its
    base model from the run's."""
    meta, folder = saved.meta, saved.folder
    if meta["data"] != store.content:
        raise RefusedError(
            f"{folder}: was trained on the data with digest {meta['data'][:12]}, but {store.folder} has "
            f"{store.content[:12]}; restore the data files, {_OR_NEW_RUN}"
        )
    for was, base in ((meta, adapter_base(run)), (meta.get("critic", {}), critic_meta(run).get("critic", {}))):
        if was.get("base_digest") != base.get("base_digest"):
            raise RefusedError(
                f"{folder}: has adapters of the base model that was in {was.get('base')}, but {base.get('base')} has "
                f"another model now; restore that model, {_OR_NEW_RUN}"
            )
    scale = LossScale(
        meta["loss_scale"],
        meta["loss_scale_good_steps"],
        skipped=meta.get("skipped_updates", 0),  # earlier versions of kumi did not count skipped updates
        in_a_row=meta.get("skipped_in_a_row", 0),
    )
    return TrainState(meta["step"], meta["tokens"], scale, saved=meta["step"])
