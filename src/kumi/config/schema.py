"""Every key of a run file, with its default and a sentence on what it does."""

from __future__ import annotations

from dataclasses import MISSING
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kumi.objectives import OBJECTIVES
from kumi.spec.comm import COMPRESS, Comm
from kumi.spec.data_source import FORMATS, Source
from kumi.spec.layout import CONTEXT, OFFLOAD, RECOMPUTE
from kumi.spec.lora import ALL, QUANTIZED, Lora
from kumi.spec.lora import INITS as LORA_INITS
from kumi.spec.numerics import parse
from kumi.spec.optim_states import KINDS
from kumi.spec.precision import PRECISIONS
from kumi.spec.schedules import SCHEDULES

# Share of a run over which the rate climbs where the run file says nothing of it: see docs/decisions/warmup.md.
WARMUP_RATIO = 0.03

# A count beyond this is a slip of the keyboard, and would keep the search for a layout busy for hours.
MOST = 10**12

# TOML has types, so nothing is converted: 4.0, "4" and true are no counts, and inf and nan are no numbers.
Positive = Annotated[int, Field(gt=0, le=MOST, strict=True)]
NotNegative = Annotated[int, Field(ge=0, le=MOST, strict=True)]
Number = Annotated[float, Field(strict=True)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
Switch = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]

# The words that a key may hold, taken from where they are given a meaning.
if TYPE_CHECKING:
    Recompute: TypeAlias = str
    Schedule: TypeAlias = str
    Offload: TypeAlias = str
    Context: TypeAlias = str
    OptimKind: TypeAlias = str
    PrecisionKind: TypeAlias = str
    Compress: TypeAlias = str
    ObjectiveKind: TypeAlias = str
    LoraInit: TypeAlias = str
    Quantize: TypeAlias = str
    SourceFormat: TypeAlias = str
else:
    Recompute, Schedule, Offload = Literal[RECOMPUTE], Literal[tuple(SCHEDULES)], Literal[OFFLOAD]
    Context = Literal[CONTEXT]
    OptimKind, PrecisionKind = Literal[KINDS], Literal["auto", *PRECISIONS]
    Compress = Literal[COMPRESS]
    ObjectiveKind = Literal[tuple(OBJECTIVES)]
    LoraInit, Quantize = Literal[LORA_INITS], Literal["none", *QUANTIZED]
    SourceFormat = Literal[FORMATS]


def key(spec: type[Any], name: str, default: Any = None) -> Any:
    """Return the key of a run file that sets the field `name` of the dataclass `spec`: its text is that field's, and so
    is its default, unless a run file writes it otherwise, as `default`."""
    described = spec.__dataclass_fields__[name]
    if default is None:
        default = ... if described.default is MISSING else described.default
    return Field(default, description=described.metadata["text"])


class Section(BaseModel):
    # Validators are built when first used: a command needs those of a run or of a plan, not of both and each section.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class ModelSection(Section):
    """The model: a Hugging Face folder or hub id, or a config.json written inline."""

    source: Text | None = Field(
        None,
        description="A folder with config.json (and weights), a config.json, or a hub id: org/name, or with a revision "
        "org/name@revision.",
    )
    config: dict[str, Any] | None = Field(None, description="A Hugging Face config.json, inline, instead of `source`.")
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="Start from the weights in `source`, or from random weights drawn with `train.seed`."
    )

    balance: Literal["auto", "aux", "sequence-aux", "loss-free", "none"] = Field(
        "auto",
        description="What keeps routed experts equally busy: a loss over each microbatch or each sequence, or a bias "
        "that moves after every step; 'auto' is what the model's family is trained with.",
    )
    balance_coef: Annotated[Number, Field(ge=0)] | None = Field(
        None,
        description="Weight of that loss, by default what config.json says, or the step of the bias, by default 0.001.",
    )

    @model_validator(mode="after")
    def _one_description(self) -> ModelSection:
        if (self.source is None) == (self.config is None):
            raise ValueError("give either source or config, and only one of them")
        return self


class ClusterSection(Section):
    """The machines."""

    source: str = Field("auto", description="'auto' describes this machine; otherwise a preset's name or a TOML file.")
    nodes: Positive = Field(1, description="How many machines.")
    devices_per_node: Positive | None = Field(
        None, description="Ranks a machine runs; by default its GPUs, or one rank on a machine without any."
    )
    network: Text | None = Field(
        None, description="What joins the machines: a preset's name or a TOML file; by default what `source` says."
    )
    sites: Positive = Field(1, description="How many places the machines are dealt evenly to.")
    site_link: Text | None = Field(None, description="What joins the sites: a preset's name or a TOML file.")
    price_per_hour: Annotated[Number, Field(ge=0)] = Field(0.0, description="What a device costs an hour.")
    watts: Annotated[Number, Field(gt=0)] | None = Field(
        None, description="What a device draws at full load, with its share of the rest; by default its data sheet's."
    )


