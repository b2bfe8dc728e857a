"""Generation with a model given by its name: open its files, plan the memory, load the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kumi.errors import ConfigError
from kumi.inference.batched_decoder import OnToken
from kumi.inference.generation_settings import Flags
from kumi.inference.load_model import LoadedModel, ModelTexts, default_device, load_files, read_texts, weight_dtype
from kumi.inference.model_files import ModelFiles, find_model, weights_digest
from kumi.inference.planned_memory import fitting_batch, free_bytes
from kumi.inference.prompt_encoder import Prompt
from kumi.inference.text_generator import (
    BATCH_SIZE,
    ReplySettings,
    TextGenerator,
    TextReply,
    check_prompts,
    check_samples,
    longest_text,
)


@dataclass(frozen=True)
class ModelChoice:
    """The model of a generation: `path`, `dtype`, `device`, `base` and `checkpoint` as in `load_model`."""

    path: str | Path
    dtype: str | torch.dtype | None = None
    device: str | torch.device | None = None
    base: str | Path | None = None
    checkpoint: str | int | None = None


class Generation:
    """A model with the settings of its replies, whose weights are loaded once prompts are known to fit.

    model: the model, loaded or not. flags, use_template, system: as in `ReplySettings`.
    batch_size: sequences that are decoded at once; None for as many as fit, up to 8.

    Raise as `load_model` does.
    """

    def __init__(
        self,
        model: ModelChoice | LoadedModel,
        flags: Flags | None = None,
        *,
        use_template: bool = True,
        system: str | None = None,
        batch_size: int | None = None,
    ) -> None:
        self._batch_size = batch_size
        self._files: ModelFiles | None = None
        self._model: LoadedModel | None = None
        texts: ModelTexts
        if isinstance(model, LoadedModel):
            self._model, texts, self.spec = model, model, model.decoder.spec
            self.dtype = str(model.decoder.compute_dtype).removeprefix("torch.")
            self.device = model.decoder.head_weight.device
        else:
            self._files = find_model(model.path, base=model.base, checkpoint=model.checkpoint)
            texts, self.spec = read_texts(self._files), self._files.spec
            self.dtype = weight_dtype(self._files, model.dtype)
            self.device = default_device() if model.device is None else torch.device(model.device)
        self.settings = ReplySettings(texts, flags, use_template=use_template, system=system)

    def digest(self) -> str:
        """Return a hash of everything that replies depend on, except the prompts: weights, dtype and settings."""
        assert self._files is not None, "only the files of a model have a digest"
        return f"{weights_digest(self._files)[:16]}-{self.dtype}-{self.settings.digest()[:16]}"

    def generator(self, prompts: Sequence[Sequence[int]], *, samples: int = 1, cache_bytes: int = 0) -> TextGenerator:
        """Return the generator for the encoded `prompts`, after loading the weights if they are not in memory.

        cache_bytes: bytes of a cache that is in memory already and that the generator will use.

        Raise ConfigError for prompts that the model cannot take, FitError if they need more memory than is free.
        """
        check_samples(samples, self.settings.sampling)
        check_prompts(prompts, self.spec)
        context = max(map(len, prompts), default=1) + self.settings.sampling.max_new_tokens
        longest = longest_text(self.spec)
        free = free_bytes(self.device)
        batch, _ = fitting_batch(
            self.spec,
            self.dtype,
            context if longest is None else min(context, longest),
            None if free is None else free + cache_bytes,
            batch_size=self._batch_size,
            most=min(BATCH_SIZE, max(1, len(prompts) * samples)),
            loaded=self._model is not None,
        )
        if self._model is None:
            assert self._files is not None, "a model is loaded, or has files"
            self._model = load_files(self._files, self.settings.texts, dtype=self.dtype, device=self.device)
        return TextGenerator(self._model, self.settings, batch_size=batch)


def generate_replies(
    model: str | Path | LoadedModel,
    prompts: Prompt | Sequence[Prompt],
    *,
    flags: Flags,
    num_return_sequences: int = 1,
    system: str | None = None,
    use_template: bool = True,
    batch_size: int | None = None,
    options: Mapping[str, Any] | None = None,
    on_token: OnToken | None = None,
) -> list[TextReply]:
    """Return the replies to `prompts`, in their order; `options` are fields of `ModelChoice` other than `path`."""
    if isinstance(model, LoadedModel) and options:
        raise ConfigError("dtype, device, base and checkpoint are those of the loaded model; leave them out")
    choice = model if isinstance(model, LoadedModel) else ModelChoice(model, **(options or {}))
    generation = Generation(choice, flags, use_template=use_template, system=system, batch_size=batch_size)
    encoded = generation.settings.encode(as_prompts(prompts))
    generator = generation.generator(encoded, samples=num_return_sequences)
    replies = generator.generate(encoded, samples=num_return_sequences, on_token=on_token)
    return sorted(replies, key=lambda reply: (reply.prompt, reply.sample))


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return `prompts` as a list. A text, or a list of messages, is a single prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(item, Mapping) for item in items) else items
