"""The sections of a run file that only a run needs: its steps, checkpoints, logs, export and samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kumi.config.section import NotNegative, Number, Positive, Section, Switch, Text, duration

# Patterns of ids on the hub.
MODEL_ID = r"^[\w-][\w.-]*/[\w-][\w.-]*$"
DATASET_ID = r"^[\w-][\w.-]*(/[\w-][\w.-]*)?$"


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
    max_new_tokens: Positive = Field(48, description="The most tokens of a sample.")
    temperature: Number = Field(0.0, ge=0, description="Sampling temperature; 0 always takes the most likely token.")

    @field_validator("prompts", mode="before")
    @classmethod
    def _check_prompts(cls, value: Any) -> Any:
        # This runs before pydantic tries the two types of the key, whose errors would name types instead of values.
        is_list = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        if not is_list and not (isinstance(value, str) and value):
            raise ValueError(f"must be a list of texts, or the name of a file, got {value!r}")
        return value


class RecoverSection(Section):
    """What a run on several nodes does about nodes that fail."""

    lost: Annotated[Text, duration("1s", "1h")] = Field(
        "15s", description="A node that says nothing for this long, such as '15s', is lost: the run ends on all nodes."
    )
