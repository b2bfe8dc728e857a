"""Check that a run can compute what it asks of the model during training, beside losses: samples, and tasks."""

from __future__ import annotations

from kumi.config.schema import PlanConfig, RunConfig
from kumi.errors import ConfigError, LayoutError
from kumi.spec.generation_layout import check_generation_layout, gathered_bytes
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.sharding import state_bytes
from kumi.units import format_bytes


def check_generating_run(config: RunConfig, job: Job, layout: Layout) -> None:
    """Raise ConfigError if the model has no log-probs for the tasks of `config`, or none at the temperature of its
    rollouts. Raise LayoutError if texts are generated during training, and `layout` or its memory does not allow it.

    Scores of tasks are computed by the forward pass of training, on every layout.
    """
    tasks = config.eval.tasks
    if tasks and job.model.head != "lm":
        raise ConfigError(
            f"eval.tasks: task {tasks[0].name!r} needs log-probs of tokens, which the reward model that "
            f"objective.kind={config.objective.kind!r} trains does not compute; remove the tasks"
        )
    rollout, softcap = config.rollout, job.model.logit_softcap
    if rollout is not None and rollout.temperature != 1 and softcap is not None:
        raise ConfigError(
            f"rollout.temperature={rollout.temperature:g} is not supported for a model with a softcap on its logits "
            f"({softcap:g}), whose log-probs are trained at temperature 1; set rollout.temperature=1"
        )
    for key, remedy in generating_keys(config):
        check_generation_layout(layout, key)
        if layout.zero:
            _check_memory(job, layout, key, remedy)


def generating_keys(config: PlanConfig) -> list[tuple[str, str]]:
    """Return what generates texts during training, in words for messages, each with a remedy if it does not fit."""
    sample, keys = config.sample, []
    if config.rollout is not None:
        keys.append(("[rollout]", "train with a smaller model or adapters"))
    if sample.prompts and sample.every:
        keys.append((f"sample.every={sample.every}", "set sample.every=0"))
    for task in config.eval.tasks:
        if task.kind in ("exact_match", "reasoning_gym"):
            keys.append((f"task {task.name!r} of eval.tasks, of kind {task.kind!r},", "remove the task"))
    return keys


def _check_memory(job: Job, layout: Layout, key: str, remedy: str) -> None:
    """Raise LayoutError if the gathered weights do not fit a device beside the states, which are the rank's shards of
    parameters, gradients and optimizer states."""
    states = sum(state_bytes(model, layout, 0, job.precision, job.optim).total for model in job.models)
    gathered = gathered_bytes(job.model, layout, job.precision)
    if states + gathered > job.cluster.device.memory:
        raise LayoutError(
            f"{key} gathers all weights on each device, {format_bytes(gathered)} beside states of "
            f"{format_bytes(states)}, but a device has {format_bytes(job.cluster.device.memory)}; {remedy}, or set "
            "layout.tp to a higher degree"
        )
