"""The keys of a run file, each with its type, default and description."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from kumi.config.critic_section import CriticSection
from kumi.config.data_section import DataSection
from kumi.config.eval_section import EvalSection, is_task_metric
from kumi.config.job_sections import (
    BatchSection,
    ClusterSection,
    CommSection,
    LayoutSection,
    LoraSection,
    ModelSection,
    OptimSection,
    PlanSection,
    PrecisionSection,
)
from kumi.config.launch_section import LaunchSection
from kumi.config.objective_section import ObjectiveSection, ReferenceSection
from kumi.config.reward_section import RewardSection
from kumi.config.rollout_section import RolloutSection, check_objective, check_rewards
from kumi.config.run_sections import (
    CheckpointSection,
    ExportSection,
    LogSection,
    RecoverSection,
    SampleSection,
    TrainSection,
)
from kumi.config.section import Section, Text
from kumi.config.usual_rate import with_usual_rate
from kumi.remote.addresses import is_url, refuse_url


class PlanConfig(Section):
    """A run file for planning: data and steps are optional."""

    name: Text = Field("plan", description="Name of the run.")
    model: ModelSection
    cluster: ClusterSection = ClusterSection()
    batch: BatchSection
    objective: ObjectiveSection = ObjectiveSection()
    reference: ReferenceSection = ReferenceSection()
    rewards: tuple[RewardSection, ...] = Field(
        (), description="Rewards of replies, each a table [[rewards]], for reinforcement learning."
    )
    lora: LoraSection | None = Field(None, description="Train adapters; without this section, all parameters.")
    rollout: RolloutSection | None = Field(
        None, description="Train on the model's own replies to prompts; objectives of reinforcement learning need it."
    )
    data: DataSection | None = None
    optim: OptimSection = OptimSection()
    critic: CriticSection = CriticSection()
    precision: PrecisionSection = PrecisionSection()
    layout: LayoutSection = LayoutSection()
    plan: PlanSection = PlanSection()
    comm: CommSection = CommSection()
    train: TrainSection | None = None
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    export: ExportSection = ExportSection()
    sample: SampleSection = SampleSection()
    recover: RecoverSection = RecoverSection()
    launch: LaunchSection = LaunchSection()

    @property
    def off_adapters_are_reference(self) -> bool:
        """True if the reference of a run with rollouts is the policy with its adapters switched off."""
        if self.reference.kind == "adapters-off":
            return True
        lora = self.lora
        return lora is not None and self.reference.model is None and lora.source is None and not lora.modules_to_save

    @model_validator(mode="before")
    @classmethod
    def _fill_rate(cls, written: Any) -> Any:
        return with_usual_rate(written)

    @model_validator(mode="after")
    def _check_reference(self) -> PlanConfig:
        """Refuse [reference] for an objective that reads none, and adapters-off without adapters to leave out."""
        if not self.reference.is_set:
            return self
        if not self.objective.reads_reference:
            raise ValueError(
                f"reference: objective.kind={self.objective.kind!r} compares with no reference model; remove "
                "[reference], or set objective.kind to 'dpo' or 'kto'"
            )
        if self.reference.kind == "adapters-off":
            if self.lora is None:
                raise ValueError(
                    "reference.kind='adapters-off' needs adapters that can be left out; add [lora], or set "
                    "reference.kind='stored'"
                )
            if self.lora.modules_to_save:
                raise ValueError(
                    f"reference.kind='adapters-off' with lora.modules_to_save={list(self.lora.modules_to_save)}: "
                    "modules that are trained in full cannot be left out; set reference.kind='stored'"
                )
            if self.reference.model is not None:
                raise ValueError(
                    "reference.model names another model, but reference.kind='adapters-off' computes the reference by "
                    "the model itself; remove one of them"
                )
        return self

    @model_validator(mode="after")
    def _check_rollout(self) -> PlanConfig:
        """Refuse rewards, [rollout] and [critic] that do not fit the objective, and keys that do not fit [rollout]."""
        check_rewards(self.rewards, self.objective)
        check_objective(self.rollout, self.objective, bool(self.rewards), self.reference)
        if self.critic.is_set and not self.objective.trains_critic:
            raise ValueError(
                f"critic: objective.kind={self.objective.kind!r} trains no critic; remove [critic], or set "
                f"objective.kind='ppo'"
            )
        if self.rollout is None:
            return self
        if self.rollout.max_new_tokens >= self.batch.seq_len:
            raise ValueError(
                f"rollout.max_new_tokens={self.rollout.max_new_tokens} leaves no room for a prompt in a row of "
                f"batch.seq_len={self.batch.seq_len} tokens; raise batch.seq_len, or lower rollout.max_new_tokens"
            )
        if self.train is not None and self.train.epochs is not None:
            raise ValueError(
                "train.epochs: how many prompts a run with [rollout] draws follows from its replies; give train.steps"
            )
        if self.eval.every and not self.eval.has_tasks:
            raise ValueError(
                f"eval.every={self.eval.every}: a run with [rollout] has no loss on held-out prompts; give eval.tasks, "
                f"or set eval.every=0"
            )
        return self

    @model_validator(mode="after")
    def _check_local(self) -> PlanConfig:
        """Refuse URLs in keys whose files must be on this machine."""
        refuse_url(self.cluster.source, "cluster.source")
        if self.lora is not None:
            refuse_url(self.lora.source, "lora.source")
        if self.train is not None:
            refuse_url(self.train.offload_dir, "train.offload_dir")
        if self.data is not None:
            refuse_url(self.data.cache, "data.cache")
            refuse_url(self.data.exclude_rows, "data.exclude_rows")
            refuse_url(self.data.chat.template, "data.chat.template")
        return self

    @model_validator(mode="after")
    def _check_best(self) -> PlanConfig:
        """Refuse checkpoint.best without the evaluations that it needs, and train.patience without checkpoint.best."""
        if self.checkpoint.best is not None:
            of_task = is_task_metric(self.checkpoint.best.removeprefix("eval/"), self.eval)
            every, key = (self.eval.every, "every") if not of_task else (self.eval.task_interval, "tasks_every")
            if not every:
                raise ValueError(
                    f"checkpoint.best={self.checkpoint.best!r} needs evaluations during training; set eval.{key}"
                )
            if self.data is not None and not self.data.holds_out and not of_task:
                raise ValueError(
                    f"checkpoint.best={self.checkpoint.best!r} needs held-out data; set data.validation above 0"
                )
        elif self.train is not None and self.train.patience:
            raise ValueError(
                f"train.patience={self.train.patience} needs a metric that it waits for; set checkpoint.best, for "
                "example to 'eval/loss'"
            )
        return self

    @model_validator(mode="after")
    def _check_passes(self) -> PlanConfig:
        """Refuse weights of several sources with train.epochs."""
        if self.train is None or self.train.epochs is None or self.data is None or len(self.data.sources) == 1:
            return self
        for source in self.data.sources:
            if source.weight != 1.0:
                raise ValueError(
                    f"train.epochs={self.train.epochs:g} reads every source equally often, so "
                    f"weight={source.weight:g} of source {source.path!r} cannot set its share; give the sources epochs "
                    f"instead of weights, or set train.steps instead of train.epochs"
                )
        return self


class RunConfig(PlanConfig):
    """A kumi run file."""

    name: Text = Field(description="Name of the run.", examples=["my-run"])
    data: DataSection
    train: TrainSection

    @property
    def checkpoints_at_most(self) -> int:
        """The number of checkpoints that the disk has at most: the old ones, the best one, one that is uploaded, and
        the new one until it is complete."""
        best, uploading = self.checkpoint.best is not None, is_url(self.train.out)
        return self.checkpoint.keep + 1 + best + uploading

    @model_validator(mode="after")
    def _check_init(self) -> RunConfig:
        if self.model.config is not None and self.model.init == "pretrained":
            raise ValueError("model: an inline config has no weights; set model.init = 'random', or give model.source")
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> RunConfig:
        if self.lora is not None and self.model.init != "pretrained":
            raise ValueError(
                "lora: adapters need pretrained weights, but model.init='random'; set model.init='pretrained' and "
                "model.source, or remove [lora]"
            )
        return self

    @model_validator(mode="after")
    def _check_push(self) -> RunConfig:
        if self.export.push is not None and not self.export.enabled:
            raise ValueError(
                f"export.push={self.export.push!r} has nothing to push, as export.enabled=false; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> RunConfig:
        if self.eval.every and not self.data.holds_out and not self.eval.has_tasks:
            raise ValueError(
                f"eval.every={self.eval.every} has no documents to evaluate, because data.validation=0; hold out a "
                f"share of the documents with data.validation, or set eval.every=0"
            )
        return self
