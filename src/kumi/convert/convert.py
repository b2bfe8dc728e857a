"""Convert a model from one format to another: Hugging Face, kumi, Megatron-Core."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.convert import kumi_checkpoint
from kumi.convert.files.stored_tensor import DTYPES
from kumi.convert.hf import write_folder
from kumi.convert.hf.card import CardContents, mark_verified
from kumi.convert.hf.origin import origin_of
from kumi.convert.hf.publish import model_folder_of
from kumi.convert.open_model import Source, is_adapter_folder, open_source
from kumi.errors import ConfigError, LayoutError, ModelError
from kumi.remote.addresses import is_url
from kumi.spec.checks import not_divisible
from kumi.spec.layout import Layout
from kumi.spec.ledger import num_params, params, tensors
from kumi.spec.model import ModelSpec
from kumi.spec.precision import ITEMSIZE
from kumi.storage.folders import check_free_space
from kumi.storage.url_output import write_to_url

if TYPE_CHECKING:  # imports torch, which takes seconds; imported where it is used
    from kumi.convert.megatron.write_megatron import MegatronOptions

FORMATS = ("hf", "kumi", "megatron")


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str,
    verify: bool = True,
    dtype: str | None = None,
    layout: str | None = None,
    config: str | Path | None = None,
    megatron: MegatronOptions | None = None,
    base: str | None = None,
    card: CardContents | None = None,
    critic: bool = False,
) -> str:
    """Convert the model in `src` (any format) into the new folder `dst`; return a sentence that describes the result.

    Both may be URLs of a store.

    to         target format, one of `FORMATS`
    verify     read the folder back and compare it with `src`
    dtype      dtype of all parameters; by default each parameter keeps its dtype
    layout     such as "tp=2,pp=2": shard a kumi checkpoint into the pieces of that layout's ranks
    config     config.json for a Megatron checkpoint that does not describe its model
    megatron   settings of the Megatron-LM that will load the result
    base       base model of adapters, instead of the one that they name
    card       contents of a Hugging Face folder's model card; by default they describe the conversion
    critic     convert the critic in a kumi checkpoint, as a reward model, instead of the policy

    Adapters are merged into their base, and the logits before and after merging are compared. Raise ConfigError for
    options that do not fit, ModelError or RefusedError for a damaged source or a failed comparison.
    """
    if isinstance(dst, str) and is_url(dst):
        options: dict[str, Any] = {"to": to, "verify": verify, "dtype": dtype, "layout": layout, "base": base}
        options |= {"config": None if config is None else str(config), "megatron": megatron, "card": card}
        options["critic"] = critic
        request = {"source": str(src), **options, "megatron": repr(megatron), "card": repr(card)}
        return write_to_url(dst, "convert", request, lambda folder: convert(src, folder, **options))
    if to not in FORMATS:
        raise ConfigError(f"--to {to}: kumi writes {', '.join(FORMATS[:-1])} and {FORMATS[-1]}")
    if not str(dst):
        raise ConfigError("convert: the target folder has an empty name; name a new folder")
    if layout is not None and to != "kumi":
        raise ConfigError(f"--layout {layout}: only kumi checkpoints are sharded by a layout; use --to kumi")
    if megatron is not None and to != "megatron":
        raise ConfigError("convert: --megatron-local and --megatron-vocab are for --to megatron; leave them out")
    folder, target = model_folder_of(src, "convert"), Path(dst)
    is_adapter = is_adapter_folder(folder)
    if base is not None and not is_adapter:
        raise ConfigError(f"--base {base}: only adapters have a base model, and {folder} holds none; leave --base out")
    source = _open_merged(folder, base, critic) if is_adapter else open_source(folder, config, critic=critic)
    dtypes, notes = _dtypes(source, dtype), [f"note: {note}" for note in source.spec.notes]
    if to == "hf":
        _write_hf(source, target, dtypes, card)
    elif to == "megatron":
        notes += _write_megatron(source, target, dtypes, megatron)
    else:
        _write_kumi(source, target, dtypes, Layout() if layout is None else parse_layout(layout, source.spec))
    summary = f"{target}: {num_params(source.spec):,} parameters written as {to}"
    if source.passthrough and to != "megatron":
        summary += f", and {len(source.passthrough)} passthrough tensors copied unchanged"
    if is_adapter:
        difference = _check_merged(folder, base, target, critic)
        summary += f"; adapters merged, logits within {difference:.1e} of those with unmerged adapters"
    if not verify:
        return "\n".join([summary, *notes])
    from kumi.convert.verify import verify as verify_written

    comparable = replace(source, passthrough={}) if to == "megatron" else source
    verdict = verify_written(comparable, open_source(target))
    if to == "hf":
        mark_verified(target, f"against the source: {verdict}")
    summary += f"; verified against {source.folder}: {verdict}"
    return "\n".join([summary, *notes])


def _open_merged(folder: Path, base: str | None, critic: bool) -> Source:
    from kumi.convert import merge

    return merge.open_merged(folder, base, critic=critic)


def _check_merged(folder: Path, base: str | None, target: Path, critic: bool) -> float:
    """Return the largest logit difference between merged and unmerged adapters.

    If it is too large, remove `target` and raise ModelError.
    """
    from kumi.convert import merge

    try:
        return merge.check_merged(folder, base, open_source(target), critic=critic)
    except ModelError:
        shutil.rmtree(target)
        raise


def _dtypes(source: Source, dtype: str | None) -> Mapping[str, str]:
    """Return the dtype to write each tensor in, by name. `dtype` applies to parameters; buffers keep their own."""
    if dtype is None:
        return source.dtypes
    if dtype not in DTYPES.values():
        raise ConfigError(f"--dtype {dtype}: kumi writes weights as {', '.join(DTYPES.values())}; choose one of these")
    return dict(source.dtypes) | {param.name: dtype for param in params(source.spec)}


def _write_hf(source: Source, target: Path, dtypes: Mapping[str, str], contents: CardContents | None) -> None:
    """Write a Hugging Face folder; without `contents`, its card describes the conversion."""
    if contents is None:
        origin = origin_of(source.folder)
        facts = {"made by": "kumi convert", "converted from": origin.published or source.folder.name}
        contents = CardContents(target.name, facts, origin)
    write_folder.write_hf_folder(
        target,
        source.spec,
        source.reader,
        base_config=source.config,
        dtype=dtypes,
        tokenizer_folder=source.tokenizer,
        card=contents.card(source.spec),
        passthrough=source.passthrough,
    )


def _write_kumi(source: Source, target: Path, dtypes: Mapping[str, str], layout: Layout) -> None:
    """Write a kumi checkpoint, in the pieces of `layout`.

    Raise RefusedError if `target` exists and is not empty, or if the disk is too small.
    """
    write_folder.check_target(target, replace=False)
    size = sum(entry.numel * ITEMSIZE[dtypes[entry.name]] for entry in tensors(source.spec))
    check_free_space(target, size + sum(span.nbytes for span in source.passthrough.values()), "the model")
    tokenizer = None if source.tokenizer is None else str(source.tokenizer.absolute())
    kumi_checkpoint.write_model(
        target,
        source.spec,
        source.reader,
        dtypes=dtypes,
        layout=layout,
        passthrough=source.passthrough,
        meta={"hf_config": dict(source.config), "tokenizer": tokenizer, "origin": origin_of(source.folder).plain()},
    )


def _write_megatron(
    source: Source, target: Path, dtypes: Mapping[str, str], options: MegatronOptions | None
) -> list[str]:
    """Write a Megatron-Core checkpoint; return notes on the parts of the model that Megatron lacks or ignores."""
    from kumi.convert.megatron import write_megatron

    notes = write_megatron.write_megatron_folder(
        target,
        source.spec,
        source.reader,
        dtypes=dtypes,
        config=source.config,
        tokenizer=source.tokenizer,
        options=options,
    )
    passthrough_note = (
        [
            f"left out, because Megatron has no counterpart: {len(source.passthrough)} passthrough tensors, such "
            f"as {next(iter(source.passthrough))}"
        ]
        if source.passthrough
        else []
    )
    return [*passthrough_note, *notes]


def parse_layout(text: str, spec: ModelSpec) -> Layout:
    """Parse `text` such as "tp=2,dp_shard=2,zero=3"; raise LayoutError unless the layout fits `spec`."""
    defaults = {field.name: field.default for field in fields(Layout) if type(field.default) is int}
    degrees: dict[str, int] = {}
    for word in text.split(","):
        key, _, value = (part.strip() for part in word.partition("="))
        if key not in defaults or not value.isdecimal() or key in degrees:
            raise LayoutError(
                f"--layout {text}: {word!r} must be one of {', '.join(defaults)} with a number, each at most once; "
                f"write it as in tp=2,pp=2"
            )
        degrees[key] = int(value)
    layout = replace(Layout(), **degrees)  # type: ignore[arg-type]
    problems = not_divisible(spec, layout)
    if problems:
        raise LayoutError(f"--layout {text}: {problems[0]}")
    return layout
