"""From what a run file says to what will run: specs, with the layout chosen and everything derived."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kumi.config.cluster import cluster_spec
from kumi.config.schema import ModelSection, OptimSection, RunConfig
from kumi.errors import ConfigError, ModelError
from kumi.plan.choose import choose_layout
from kumi.plan.types import MemoryEstimate
from kumi.spec import families
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec, Device
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS, Precision


@dataclass(frozen=True)
class Run:
    """All that the trainer reads. A pure function of the run file and the machines, so that every rank agrees.

    `hf_config` is the model's config.json as given; `source` the folder it came from, None for an inline config.
    """

    config: RunConfig
    model: ModelSpec
    hf_config: dict[str, Any]
    source: Path | None
    cluster: ClusterSpec
    batch: BatchSpec
    precision: Precision
    optim: Optim
    layout: Layout
    memory: MemoryEstimate

    @property
    def out(self) -> Path:
        return Path(os.path.expanduser(self.config.train.out))


def resolve(config: RunConfig) -> Run:
    """What `config` will run. Raises ConfigError, ModelError, LayoutError or FitError, each with its reason."""
    source = None if config.model.source is None else model_folder(config.model.source, "model.source")
    hf_config = read_hf_config(config.model, source)
    model = families.from_hf(hf_config)
    cluster = cluster_spec(config.cluster)
    batch = BatchSpec(config.batch.seq_len, config.batch.tokens_per_step)
    precision = choose_precision(config.precision.kind, cluster.device)
    optim = choose_optim(config.optim, config.train.steps)
    pinned = config.layout.model_dump(exclude_none=True)
    layout, memory = choose_layout(model, cluster, batch, precision, optim, pinned)
    return Run(config, model, hf_config, source, cluster, batch, precision, optim, layout, memory)


def model_folder(source: str, key: str) -> Path:
    """The local folder of a model or tokenizer: `source`, the value of `key`, itself, or the hub's copy of it."""
    folder = Path(os.path.expanduser(source))
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        wanted = "config.json" if key == "model.source" else "tokenizer.json"
        raise ConfigError(f"{key}: {source!r} is no folder and no hub id; name a folder that holds {wanted}")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"])
        )
    except Exception as error:  # the hub client raises many kinds, all of which mean the same here
        raise ConfigError(f"{key}: {source!r} is no folder, and the hub did not give it: {error}") from None


def read_hf_config(section: ModelSection, source: Path | None) -> dict[str, Any]:
    """The config.json of the model, inline or from its folder."""
    if source is None:
        return dict(section.config or {})
    file = source / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model.source: {source} has no config.json; name a Hugging Face model folder") from None
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}); name a Hugging Face model folder") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file}: holds a {type(found).__name__}, not an object")
    return found


def choose_precision(kind: str, device: Device) -> Precision:
    """The precision named `kind`; "auto" is bf16 where `device` computes it fast, else fp32."""
    if kind == "auto":
        kind = "bf16" if "bfloat16" in device.dtypes else "fp32"
    return PRECISIONS[kind]


def choose_optim(section: OptimSection, steps: int) -> Optim:
    """The optimizer of `section`, with the decay of "wsd" defaulting to a tenth of the run."""
    fields = section.model_dump()
    if section.decay_steps and section.schedule != "wsd":
        raise ConfigError(
            f"optim.decay_steps={section.decay_steps} is for schedule='wsd', not {section.schedule!r}; "
            f"remove it, or set optim.schedule='wsd'"
        )
    if section.schedule == "wsd" and section.decay_steps == 0:
        fields["decay_steps"] = max(1, steps // 10)
    if section.warmup_steps + fields["decay_steps"] * (section.schedule == "wsd") > steps:
        raise ConfigError(
            f"optim.warmup_steps={section.warmup_steps} and the decay over {fields['decay_steps']} steps do not fit "
            f"into train.steps={steps}; shorten them or train longer"
        )
    return Optim(**fields)
