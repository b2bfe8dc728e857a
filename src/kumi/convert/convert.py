"""A model from one format into another."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kumi.convert import hf, hf_write, native
from kumi.convert.card import mark_verified, model_card
from kumi.convert.entry import DTYPES
from kumi.convert.origin import origin_of
from kumi.convert.publish import located
from kumi.convert.source import Source, is_apart, open_source
from kumi.errors import ConfigError, LayoutError, ModelError
from kumi.spec.checks import misfits
from kumi.spec.layout import Layout
from kumi.spec.ledger import num_params, params, tensors
from kumi.spec.model import ModelSpec
from kumi.spec.precision import ITEMSIZE
from kumi.storage.folders import free_space_check

if TYPE_CHECKING:  # imported where they are used, since torch, which they need, takes seconds to import
    from kumi.convert.megatron_write import Options

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
    megatron: Options | None = None,
    base: str | None = None,
) -> str:
    """What was done, in a sentence: the model in `src` (any format) is in the new folder `dst`, in one of `FORMATS`.

    Weights keep their dtype unless `dtype` says otherwise. A `layout` such as "tp=2,pp=2" cuts a checkpoint of kumi
    into the pieces that its ranks hold. `config` is the config.json of a Megatron checkpoint that does not say what its
    model is, `megatron` how the Megatron that loads it is set up. Adapters are merged into their model, `base` where it
    is not the one that they name, and the logits compared. With `verify`, the folder is read back and compared with
    `src`.
    """
    if to not in FORMATS:
        raise ConfigError(f"--to {to}: kumi writes {', '.join(FORMATS[:-1])} and {FORMATS[-1]}")
    if not str(dst):
        raise ConfigError("convert: the folder to write has an empty name; name a new folder")
    if layout is not None and to != "kumi":
        raise ConfigError(f"--layout {layout}: only checkpoints of kumi are cut by a layout; use --to kumi")
    if megatron is not None and to != "megatron":
        raise ConfigError("convert: --megatron-local and --megatron-vocab are for --to megatron; leave them out")
    folder, target = located(src, "convert"), Path(dst)
    apart = is_apart(folder)
    if base is not None and not apart:
        raise ConfigError(f"--base {base}: is for adapters, and {folder} holds none; leave it out")
    source = _open_merged(folder, base) if apart else open_source(folder, config)
    dtypes, notes = _dtypes(source, dtype), [f"note: {note}" for note in source.spec.notes]
    if to == "hf":
        _write_hf(source, target, dtypes)
    elif to == "megatron":
        notes += _write_megatron(source, target, dtypes, megatron)
    else:
        _write_native(source, target, dtypes, Layout() if layout is None else parse_layout(layout, source.spec))
    done = f"{target}: {num_params(source.spec):,} parameters written as {to}"
    if source.carried and to != "megatron":
        done += f", and {len(source.carried)} tensors copied that are carried along"
    if apart:
        difference = _check_merged(folder, base, target)
        done += f"; merged, with logits within {difference:.1e} of those with the adapters beside their matrices"
    if not verify:
        return "\n".join([done, *notes])
    from kumi.convert.verify import verify as verify_written

    kept = replace(source, carried={}) if to == "megatron" else source
    verdict = verify_written(kept, open_source(target))
    if to == "hf":
        mark_verified(target, f"against the source: {verdict}")
    done += f"; verified against {source.folder}: {verdict}"
    return "\n".join([done, *notes])


def _open_merged(folder: Path, base: str | None) -> Source:
    from kumi.convert import merge

    return merge.open_merged(folder, base)


def _check_merged(folder: Path, base: str | None, target: Path) -> float:
    """How far the logits of `target` are from those with the adapters beside; it is removed if that is too far."""
    from kumi.convert import merge

    try:
        return merge.check_merged(folder, base, open_source(target))
    except ModelError:
        shutil.rmtree(target)
        raise


def _dtypes(source: Source, dtype: str | None) -> Mapping[str, str]:
    """What every tensor is written in, by name; buffers, which choose and are not trained, keep theirs."""
    if dtype is None:
        return source.dtypes
    if dtype not in DTYPES.values():
        raise ConfigError(f"--dtype {dtype}: kumi writes weights as {', '.join(DTYPES.values())}; name one of these")
    return dict(source.dtypes) | {param.name: dtype for param in params(source.spec)}


def _write_hf(source: Source, target: Path, dtypes: Mapping[str, str]) -> None:
    origin = origin_of(source.folder)
    made = {"made by": "kumi convert", "converted from": origin.published or source.folder.name}
    card = model_card(name=target.name, model=source.spec, facts=made, origin=origin)
    hf.write(
        target,
        source.spec,
        source.reader,
        base_config=source.config,
        dtype=dtypes,
        tokenizer_folder=source.tokenizer,
        card=card,
        carried=source.carried,
    )


def _write_native(source: Source, target: Path, dtypes: Mapping[str, str], layout: Layout) -> None:
    hf_write.check_target(target, replace=False)
    size = sum(entry.numel * ITEMSIZE[dtypes[entry.name]] for entry in tensors(source.spec))
    free_space_check(target, size + sum(span.nbytes for span in source.carried.values()), "the model")
    tokenizer = None if source.tokenizer is None else str(source.tokenizer.absolute())
    native.write_model(
        target,
        source.spec,
        source.reader,
        dtypes=dtypes,
        layout=layout,
        beside=source.carried,
        meta={"hf_config": dict(source.config), "tokenizer": tokenizer, "origin": origin_of(source.folder).plain()},
    )


def _write_megatron(source: Source, target: Path, dtypes: Mapping[str, str], options: Options | None) -> list[str]:
    """Writes it, and says what Megatron will not have or not compute of the model."""
    from kumi.convert import megatron_write

    notes = megatron_write.write(
        target,
        source.spec,
        source.reader,
        dtypes=dtypes,
        config=source.config,
        tokenizer=source.tokenizer,
        options=options,
    )
    left = (
        [
            f"left out, for Megatron has no place for them: {len(source.carried)} tensors that are carried along, such "
            f"as {next(iter(source.carried))}"
        ]
        if source.carried
        else []
    )
    return [*left, *notes]


def parse_layout(text: str, spec: ModelSpec) -> Layout:
    """The layout that `text` such as "tp=2,dp_shard=2,zero=3" describes; LayoutError where it does not suit `spec`."""
    known = {field.name: field.default for field in fields(Layout) if type(field.default) is int}
    found: dict[str, int] = {}
    for word in text.split(","):
        key, _, value = (part.strip() for part in word.partition("="))
        if key not in known or not value.isdecimal() or key in found:
            raise LayoutError(
                f"--layout {text}: {word!r} is none of {', '.join(known)} with a number, each once; "
                f"write it as in tp=2,pp=2"
            )
        found[key] = int(value)
    layout = replace(Layout(), **found)  # type: ignore[arg-type]
    wrong = misfits(spec, layout)
    if wrong:
        raise LayoutError(f"--layout {text}: {wrong[0]}")
    return layout
