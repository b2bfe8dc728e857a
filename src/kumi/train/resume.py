"""A checkpoint compared with the run that is to go on from it, before any of its tensors is read.

Compared are the names and global shapes of all tensors, those of the model and of the optimizer's states, in both
directions; the model's digest; and the digest of the training tokens. A layout takes no part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kumi.config import ResolvedRun
from kumi.config.stored_config import load_stored
from kumi.data import Store
from kumi.errors import KumiError, RefusedError
from kumi.parallel.grad_norm import LossScale
from kumi.spec import families
from kumi.spec.saved_tensors import model_digest, model_shapes, optimizer_shapes
from kumi.storage import checkpoint
from kumi.storage.checkpoint import Checkpoint
from kumi.train.run_folder import checkpoint_root
from kumi.train.train_state import TrainState, base_of, computed_by

_ANEW = "or start a new run in another train.out"


def last_checkpoint(run: ResolvedRun) -> Checkpoint | None:
    """Return the last checkpoint of `run`, its tensors those of the run's model and optimizer; None where none is.

    Raise RefusedError where it is damaged, or a name or a global shape differs.
    """
    folder = checkpoint.latest(checkpoint_root(run.out))
    if folder is None:
        return None
    saved = checkpoint.open(folder)
    stored, kind = saved.meta.get("optimizer", run.optim.kind), run.optim.kind
    if stored != kind:
        raise RefusedError(
            f"{folder}: has states of the optimizer {stored!r}, optim.kind is {kind!r}; restore it, {_ANEW}"
        )
    if difference := saved.difference(model_shapes(run.model) | optimizer_shapes(run.model, run.optim)):
        raise RefusedError(f"{folder}: {difference}; restore the run's model, {_ANEW}")
    return saved


def check_resume(run: ResolvedRun, allow_change: Sequence[str] = ()) -> list[str]:
    """Return lines on what a resume of `run` changes or cannot compare. Raise RefusedError where it must not go on.

    `allow_change` may name "model" or a key in it: the model may then compute otherwise, with tensors of equal shapes.
    """
    folder = checkpoint.latest(checkpoint_root(run.out))
    if folder is None:
        return []
    meta = checkpoint.open(folder).meta
    changed = _changed_config(meta, run)
    allowed = any(key.partition(".")[0] == "model" for key in allow_change)
    if changed and not allowed:
        raise RefusedError(
            f"{folder}: was saved by a model with another config.json ({', '.join(changed[:3])}"
            f"{', ...' if len(changed) > 3 else ''}); restore it, {_ANEW}, or train on with the new values, which have "
            f"to leave all shapes as they are: --allow-change model"
        )
    last_checkpoint(run)
    lines = [f"goes on with {', '.join(changed)}"] if changed else _not_compared(meta, run)
    lines += _computed_otherwise(meta, run)
    return [f"resume     {folder}: {line}" for line in lines]


def _computed_otherwise(meta: Mapping[str, Any], run: ResolvedRun) -> list[str]:
    """Return a line where the steps before `meta` were computed by another CPU than the next ones, or otherwise.

    A checkpoint of an earlier version does not say how; the run's configuration does then.
    """
    now = computed_by(run)
    if not now:
        return []
    stored = load_stored(run.out).precision.numerics
    known = now if stored == "auto" else now | {"numerics": stored}
    before = {key: meta.get(key, known[key]) for key in now}
    if before == now:
        return []
    was, becomes = (f"{one['cpu']} in {one['compute']} with {one['numerics']!r}" for one in (before, now))
    return [f"was computed on {was}, and continues on {becomes}; losses are equal up to rounding only"]


def _changed_config(meta: Mapping[str, Any], run: ResolvedRun) -> list[str]:
    """Return "key: old -> new" for what differs between the config.json in `meta` and the run's; none for one model."""
    stored = meta.get("hf_config")
    if not isinstance(stored, dict) or meta.get("model") == model_digest(run.model) or _reads_as(stored, run):
        return []
    keys = dict.fromkeys([*stored, *run.hf_config])
    values = ((key, stored.get(key, "unset"), run.hf_config.get(key, "unset")) for key in keys)
    return [f"{key}: {old!r} -> {new!r}" for key, old, new in values if old != new]


def _reads_as(hf_config: dict[str, Any], run: ResolvedRun) -> bool:
    """Return True where this version reads `hf_config` as the model of `run`."""
    try:
        return families.from_hf(hf_config) == run.base
    except KumiError:  # one that only another version of kumi reads
        return False


def _not_compared(meta: Mapping[str, Any], run: ResolvedRun) -> list[str]:
    """Return a line where `meta` has no digest of the model, or one that another version of kumi made of it."""
    if "model" not in meta:
        rest = " and config.json" if isinstance(meta.get("hf_config"), dict) else ""
        return [f"has no digest of the model, so only names, shapes{rest} were compared; the next one has a digest"]
    if meta["model"] != model_digest(run.model):
        version = meta.get("kumi")
        return [f"kumi {version} described the model otherwise, so only names, shapes and config.json were compared"]
    return []


def restored_state(saved: Checkpoint, store: Store, run: ResolvedRun) -> TrainState:
    """Return the state in `saved`. Raise RefusedError where it was trained on other data than `store` holds."""
    meta, folder = saved.meta, saved.folder
    if meta["data"] != store.content:
        raise RefusedError(
            f"{folder}: was trained on data {meta['data'][:12]}, {store.folder} holds {store.content[:12]}; restore "
            f"the data files, {_ANEW}"
        )
    base = base_of(run)
    if meta.get("base_digest") != base.get("base_digest"):
        raise RefusedError(
            f"{folder}: holds adapters of the model that was in {meta.get('base')}, and {base.get('base')} holds "
            f"another one now; restore it, {_ANEW}"
        )
    scale = LossScale(
        meta["loss_scale"],
        meta["loss_scale_good_steps"],
        skipped=meta.get("skipped_updates", 0),  # which earlier versions did not count
        in_a_row=meta.get("skipped_in_a_row", 0),
    )
    return TrainState(meta["step"], meta["tokens"], scale, saved=meta["step"])
