"""The keys of a run file, each with its type, default and description."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from kumi.config.data_section import DataSection
from kumi.config.eval_section import EvalSection, is_task_metric
from kumi.config.launch_section import LaunchSection
from kumi.config.objective_section import ObjectiveSection, ReferenceSection
from kumi.config.reward_section import RewardSection
from kumi.config.rollout_section import RolloutSection, check_objective, check_rewards
from kumi.config.section import (
    Decay,
    Fraction,
    NotNegative,
    Number,
    Positive,
    Section,
    Switch,
    Text,
    duration,
    spec_key,
)
from kumi.config.usual_rate import usual_rates, with_usual_rate
from kumi.remote.addresses import is_url, refuse_url
from kumi.spec.comm import COMPRESS, Comm
from kumi.spec.layout import CONTEXT, OFFLOAD, RECOMPUTE
from kumi.spec.lora import ALL_LINEAR, QUANTIZATIONS, Lora
from kumi.spec.lora import INITS as LORA_INITS
from kumi.spec.numerics import parse_numerics
from kumi.spec.optim import LR_SCHEDULES, Optim
from kumi.spec.optim_states import OPTIM_KINDS
from kumi.spec.precision import PRECISIONS
from kumi.spec.schedules import SCHEDULES

# Default share of a run for the warm-up of the learning rate: see docs/decisions/warmup.md.
WARMUP_RATIO = 0.03

# Patterns of ids on the hub.
MODEL_ID = r"^[\w-][\w.-]*/[\w-][\w.-]*$"
DATASET_ID = r"^[\w-][\w.-]*(/[\w-][\w.-]*)?$"

# Keys with listed values, which the modules that implement them define.
if TYPE_CHECKING:
    Recompute: TypeAlias = str
    Schedule: TypeAlias = str
    Offload: TypeAlias = str
    Context: TypeAlias = str
    OptimKind: TypeAlias = str
    LrSchedule: TypeAlias = str
    PrecisionKind: TypeAlias = str
    Compress: TypeAlias = str
    LoraInit: TypeAlias = str
    Quantize: TypeAlias = str
else:
    Recompute, Schedule, Offload = Literal[RECOMPUTE], Literal[tuple(SCHEDULES)], Literal[OFFLOAD]
    Context = Literal[CONTEXT]
    OptimKind, LrSchedule, PrecisionKind = Literal[OPTIM_KINDS], Literal[LR_SCHEDULES], Literal["auto", *PRECISIONS]
    Compress = Literal[COMPRESS]
    LoraInit, Quantize = Literal[LORA_INITS], Literal["none", *QUANTIZATIONS]


class ModelSection(Section):
    """The model: a Hugging Face folder or hub id, or an inline config.json."""

    source: Text | None = Field(
        None,
        description="A folder with config.json (and weights), a config.json, or a hub id: org/name or "
        "org/name@revision.",
        examples=["Qwen/Qwen3-0.6B"],
    )
    config: dict[str, Any] | None = Field(None, description="A Hugging Face config.json, inline, instead of `source`.")
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="Initial weights: those in `source`, or random ones from `train.seed`."
    )

    balance: Literal["auto", "aux", "sequence-aux", "loss-free", "none"] = Field(
        "auto",
        description="Load balancing of routed experts: an auxiliary loss over each microbatch or each sequence, or a "
        "bias of the router that is adjusted after every step; 'auto' is the method that the model's family was "
        "trained with.",
    )
    balance_coef: Annotated[Number, Field(ge=0)] | None = Field(
        None,
        description="Weight of the auxiliary loss, by default that of config.json; or step of the bias, by default "
        "0.001.",
    )

    @model_validator(mode="after")
    def _check_one_source(self) -> ModelSection:
        if (self.source is None) == (self.config is None):
            given = "both are set" if self.source is not None else "neither is set"
            raise ValueError(f"give either source or config, not both; {given}")
        return self


class ClusterSection(Section):
    """The machines."""

    source: str = Field("auto", description="'auto' for this machine, a preset's name, or a TOML file.")
    nodes: Positive = Field(1, description="Number of machines.")
    devices_per_node: Positive | None = Field(
        None, description="Ranks per machine; by default one per GPU, or one on a machine without GPUs."
    )
    network: Text | None = Field(
        None, description="Network between the machines: a preset's name or a TOML file; by default that of `source`."
    )
    sites: Positive = Field(1, description="Number of sites, over which the machines are distributed evenly.")
    site_link: Text | None = Field(None, description="Network between the sites: a preset's name or a TOML file.")
    price_per_hour: Annotated[Number, Field(ge=0)] = Field(0.0, description="Price of a device per hour.")
    watts: Annotated[Number, Field(gt=0)] | None = Field(
        None, description="Power of a device at full load, with its share of the machine; by default the data sheet's."
    )


class BatchSection(Section):
    """The size of a step."""

    seq_len: Positive = Field(description="Tokens per sequence.", examples=[4096])
    tokens_per_step: Positive = Field(description="Tokens per optimizer step, over all ranks.", examples=[65_536])
    mean_document_tokens: Annotated[Number, Field(gt=0)] | None = Field(
        None,
        description="Mean tokens of a document, from which the cost of attention is estimated while the data is not "
        "prepared; by default every row counts as one document.",
    )


class LoraSection(Section):
    """LoRA adapters: with this section, only adapters on matrices and the modules of `modules_to_save` are trained."""

    r: Positive = spec_key(Lora, "r")
    alpha: Annotated[Number, Field(gt=0)] = spec_key(Lora, "alpha")
    target_modules: tuple[Text, ...] | Text = spec_key(Lora, "targets", default=ALL_LINEAR)
    modules_to_save: tuple[Text, ...] = spec_key(Lora, "modules")
    dropout: Annotated[Number, Field(ge=0, lt=1)] = spec_key(Lora, "dropout")
    use_rslora: Switch = spec_key(Lora, "use_rslora")
    use_dora: Switch = spec_key(Lora, "use_dora")
    init: LoraInit = spec_key(Lora, "init")
    quantize: Quantize = spec_key(Lora, "quantize", default="none")
    source: Text | None = Field(None, description="A PEFT folder with the initial adapters.")
    merge: Switch = Field(
        False, description="At the end, also write the model with merged adapters to `hf`; `adapter` is always written."
    )


class OptimSection(Section):
    """The optimizer and its learning rate."""

    kind: OptimKind = spec_key(Optim, "kind")
    lr: Annotated[Number, Field(gt=0)] = Field(
        Optim().lr,
        description=f"Peak learning rate. Where pretrained weights are trained, by default that of `objective.kind`: "
        f"{usual_rates()}; ten times as much with [lora].",
    )
    betas: tuple[Decay, Decay] = spec_key(Optim, "betas")
    eps: Annotated[Number, Field(gt=0)] = spec_key(Optim, "eps")
    weight_decay: Annotated[Number, Field(ge=0)] = spec_key(Optim, "weight_decay")
    grad_clip: Annotated[Number, Field(ge=0)] = spec_key(Optim, "grad_clip")
    schedule: LrSchedule = spec_key(Optim, "schedule")
    warmup_steps: NotNegative | None = spec_key(Optim, "warmup_steps", default=None)
    warmup_ratio: Decay | None = Field(
        default_factory=lambda section: WARMUP_RATIO if section.get("warmup_steps") is None else None,
        description=f"Share of the run's steps over which the learning rate rises from 0, rounded up to steps; "
        f"{WARMUP_RATIO} if `warmup_steps` is unset, too.",
    )
    decay_steps: NotNegative = spec_key(Optim, "decay_steps")
    min_lr_ratio: Fraction = spec_key(Optim, "min_lr_ratio")

    @model_validator(mode="after")
    def _check_one_warmup(self) -> OptimSection:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio} both set the length of the "
                f"warm-up; give only one of them"
            )
        return self


class PrecisionSection(Section):
    """Dtypes and numerics."""

    kind: PrecisionKind = Field(
        "auto",
        description="'auto' is bf16 if the device computes it fast (on a CPU: if `numerics` says so), else fp16 if "
        "the device computes that fast, else fp32. Master weights are float32; 'bf16-pure' has no master weights and "
        "can only be planned. 'fp8' computes the matmuls of layers in float8, with the package torchao and a CUDA "
        "device that supports it.",
    )

    numerics: Text = Field(
        "auto",
        description="Implementations of operations on a CPU: 'auto' measures once per machine, and a run keeps its "
        "first choice; 'reference' is the behaviour of versions without this key; or the words that `kumi describe` "
        "prints, without those in parentheses. Losses are equal up to rounding.",
    )

    @field_validator("numerics")
    @classmethod
    def _check_numerics(cls, text: str) -> str:
        return text if text == "auto" else str(parse_numerics(text))


class LayoutSection(Section):
    """Pinned fields of the parallel layout; the planner chooses the others."""

    pp: Positive | None = Field(None, description="Pipeline-parallel degree.")
    dp_replicate: Positive | None = Field(None, description="Data-parallel replicas of the states (DDP, HSDP).")
    dp_shard: Positive | None = Field(
        None, description="Data-parallel ranks over which the states are sharded (ZeRO, FSDP)."
    )
    cp: Positive | None = Field(None, description="Context-parallel degree.")
    tp: Positive | None = Field(None, description="Tensor-parallel degree.")
    ep: Positive | None = Field(None, description="Expert-parallel degree.")
    zero: Annotated[NotNegative, Field(le=3)] | None = Field(
        None,
        description="ZeRO stage: states that dp_shard shards; 0 none, 1 optimizer states, 2 also gradients, 3 also "
        "parameters.",
    )
    microbatch: Positive | None = Field(None, description="Sequences in one forward-backward pass of a rank.")
    recompute: Recompute | None = Field(
        None, description="Activations that the backward pass recomputes instead of storing them."
    )
    recompute_layers: NotNegative | None = Field(
        None, description="Layers per rank with recomputation; by default all."
    )
    sequence_parallel: Switch | None = Field(
        None,
        description="Also shard the sequence over `tp` between tensor-parallel blocks; kumi's trainer does by default.",
    )
    expert_tp: Positive | None = Field(None, description="Tensor-parallel degree inside each expert.")
    schedule: Schedule | None = Field(None, description="Pipeline schedule.")
    stages: Positive | None = Field(None, description="Pipeline stages per pipeline rank.")
    stage_layers: Annotated[tuple[NotNegative, ...], Field(min_length=1)] | None = Field(
        None,
        description="Layers of each stage, in model order; by default balanced. With this key there is no search: "
        "fields that are not pinned have their defaults.",
    )
    offload: Offload | None = Field(
        None,
        description="States or activations that are offloaded to host memory or NVMe drives; by default whatever makes "
        "the fastest layout fit, but never drives.",
    )
    context: Context | None = Field(
        None,
        description="Context-parallel attention: keys and values circulate among the ranks ('ring', the default), or "
        "an all-to-all gives each rank all tokens of some heads ('ulysses').",
    )
    tiles: Positive | None = Field(
        None, description="Number of tiles in which dense feed-forward layers are computed, one after another."
    )


class CommSection(Section):
    """Communication of gradients, parameters and tokens."""

    compress: Compress = spec_key(Comm, "compress")
    powersgd_rank: Positive = spec_key(Comm, "powersgd_rank")
    powersgd_start: Annotated[Positive, Field(ge=2)] = spec_key(Comm, "powersgd_start")
    bucket_mb: Annotated[Number, Field(gt=0)] | None = spec_key(Comm, "bucket_mb")
    prefetch: Positive | None = spec_key(Comm, "prefetch")
    async_tp: Switch = spec_key(Comm, "async_tp")


class TrainSection(Section):
    """The training run."""

    steps: Positive | None = Field(
        None, description="Optimizer steps. Give either `steps` or `epochs`.", examples=[1000]
    )
    epochs: Annotated[Number, Field(gt=0, le=10**6)] | None = Field(
        None,
        description="Passes over the data, instead of `steps`: an epoch reads each source once, or "
        "`data.sources[].epochs` times. The number of steps follows from the prepared data.",
    )
    out: Text = Field(
        description="Folder of the run, or a URL such as s3://bucket/runs/my-run; the same command resumes from it.",
        examples=["runs/my-run"],
    )
    seed: NotNegative = Field(0, description="Seed of the initial weights and of the data order.")
    compile: Switch = Field(False, description="Compile each layer with torch.compile.")
    neftune_alpha: Annotated[Number, Field(ge=0, le=1e6)] = Field(
        0.0,
        description="NEFTune: in training, add uniform noise of at most `neftune_alpha` / sqrt(length of the document "
        "x hidden size) to the token embeddings; 0 adds none. `neftune_noise_alpha` in Hugging Face's trainers.",
    )
    offload_dir: Text | None = Field(
        None,
        description="Folder on the NVMe drives for offloaded optimizer states (`layout.offload`); by default `offload` "
        "inside `out`. Its files are unlinked and disappear when the run ends.",
    )
    patience: NotNegative = Field(
        0,
        description="End the run after this many evaluations in a row without a new best of `checkpoint.best`; 0 "
        "trains all steps.",
    )
    trace_step: NotNegative = Field(
        0,
        description="Step whose pipeline timeline is recorded and compared with the plan, as a trace and a picture: "
        "`pipeline-step-N.json` and `.svg` inside `out`; 0 records no step.",
    )
    timeout_s: Annotated[Number, Field(gt=0, le=7 * 86400)] = Field(
        600.0,
        description="Seconds that ranks wait for each other in a collective, and for their shards of a checkpoint; "
        "then the run ends with exit code 7 and names the missing ranks.",
    )
    doctor: Switch = Field(
        True,
        description="Check the nodes before a run on several of them, as `kumi doctor --nodes` does, and a few limits "
        "of a single machine; end with exit code 2 if a check fails.",
    )

    @model_validator(mode="after")
    def _check_one_length(self) -> TrainSection:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps={self.steps} and epochs={self.epochs:g} both set the length of the run; give only one of them"
            )
        if self.steps is None and self.epochs is None:
            raise ValueError("the run has no length; give either steps or epochs")
        return self


class CheckpointSection(Section):
    """Checkpoints."""

    every: NotNegative = Field(0, description="Steps between checkpoints; 0 saves at the end only.")
    keep: Positive = Field(2, description="Number of checkpoints to keep; older ones are deleted.")
    best: Text | None = Field(
        None,
        description="A metric of evaluations, such as 'eval/loss', 'eval/rewards/accuracies' or 'eval/<task>/acc': a "
        "new best is saved and kept beside the newest checkpoints; `checkpoints/best.json` names it.",
    )
    asynchronous: Switch = Field(True, description="Write in the background during training.")
    upload_timeout_s: Annotated[Number, Field(gt=0, le=7 * 86400)] = Field(
        600.0,
        description="At the end of a run whose `train.out` is a URL: seconds without progress after which its uploads "
        "are given up with exit code 8.",
    )


class LogSection(Section):
    """Logging."""

    every: Positive = Field(10, description="Steps between lines in the terminal.")
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = Field(
        (), description="Additional destinations of metrics; the terminal and metrics.jsonl always get them."
    )


class ExportSection(Section):
    """Export of a Hugging Face folder at the end, to `hf` inside `train.out`."""

    enabled: Switch = Field(True, description="Write the folder.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Dtype of the weights; 'auto' is the dtype of `model.source`, or float32 for a new model."
    )
    push: Annotated[Text, Field(pattern=MODEL_ID)] | None = Field(
        None, description="Hub repository, org/name, to which the folder is pushed after it is verified."
    )
    public: Switch = Field(False, description="Make a repository that `push` creates public.")
    datasets: tuple[Annotated[Text, Field(pattern=DATASET_ID)], ...] = Field(
        (), description="Hub ids of the training datasets, for the model card."
    )
    license: Text | None = Field(
        None,
        description="Licence of the model for the model card, such as apache-2.0; by default that of `model.source`.",
    )


class SampleSection(Section):
    """Sample texts from the model, during training and at the end."""

    prompts: Text | tuple[str, ...] = Field(
        (),
        description="Texts to continue, or a file of prompts: one on each line (.txt), or rows with prompt (.jsonl), a "
        "text or the messages of a conversation.",
    )
    every: NotNegative = Field(
        0,
        description="Steps between samples during training, each a page `samples/step-N.md` inside `train.out`; 0 "
        "samples at the end only. Needs a layout with pp = 1 and cp = 1.",
    )
    max_new_tokens: Positive = Field(48, description="Tokens to generate for each.")
    temperature: Number = Field(0.0, ge=0, description="Sampling temperature; 0 always takes the most likely token.")

    @field_validator("prompts", mode="before")
    @classmethod
    def _check_prompts(cls, value: Any) -> Any:
        # Before the two types are tried, whose errors would name types instead of values.
        is_list = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        if not is_list and not (isinstance(value, str) and value):
            raise ValueError(f"must be a list of texts, or the name of a file, got {value!r}")
        return value


class RecoverSection(Section):
    """What a run on several nodes does about nodes that fail."""

    lost: Annotated[Text, duration("1s", "1h")] = Field(
        "15s", description="A node that says nothing for this long, such as '15s', is lost: the run ends on all nodes."
    )


class PlanSection(Section):
    """How the layout is chosen."""

    margin: Literal["auto"] | Annotated[Number, Field(ge=0, lt=1)] = Field(
        "auto",
        description="Share of device memory that the chosen layout leaves free. auto: as much as estimates of memory "
        "may be too low, so that 9 of 10 plans fit.",
    )

    @field_validator("margin", mode="before")
    @classmethod
    def _check_margin(cls, value: Any) -> Any:
        # Before the two types are tried, whose errors would name types instead of values.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value != "auto" and not (is_number and 0 <= value < 1):
            raise ValueError(f"must be 'auto', or a share of at least 0 and below 1, got {value!r}")
        return value


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
        """True if the policy of a run with rollouts computes its reference's log-probs when its adapters are off."""
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
        if not self.reference.given:
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
        check_rewards(self.rewards, self.objective)
        check_objective(self.rollout, self.objective, bool(self.rewards), self.reference)
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
