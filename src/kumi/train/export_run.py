"""Export a checkpoint of a run that the user chooses, as training exports the last one at its end."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi import hub
from kumi.config import RunConfig
from kumi.config.document_lengths import prepared_store
from kumi.config.run_plan import read_plan
from kumi.config.stored_config import load_stored_config
from kumi.convert import convert, kumi_checkpoint
from kumi.convert.hf.card import CardContents, mark_verified
from kumi.convert.hf.origin import from_plain
from kumi.convert.hf.passthrough import copy_processor
from kumi.convert.hf.publish import model_folder_of
from kumi.convert.run_checkpoint import choose_model
from kumi.errors import ConfigError, ModelError
from kumi.files.run_names import CONFIG_FILE
from kumi.remote.addresses import is_url
from kumi.spec import families
from kumi.spec.model import ModelSpec
from kumi.spec.precision import ITEMSIZE, PRECISIONS
from kumi.storage.checkpoint import Checkpoint
from kumi.storage.folders import step_of
from kumi.storage.url_output import write_to_url
from kumi.train.run_card import run_card

if TYPE_CHECKING:
    from kumi.convert.megatron.write_megatron import MegatronOptions


@dataclass(frozen=True)
class RunExport:
    """An export.

    `to`: its format.
    `chosen`: which checkpoint it is of, in words.
    `message`: a sentence that describes the result.
    """

    to: str
    chosen: str
    message: str


def export_run(
    run: Path,
    target: Path | str,
    *,
    to: str | None = None,
    checkpoint: str | None = None,
    verify: bool = True,
    dtype: str | None = None,
    layout: str | None = None,
    megatron: MegatronOptions | None = None,
    base: str | None = None,
    critic: bool = False,
) -> RunExport:
    """Write a checkpoint of the run in the folder `run`, with a model card, to the new folder or URL `target`.

    to: a format of `kumi.convert.convert`, or "adapter" for PEFT's; by default "adapter" for a run that trains
        adapters, else "hf". With "hf" adapters are merged.
    checkpoint: as for `kumi.convert.run_checkpoint.choose_model`.
    dtype: by default, that of the run's own export.
    critic: write the critic of the run instead of its model.

    The other arguments and the errors are those of `kumi.convert.convert`.
    """
    chosen = choose_model(run, checkpoint)
    saved = _saved(chosen.folder, critic=critic)
    has_adapters = saved is not None and "lora" in saved.meta
    to = to or ("adapter" if has_adapters else "hf")
    if isinstance(target, str) and is_url(target):
        options: dict[str, Any] = {"to": to, "verify": verify, "dtype": dtype, "layout": layout, "base": base}
        options["critic"] = critic
        request = {"source": str(chosen.folder.absolute()), **options, "megatron": repr(megatron)}

        def write(folder: Path) -> str:
            return export_run(run, folder, checkpoint=checkpoint, megatron=megatron, **options).message

        return RunExport(to, chosen.words, write_to_url(target, "convert", request, write))
    target, config = Path(target), _config(run)
    contents = None if saved is None or config is None else _contents(config, run, saved)
    if to == "adapter":
        if saved is None or not has_adapters:
            raise ConfigError(f"--to adapter: {chosen.folder} has no checkpoint of adapters; use --to hf")
        if dtype or layout or megatron:
            raise ConfigError("convert: --dtype, --layout and Megatron's flags have no effect on adapters; remove them")
        contents = contents or CardContents(target.name, {"made by": "kumi convert"})
        base_name = _base_name(run, config, saved, base, critic=critic)
        write_run_adapters(target, _adapted_model(saved), saved, base_name, contents)
        message = f"{target}: adapters written for PEFT" + (
            _verify_adapters(saved, target, base, critic=critic) if verify else ""
        )
        return RunExport(to, chosen.words, message)
    if to == "hf" and dtype is None and saved is not None and config is not None and not has_adapters:
        dtype = export_dtype(config, saved.meta["hf_config"])
    options = {"to": to, "verify": verify, "dtype": dtype, "layout": layout, "megatron": megatron}
    card = contents if to == "hf" else None
    message = convert(chosen.folder, target, base=base, card=card, critic=critic, **options)
    if to == "hf" and saved is not None and saved.meta.get("carried_from"):
        copy_processor(Path(saved.meta["carried_from"]), target)
    return RunExport(to, chosen.words, message)


def _saved(folder: Path, *, critic: bool) -> Checkpoint | None:
    """Return the checkpoint in `folder`, with `critic` that of the critic in it; None for an exported model."""
    if not kumi_checkpoint.is_checkpoint(folder):
        return None
    return kumi_checkpoint.open_saved_model(folder, critic=critic).checkpoint


def _config(run: Path) -> RunConfig | None:
    """Return the configuration of the run in the folder `run`, which may have moved; None if the folder has none."""
    if not (run / CONFIG_FILE).is_file():
        return None
    config = load_stored_config(run)
    return config.model_copy(update={"train": config.train.model_copy(update={"out": str(run)})})


def _contents(config: RunConfig, run: Path, saved: Checkpoint) -> CardContents:
    """Return the contents of the model card for the checkpoint `saved` of the run in the folder `run`."""
    plan = read_plan(run)
    kind = config.precision.kind if plan is None else plan.made_for.precision
    return run_card(
        config,
        run,
        step_of(saved.folder),
        origin=from_plain(saved.meta.get("origin") or {}),
        precision=PRECISIONS.get(kind),
        store=prepared_store(config),
    )


def _base_name(run: Path, config: RunConfig | None, saved: Checkpoint, base: str | None, *, critic: bool) -> str:
    """Return the name of the base model for the files of the adapters: `base`, or the model that the run began from, or
    that its critic began from if `critic`."""
    if base is not None:
        return str(model_folder_of(base, "--base").resolve())
    key, source = "model.source", None if config is None else config.model.source
    if critic and config is not None and config.critic.model is not None:
        key, source = "critic.model", config.critic.model
    repository = None if source is None or Path(source).expanduser().exists() else hub.split(source)
    commit = None if source is None or repository is None else hub.recorded_commit(run, key, source)
    return str(saved.meta["base"]) if repository is None or commit is None else f"{repository[0]}@{commit}"


def _adapted_model(saved: Checkpoint) -> ModelSpec:
    """Return the model of the checkpoint `saved`, with the settings of its adapters."""
    from kumi.convert.merge import lora_settings

    return replace(families.from_hf(saved.meta["hf_config"]), lora=lora_settings(saved.meta))


def _verify_adapters(saved: Checkpoint, target: Path, base: str | None, *, critic: bool) -> str:
    """Compare the base model's logits under the adapters in `target` with those under the adapters in `saved`.

    Return a clause with the result, for the end of a sentence.
    If they differ, remove `target` and raise ModelError.
    """
    from kumi.convert.merge import check_adapters

    try:
        how = f"logits within {check_adapters(saved.folder, target, base, critic=critic):.1e} of the checkpoint's"
    except ModelError:
        shutil.rmtree(target)
        raise
    mark_verified(target, how)
    return f"; verified: {how}"


def write_run_adapters(
    folder: Path, model: ModelSpec, saved: Checkpoint, base: str, contents: CardContents, *, replace: bool = False
) -> None:
    """Write the adapters in the checkpoint `saved` of a run to `folder`, in PEFT's format, with `base` as the name of
    the base model, and a card."""
    from kumi.convert.hf.adapter_write import adapter_card, write_adapter

    assert model.lora is not None, "only a model with adapters has any to write"
    card = adapter_card(
        name=contents.name, base=base, lora=model.lora, facts=contents.facts, evaluation=contents.evaluation
    )
    write_adapter(folder, model, lambda name: saved.read(f"model/{name}"), base=base, card=card, replace=replace)


def export_dtype(config: RunConfig, hf_config: Mapping[str, Any]) -> str:
    """Return the dtype of the weights that a run exports: export.dtype, or for "auto" the dtype of the
    model it began from, float32 without one."""
    if config.export.dtype != "auto":
        return config.export.dtype
    source_dtype = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32")
    return source_dtype if config.model.source is not None and source_dtype in ITEMSIZE else "float32"
