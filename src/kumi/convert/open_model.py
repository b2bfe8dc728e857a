"""Open a model on disk, in any format, behind one interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.convert import kumi_checkpoint
from kumi.convert.files.safetensors_read import Span
from kumi.convert.files.stream import Reader
from kumi.convert.hf import read_folder
from kumi.convert.hf.passthrough import passthrough_of_checkpoint, passthrough_tensors
from kumi.errors import ConfigError, ModelError
from kumi.megatron.checkpoint_files import is_checkpoint as is_megatron_checkpoint
from kumi.paths import shown_path
from kumi.spec import families
from kumi.spec.families._shared import quantization
from kumi.spec.ledger import tensors
from kumi.spec.model import ModelSpec
from kumi.storage.folders import list_complete

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kumi.nn.decoder import Decoder


@dataclass(frozen=True)
class Source:
    """A checked model on disk: its spec and config.json, and a reader of its tensors.

    tokenizer     folder of the tokenizer; None if there is none
    passthrough   tensors that kumi does not compute with, and only copies
    """

    folder: Path
    spec: ModelSpec
    config: Mapping[str, Any]
    reader: Reader
    tokenizer: Path | None
    passthrough: Mapping[str, Span]

    @property
    def dtypes(self) -> Mapping[str, str]:
        """The dtype of each tensor, by name."""
        return self.reader.dtypes

    def read(self, name: str) -> Tensor:
        """Return a tensor."""
        shape = self._shapes[name]
        return self.reader.read(name, (0,) * len(shape), shape)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {param.name: param.shape for param in tensors(self.spec)}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and buffer with its name, one at a time."""
        for param in tensors(self.spec):
            yield param.name, self.read(param.name)

    def decoder(self, dtype: torch.dtype | None = None) -> Decoder:
        """Return the model as a module, its weights in `dtype` (default float32)."""
        import torch

        from kumi.nn.decoder import Decoder

        decoder = Decoder(self.spec, dtype=dtype or torch.float32)
        with torch.no_grad():
            for name, tensor in decoder.state_dict().items():
                tensor.copy_(self.read(name))
        return decoder


def open_source(folder: str | Path, config: str | Path | None = None, *, critic: bool = False) -> Source:
    """Open the model in `folder`: a Hugging Face folder, or a checkpoint of kumi or Megatron-Core.

    `config` is a config.json for Megatron checkpoints that do not describe their model. `critic`: open the critic in a
    checkpoint of kumi. Raise ModelError for any other folder, or if `config` is not needed, and ConfigError if `folder`
    has no critic.
    """
    folder = Path(folder)
    if critic and not kumi_checkpoint.is_checkpoint(folder):
        raise ConfigError(f"{folder}: has no critic, which only the checkpoints of a run have; name a run's folder")
    if is_megatron_checkpoint(folder):
        return _open_megatron(folder, config)
    if config is not None:
        raise ModelError(
            f"--config {config}: only Megatron checkpoints need one, and {folder} is not one; leave it out"
        )
    if (folder / "config.json").exists():
        return _open_hf(folder)
    if kumi_checkpoint.is_checkpoint(folder):
        return _open_kumi(folder, critic=critic)
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{folder}: a LoRA adapter, not a complete model; merge it into its base model with "
            f"`kumi convert {folder} MERGED --to hf`, and name the merged folder"
        )
    if candidates := models_in_run(folder):
        raise ModelError(f"{folder}: a run folder, which holds several models; name one of them: {candidates}")
    raise ModelError(
        f"{shown_path(folder)}: neither a Hugging Face folder (with config.json) nor a checkpoint of kumi or "
        f"Megatron; name a model's folder"
    )


def is_adapter_folder(folder: Path) -> bool:
    """True if `folder` holds adapters without their base model: in PEFT's format, or a run's checkpoint."""
    return (folder / "adapter_config.json").exists() or adapters_of_run(folder) is not None


def adapters_of_run(folder: Path, *, critic: bool = False) -> kumi_checkpoint.SavedModel | None:
    """Return the checkpoint in `folder`, or the `critic` in it; None unless it has adapters, not a whole model."""
    if not kumi_checkpoint.is_checkpoint(folder):
        return None
    saved = kumi_checkpoint.open_saved_model(folder, critic=critic)
    return saved if "lora" in saved.checkpoint.meta else None


def models_in_run(folder: Path) -> str:
    """Return, as text, the exported folders in a run folder and its checkpoints, newest first; "" for other folders."""
    names = [name for name in (folder / "hf", folder / "adapter") if name.is_dir()]
    return ", ".join(str(name) for name in (*names, *reversed(list_complete(folder / "checkpoints"))))


def _open_hf(folder: Path) -> Source:
    """Open a Hugging Face folder; raise ModelError unless it has exactly the tensors of its config.json."""
    config = families.read_config(folder)
    spec = families.from_hf(config)
    stored = read_folder.locate_params(folder, spec)
    return Source(
        folder,
        spec,
        quantization.without_quantization(config),
        read_folder.folder_reader(stored),
        folder,
        passthrough_tensors(folder, spec),
    )


def _open_kumi(folder: Path, *, critic: bool) -> Source:
    """Open a kumi checkpoint, or the critic in it, with the passthrough tensors that belong to it."""
    saved = kumi_checkpoint.open_saved_model(folder, critic=critic)
    spec = families.from_hf(saved.config)
    kumi_checkpoint.check_tensors(saved, spec)
    passthrough = passthrough_of_checkpoint(folder, spec, saved.passthrough_source)
    return Source(
        folder, spec, saved.config, kumi_checkpoint.checkpoint_reader(saved, spec), saved.tokenizer, passthrough
    )


def _open_megatron(folder: Path, config: str | Path | None) -> Source:
    """Open a Megatron checkpoint, which has no passthrough tensors."""
    from kumi.convert.megatron import read_megatron

    saved = read_megatron.open_megatron_model(folder, config)
    return Source(saved.folder, saved.spec, saved.config, saved.reader(), saved.tokenizer, {})