class BatchSection(Section):
    """How many tokens make a step."""

    seq_len: Positive = Field(description="Tokens in a sequence.")
    tokens_per_step: Positive = Field(description="Tokens in an optimizer step, over all ranks.")


class ObjectiveSection(Section):
    """What is learned."""

    kind: ObjectiveKind = Field("lm", description="'lm' predicts every next token.")


class LoraSection(Section):
    """Adapters: with this section, small matrices beside those of a model's layers are trained, and nothing else."""

    r: Positive = key(Lora, "r")
    alpha: Annotated[Number, Field(gt=0)] = key(Lora, "alpha")
    target_modules: tuple[Text, ...] | Text = key(Lora, "targets", default=ALL)
    dropout: Annotated[Number, Field(ge=0, lt=1)] = key(Lora, "dropout")
    use_rslora: Switch = key(Lora, "use_rslora")
    use_dora: Switch = key(Lora, "use_dora")
    init: LoraInit = key(Lora, "init")
    quantize: Quantize = key(Lora, "quantize", default="none")
    source: Text | None = Field(None, description="A folder of adapters, as PEFT writes them, to go on from.")
    merge: Switch = Field(
        False, description="Write the model with the adapters in it to `hf` at the end, besides the folder `adapter`."
    )


class SourceSection(Section):
    """One source of documents."""

    path: Text = key(Source, "path")
    weight: Annotated[Number, Field(gt=0)] = key(Source, "weight")
    text_key: str = key(Source, "text_key")
    format: SourceFormat = key(Source, "format")
    exclude: tuple[str, ...] = key(Source, "exclude")


class TrainedTokenizer(Section):
    """A byte-level BPE tokenizer to train on the sources."""

    vocab_size: Annotated[Positive, Field(ge=260)] = Field(
        description="Entries of the vocabulary, special tokens included."
    )


class DataSection(Section):
    """Where the tokens come from."""

    sources: tuple[SourceSection, ...] = Field(min_length=1, description="The sources, mixed by weight.")
    tokenizer: Text | TrainedTokenizer = Field(
        description="A Hugging Face tokenizer folder or hub id, or { vocab_size = N } to train one on the sources."
    )
    validation: Annotated[Number, Field(ge=0, le=0.5)] = Field(
        0.01, description="Share of the documents held out, by a hash of their text, so that no copy is trained on."
    )
    on_error: Literal["skip", "fail"] = Field(
        "skip", description="What to do with a record that cannot be read: skip and report it, or stop."
    )
    add_bos: Switch = Field(False, description="Begin every document with the tokenizer's bos token.")
    cross_document: Switch = Field(
        False, description="Let attention and prediction cross from a document into the next one in its window."
    )
    workers: NotNegative = Field(0, description="Processes that tokenise; 0 means one a core.")
    cache: Text | None = Field(None, description="Folder of tokenised data; by default `data` inside `train.out`.")


class OptimSection(Section):
    """The optimizer and its learning rate."""

    kind: OptimKind = Field(
        "adamw", description="The optimizer; 'muon' updates tables, norms and biases as 'adamw' does."
    )
    lr: Number = Field(3e-4, gt=0, description="Peak learning rate.")
    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.95), description="Decay of the first and second moments; the first is the momentum of muon and sgd."
    )
    eps: Number = Field(1e-8, gt=0, description="Added to the denominator of the update in 'adamw' and 'adamw-8bit'.")
    weight_decay: Number = Field(
        0.1, ge=0, description="Weight decay, decoupled except in 'sgd'; norms and biases are not decayed."
    )
    grad_clip: Number = Field(1.0, ge=0, description="Largest global gradient norm; 0 does not clip.")
    schedule: Literal["constant", "cosine", "linear", "wsd"] = Field(
        "cosine", description="How the rate falls after the warm-up; 'wsd' stays, then falls over `decay_steps`."
    )
    warmup_steps: NotNegative | None = Field(
        None, description="Steps over which the rate climbs from 0; where left out, `warmup_ratio` of the run."
    )
    warmup_ratio: Decay | None = Field(
        default_factory=lambda section: WARMUP_RATIO if section.get("warmup_steps") is None else None,
        description=f"Share of the run's steps over which the rate climbs from 0, rounded up to steps; "
        f"{WARMUP_RATIO} where `warmup_steps` is left out, too.",
    )
    decay_steps: NotNegative = Field(0, description="Last steps over which 'wsd' falls; 0 means a tenth of the run.")
    min_lr_ratio: Fraction = Field(0.1, description="The rate at the last step, relative to `lr`.")

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimSection:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio} both say how long the rate "
                f"climbs; give one of them"
            )
        return self


