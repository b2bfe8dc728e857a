"""A model from one format into another."""

from __future__ import annotations

from pathlib import Path

from kumi.convert import hf, hf_write, native
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
    source, target = open_source(src), Path(dst)
    if to == "hf":
        _write_hf(source, target)
    else:
        hf_write.check_target(target, replace=False)
        size = sum(entry.numel * ITEMSIZE[source.dtypes[entry.name]] for entry in tensors(source.spec))
        free_space_check(target, size, "the model")
        native.write_model(target, source.tensors(), config=source.config, tokenizer=source.tokenizer)
    done = f"{target}: {num_params(source.spec):,} parameters written as {to}"
    if not verify:
        return done
    difference = verify_written(source, open_source(target))
    if to == "hf":
        _note(target, f"| verified against the source | tensors equal, largest logit difference {difference:g} |")
    return f"{done}; all tensors equal {source.folder}, largest logit difference {difference:g}"


def _write_hf(source: Source, target: Path) -> None:
    card = hf.model_card(name=target.name, model=source.spec, facts={"converted from": source.folder.name})
    hf.write(target, source.spec, source.tensors(), base_config=source.config, dtype=source.dtypes,
             tokenizer_folder=source.tokenizer, card=card)  # fmt: skip


def _note(folder: Path, row: str) -> None:
    """Append `row` to the table of the model card."""
    path = folder / "README.md"
    lines = path.read_text(encoding="utf-8").split("\n")
    last = max(index for index, line in enumerate(lines) if line.startswith("|"))
    path.write_text("\n".join([*lines[: last + 1], row, *lines[last + 1 :]]), encoding="utf-8")
