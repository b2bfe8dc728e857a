"""A model from one format into another."""

from __future__ import annotations

from pathlib import Path

from kumi.convert import hf, hf_write, native
from kumi.convert.card import mark_verified, model_card
from kumi.convert.origin import origin_of
from kumi.convert.publish import located
from kumi.convert.source import Source, open_source
from kumi.convert.verify import verify as verify_written
from kumi.errors import ConfigError
from kumi.spec.ledger import num_params, tensors
from kumi.spec.precision import ITEMSIZE
from kumi.storage.folders import free_space_check

FORMATS = ("hf", "kumi")


def convert(src: str | Path, dst: str | Path, *, to: str, verify: bool = True) -> str:
    """What was done, in a sentence: the model in `src` (either format) is in the new folder `dst`, as "hf" or "kumi".

    Weights keep their dtype. With `verify`, the folder is read back and compared with `src`.
    """
    if to not in FORMATS:
        raise ConfigError(f"--to {to}: kumi writes {' and '.join(FORMATS)}")
    if not str(dst):
        raise ConfigError("convert: the folder to write has an empty name; name a new folder")
    source, target = open_source(located(src, "convert")), Path(dst)
    if to == "hf":
        _write_hf(source, target)
    else:
        hf_write.check_target(target, replace=False)
        size = sum(entry.numel * ITEMSIZE[source.dtypes[entry.name]] for entry in tensors(source.spec))
        free_space_check(target, size, "the model")
        native.write_model(target, source.tensors(), config=source.config, tokenizer=source.tokenizer,
                           beside=source.carried)  # fmt: skip
    done = f"{target}: {num_params(source.spec):,} parameters written as {to}"
    if source.carried:
        done += f", and {len(source.carried)} tensors copied that are carried along"
    if not verify:
        return done
    difference = verify_written(source, open_source(target))
    if to == "hf":
        mark_verified(target, f"against the source: tensors equal, largest logit difference {difference:g}")
    return f"{done}; all tensors equal {source.folder}, largest logit difference {difference:g}"


def _write_hf(source: Source, target: Path) -> None:
    origin = origin_of(source.folder)
    made = {"made by": "kumi convert", "converted from": origin.published or source.folder.name}
    card = model_card(name=target.name, model=source.spec, facts=made, origin=origin)
    hf.write(target, source.spec, source.tensors(), base_config=source.config, dtype=source.dtypes,
             tokenizer_folder=source.tokenizer, card=card, carried=source.carried)  # fmt: skip