class PrecisionSection(Section):
    """In which number formats to compute."""

    kind: PrecisionKind = Field(
        "auto",
        description="'auto' is bf16 where the device computes it fast (a CPU: where `numerics` says so), else fp16 "
        "where it does that, else fp32. Master weights are float32, but in 'bf16-pure', which has none and can only be "
        "planned; 'fp8' multiplies layers' matrices in float8, which needs the package torchao and a CUDA device that "
        "has it.",
    )

    numerics: Text = Field(
        "auto",
        description="How a CPU computes what it can compute in several ways: 'auto' measures once on each machine, and "
        "keeps what a run began with; 'reference' is what versions without this key did; or the words that "
        "`kumi describe` prints, without those in brackets. Losses are equal up to rounding.",
    )

    @field_validator("numerics")
    @classmethod
    def _known(cls, text: str) -> str:
        return text if text == "auto" else str(parse(text))


class LayoutSection(Section):
    """What you pin of the parallel layout; the rest is chosen for you."""

    pp: Positive | None = Field(None, description="Pipeline-parallel degree.")
    dp_replicate: Positive | None = Field(None, description="Data-parallel groups that hold copies of the states.")
    dp_shard: Positive | None = Field(None, description="Data-parallel ranks that divide the states among them.")
    cp: Positive | None = Field(None, description="Context-parallel degree.")
    tp: Positive | None = Field(None, description="Tensor-parallel degree.")
    ep: Positive | None = Field(None, description="Expert-parallel degree.")
    zero: Annotated[NotNegative, Field(le=3)] | None = Field(
        None, description="What dp_shard divides: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too."
    )
    microbatch: Positive | None = Field(None, description="Sequences in a forward-backward pass of one rank.")
    recompute: Recompute | None = Field(
        None, description="What the backward pass computes again instead of keeping it from the forward pass."
    )
    recompute_layers: NotNegative | None = Field(
        None, description="In how many layers of each rank it does so; by default in all."
    )
    sequence_parallel: Switch | None = Field(
        None,
        description="Divide over `tp` what lies between the tensor-parallel regions, too; the trainer does by default.",
    )
    expert_tp: Positive | None = Field(None, description="Tensor-parallel degree inside every expert.")
    schedule: Schedule | None = Field(None, description="In which order the pipeline works through the microbatches.")
    stages: Positive | None = Field(None, description="Pipeline stages that every pipeline rank holds.")
    stage_layers: Annotated[tuple[NotNegative, ...], Field(min_length=1)] | None = Field(
        None,
        description="Layers of every stage, in model order; by default as even as can be. With it nothing is searched: "
        "what is not pinned is at its default.",
    )
    offload: Offload | None = Field(
        None,
        description="What is kept on the host, or on its NVMe drives; by default "
        "what makes the fastest layout fit, drives never.",
    )
    context: Context | None = Field(
        None,
        description="How attention looks beyond a `cp` rank's part of the sequence: keys and values go round all "
        "ranks ('ring', the default), or every rank gets whole sequences of some heads ('ulysses').",
    )
    tiles: Positive | None = Field(
        None, description="Dense feed-forward layers are computed in so many tiles of columns, one after the other."
    )


class CommSection(Section):
    """How gradients and parameters travel between data-parallel ranks, and tokens between tensor-parallel ones."""

    compress: Compress = key(Comm, "compress")
    powersgd_rank: Positive = key(Comm, "powersgd_rank")
    powersgd_start: Annotated[Positive, Field(ge=2)] = key(Comm, "powersgd_start")
    bucket_mb: Annotated[Number, Field(gt=0)] | None = key(Comm, "bucket_mb")
    prefetch: Positive | None = key(Comm, "prefetch")
    async_tp: Switch = key(Comm, "async_tp")


class TrainSection(Section):
    """The run."""

    steps: Positive = Field(description="Optimizer steps.")
    out: Text = Field(description="Folder of the run; the same command again resumes from it.")
    seed: NotNegative = Field(0, description="Seed of the initial weights and of the order of the data.")
    compile: Switch = Field(False, description="Compile every layer with torch.compile.")
    offload_dir: Text | None = Field(
        None,
        description="Folder on the drives that `layout.offload` moves optimizer states to; by default `offload` inside "
        "`out`. What lies there has no name and is gone when the run ends.",
    )
    trace_step: NotNegative = Field(
        0,
        description="Step of which is recorded what every pipeline rank did when, beside what was planned: a trace and "
        "a picture, `pipeline-step-N.json` and `.svg` inside `out`; 0 records none.",
    )
    timeout_s: Annotated[Number, Field(gt=0, le=7 * 86400)] = Field(
        600.0,
        description="Seconds that ranks wait for one another in a communication, and for their parts of a checkpoint; "
        "then the run ends with exit code 7 and names the ranks that did not come.",
    )


