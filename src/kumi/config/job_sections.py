"""The sections of a run file from which a plan follows: model, machines, batch, optimizer, precision and layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from kumi.config.section import Decay, Fraction, NotNegative, Number, Positive, Section, Switch, Text, spec_key
from kumi.config.usual_rate import usual_rates
from kumi.spec.comm import COMPRESS, Comm
from kumi.spec.layout import CONTEXT, OFFLOAD, RECOMPUTE
from kumi.spec.lora import ALL_LINEAR, QUANTIZATIONS, Lora
from kumi.spec.lora import INITS as LORA_INITS
from kumi.spec.numerics import kernels_text, parse_kernels, parse_numerics
from kumi.spec.optim import LR_SCHEDULES, Optim
from kumi.spec.optim_states import OPTIM_KINDS
from kumi.spec.precision import PRECISIONS
from kumi.spec.schedules import SCHEDULES

# Default share of a run for the warm-up of the learning rate: see docs/decisions/warmup.md.
WARMUP_RATIO = 0.03

# Types of keys with listed values. The modules that implement the values define the lists.
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
        "can only be planned. 'fp8' computes the matmuls of layers in float8, with the package torchao, a CUDA device "
        "that supports it and `train.compile`.",
    )

    tf32: Switch = Field(
        False,
        description="On a GPU, multiply float32 matrices in TF32: some 5 to 8 times as fast, with 10 bits of mantissa. "
        "It concerns runs in fp32, and the routers and Mamba scans of all runs.",
    )

    numerics: Text = Field(
        "auto",
        description="Implementations of operations on a CPU: 'auto' measures once per machine, and a run keeps its "
        "first choice; 'reference' is the behaviour of versions without this key; or the words that `kumi describe` "
        "prints, without those in parentheses. Losses are equal up to rounding.",
    )

    kernels: Text = Field(
        "auto",
        description="Kernels of a GPU beside PyTorch's operations: 'auto' compares and times them once per machine, "
        "and a run keeps its first choice; 'torch' uses none; or operations with their implementations, such as "
        "'loss:triton,scan:mamba-ssm,attention:fa3'. Losses are equal up to rounding. 'compile:off', 'float8:off' and "
        "'async_tp:off' leave out what `train.compile`, `precision.kind` and `comm.async_tp` ask for, where it does "
        "not pay.",
    )

    @field_validator("kernels")
    @classmethod
    def _check_kernels(cls, text: str) -> str:
        return text if text == "auto" else kernels_text(parse_kernels(text))

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
        # This runs before pydantic tries the two types of the key, whose errors would name types instead of values.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value != "auto" and not (is_number and 0 <= value < 1):
            raise ValueError(f"must be 'auto', or a share of at least 0 and below 1, got {value!r}")
        return value