class EvalSection(Section):
    """Evaluation on the held-out documents."""

    every: NotNegative = Field(0, description="Steps between evaluations; 0 evaluates at the end only.")
    sequences: NotNegative = Field(0, description="Held-out sequences to use, spread over all; 0 means all.")


class CheckpointSection(Section):
    """What is saved, so that a run survives."""

    every: NotNegative = Field(0, description="Steps between checkpoints; 0 saves at the end only.")
    keep: Positive = Field(2, description="How many checkpoints to keep; older ones are removed.")
    asynchronous: Switch = Field(True, description="Write in the background while training goes on.")


class LogSection(Section):
    """What is reported."""

    every: Positive = Field(10, description="Steps between lines in the terminal.")
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = Field(
        (), description="Where metrics go besides the terminal and metrics.jsonl."
    )


class ExportSection(Section):
    """The Hugging Face folder written at the end, to `hf` inside `train.out`."""

    enabled: Switch = Field(True, description="Whether to write it.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Dtype of the weights; 'auto' is that of `model.source`, float32 for a new model."
    )
    push: Annotated[Text, Field(pattern=r"^[\w-][\w.-]*/[\w-][\w.-]*$")] | None = Field(
        None, description="Repository on the hub, org/name, that gets the folder once it is verified."
    )
    public: Switch = Field(False, description="Whether a repository that `push` makes can be read by everyone.")
    datasets: tuple[Annotated[Text, Field(pattern=r"^[\w-][\w.-]*(/[\w-][\w.-]*)?$")], ...] = Field(
        (), description="Ids on the hub of the datasets trained on, for the model card."
    )
    license: Text | None = Field(
        None,
        description="Licence of the model, for its card, such as apache-2.0; by default what `model.source`'s says.",
    )


class SampleSection(Section):
    """Text written by the model at the end, for a first look."""

    prompts: tuple[str, ...] = Field((), description="Beginnings to continue.")
    max_new_tokens: Positive = Field(48, description="Tokens to add to each.")
    temperature: Number = Field(0.0, ge=0, description="0 takes the likeliest token every time.")


class PlanConfig(Section):
    """What decides an estimate, and whatever else a run file says: a plan needs no data and no steps."""

    name: Text = Field("plan", description="Name of the run.")
    model: ModelSection
    cluster: ClusterSection = ClusterSection()
    batch: BatchSection
    objective: ObjectiveSection = ObjectiveSection()
    lora: LoraSection | None = Field(None, description="Train adapters only; without this section, everything.")
    data: DataSection | None = None
    optim: OptimSection = OptimSection()
    precision: PrecisionSection = PrecisionSection()
    layout: LayoutSection = LayoutSection()
    comm: CommSection = CommSection()
    train: TrainSection | None = None
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    export: ExportSection = ExportSection()
    sample: SampleSection = SampleSection()


class RunConfig(PlanConfig):
    """A kumi run file."""

    name: Text = Field(description="Name of the run.")
    data: DataSection
    train: TrainSection

    @model_validator(mode="after")
    def _weights_to_start_from(self) -> RunConfig:
        if self.model.config is not None and self.model.init == "pretrained":
            raise ValueError("model: an inline config has no weights; set model.init = 'random', or give model.source")
        return self

    @model_validator(mode="after")
    def _something_to_adapt(self) -> RunConfig:
        if self.lora is not None and self.model.init != "pretrained":
            raise ValueError(
                "lora: adapters are trained beside given weights, and model.init='random' has none; give model.source, "
                "or leave [lora] out"
            )
        return self

    @model_validator(mode="after")
    def _something_to_push(self) -> RunConfig:
        if self.export.push is not None and not self.export.enabled:
            raise ValueError(
                f"export.push={self.export.push!r} and export.enabled=false leave nothing to send; take one of them out"
            )
        return self

    @model_validator(mode="after")
    def _something_to_evaluate(self) -> RunConfig:
        if self.eval.every and not self.data.validation:
            raise ValueError(
                f"eval.every={self.eval.every} and data.validation=0 leave nothing to evaluate on; hold out a share of "
                f"the documents with data.validation, or set eval.every=0"
            )
        return self
