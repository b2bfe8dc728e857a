"""Train a byte-level BPE tokenizer in a separate process.

The tokenizers library starts threads, which do not survive the later fork of ranks. So `train` runs this module as a
program (`python -m kumi.data.bpe`) and waits. The result depends only on the sources, the vocabulary size and the
sample.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from kumi.data import records, shards, tokenizer
from kumi.data.chat.masked import RowRefused
from kumi.data.encode_rows import content_of
from kumi.data.excluded_rows import excluded_in, excluded_of
from kumi.data.formats import Format, to_example
from kumi.data.hygiene.row_texts import TextRow, example_row, example_texts
from kumi.data.job_checks import in_validation
from kumi.data.records import Fault
from kumi.data.row_files import read_rows
from kumi.data.row_list import RowList, read_row_list
from kumi.data.sources import compression
from kumi.data.tokenizer import Tokenizer
from kumi.errors import ConfigError, KumiError, RefusedError
from kumi.files.output import make_folder, remove_file, write_text
from kumi.files.untrusted import TOKENIZER, read_bytes, strict_json
from kumi.spec.data_source import Source

EOS, PAD = "<|endoftext|>", "<|pad|>"
_ALPHABET, _SPECIALS = 256, (EOS, PAD)
_CHUNK = 1 << 20  # bytes of a unit of the sample
# Estimated ratio of text to compressed bytes, for the size of a sample.
_EXPANSION = 4


def train(
    sources: Sequence[Source],
    vocab_size: int,
    out_folder: Path | str,
    *,
    sample_bytes: int = 256 << 20,
    validation: float = 0.0,
    exclude_rows: Path | str | None = None,
) -> Tokenizer:
    """Train a byte-level BPE tokenizer with at most `vocab_size` ids on `sources`; write it to `out_folder`.

    transformers can load the folder. From rows that are examples the tokenizer learns the texts of the messages:
    content, thoughts and tool calls. From sources with more than `sample_bytes` of text a sample of about that size is
    drawn, by a hash of file name and position. Documents and rows that `prepare` would hold out with the same
    `validation` are skipped, and so are the files of a source's own validation data and the rows of the list
    `exclude_rows`. Id 0 is `<|endoftext|>` (bos and eos), id 1 is `<|pad|>`. A folder that already has this tokenizer
    is reused. Raise ConfigError if `vocab_size` is too small or the sources have no text, RefusedError if the folder
    has other files.
    """
    if vocab_size < _ALPHABET + len(_SPECIALS):
        raise ConfigError(
            f"vocab_size={vocab_size}: a byte-level tokenizer needs at least {_ALPHABET + len(_SPECIALS)} ids"
        )
    folder = Path(out_folder)
    excluded = None if exclude_rows is None else read_row_list(exclude_rows)
    chosen = _sample(sources, sample_bytes, validation, excluded)
    blocks = shards.digest([unit.pop("blocks") for unit in chosen])
    options = {"version": shards.FORMAT_VERSION, "vocab_size": vocab_size, "validation": validation}
    # The digest covers paths and times of the files, so any change of a file leads to a new training.
    origin = shards.digest([options, chosen])
    if not _is_trained_from(folder, origin, blocks):
        _refuse_foreign(folder)
        _run({"folder": str(folder), "chosen": chosen, "vocab_size": vocab_size, "validation": validation})
        record = {"origin": origin, "blocks": blocks, "sha256": _sha256(folder / "tokenizer.json"), **options}
        write_text(folder / tokenizer.ORIGIN, json.dumps(record, indent=2) + "\n")
    return tokenizer.load(folder)


def _sample(
    sources: Sequence[Source], sample_bytes: int, validation: float, exclude: RowList | None
) -> list[dict[str, Any]]:
    """Return the units of the sample (ranges of files, see `kumi.data.shards`) as JSON data.

    Each unit has the text key of its source, a limit of characters, and the digests of blocks of its files. A unit of
    examples also has the format of its rows. A unit of a source with its own validation data also has the fraction that
    is held out of this unit, in place of `validation`. A unit with rows of the list `exclude` also has these rows by
    segment.
    """
    chunks: list[tuple[shards.Unit, dict[str, Any]]] = []
    contents = [shards.files_and_format(source) for source in sources]
    held_out = {file.path for _, own, _ in contents for file in own}
    for number, (source, (files, _, fmt)) in enumerate(zip(sources, contents, strict=True)):
        if any(file.format == "indexed" for file in files):
            raise ConfigError(
                f"data source {source.path!r}: a tokenizer learns from text, and indexed data holds tokens"
            )
        more: dict[str, Any] = {} if fmt.kind == "text" else {"format": asdict(fmt)}
        read = [file for file in files if file.path not in held_out]
        for unit in shards.units(number, read, source.text_key, _CHUNK, fmt.kind):
            fraction = shards.validation_fraction(source, unit, validation)
            own_fraction = {} if fraction == validation else {"validation": fraction}
            chunks.append((unit, {"text_key": source.text_key} | more | own_fraction))
    if exclude is not None:
        _add_excluded(exclude, chunks)
    order = sorted(range(len(chunks)), key=lambda n: _position_hash(chunks[n][0]))
    selected, size = [], 0
    for number in order:
        if size >= sample_bytes:
            break
        selected.append(number)
        size += sum(s.bytes * (_EXPANSION if _is_compressed(s) else 1) for s in chunks[number][0].segments)
    limit = max(8 * _CHUNK, sample_bytes // max(len(selected), 1))
    return [_plain(*chunks[number]) | {"limit": limit} for number in sorted(selected)]


def _add_excluded(exclude: RowList, chunks: Sequence[tuple[shards.Unit, dict[str, Any]]]) -> None:
    """Add the rows of the list `exclude`, by segment, to the jobs of the units that have some."""
    segments = [segment for unit, _ in chunks for segment in unit.segments]
    read = {segment.file.path for segment in segments}
    # `prepare` refuses files that no source reads; validation data of sources are not read here.
    own = RowList(exclude.path, {file: rows for file, rows in exclude.rows.items() if file in read})
    by_segment = iter(excluded_of(own, segments))
    for unit, more in chunks:
        rows = [next(by_segment) for _ in unit.segments]
        more.update({"excluded": rows} if any(rows) else {})


def _plain(unit: shards.Unit, more: dict[str, Any]) -> dict[str, Any]:
    """Return `unit` as JSON data, with the digests of blocks of its files and the fields `more`."""
    segments = {"segments": shards.plain_segments(unit.segments), "blocks": shards.blocks_of(unit.segments)}
    return asdict(unit) | segments | more


def _is_compressed(segment: shards.FileRange) -> bool:
    return segment.file.format == "parquet" or compression(Path(segment.file.path)) != ""


def _position_hash(unit: shards.Unit) -> bytes:
    """Return a hash of the unit's source, first file (name and size) and position in it."""
    first = unit.segments[0]
    return hashlib.sha256(
        f"{Path(first.file.path).name}:{first.file.size}:{first.start}:{unit.source}".encode()
    ).digest()


def _is_trained_from(folder: Path, origin: str, blocks: str) -> bool:
    """Return True when `folder` has an unchanged tokenizer that was trained from `origin` and these blocks of files.

    The record of an earlier version lacks the blocks, and is then compared without them.
    """
    try:
        record = strict_json(read_bytes(folder, tokenizer.ORIGIN))
        same = record["origin"] == origin and record.get("blocks", blocks) == blocks
        return bool(same and record["sha256"] == _sha256(folder / "tokenizer.json"))
    except (ConfigError, ValueError, KeyError, TypeError):
        return False


def _refuse_foreign(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()) and not (folder / tokenizer.ORIGIN).exists():
        raise RefusedError(f"{folder}: has files, but no tokenizer trained by kumi; name a new or empty folder")


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_bytes(path.parent, path.name, limit=TOKENIZER.size)).hexdigest()


def _run(job: dict[str, Any]) -> None:
    """Train in a new process and wait for it; raise its error."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-m", "kumi.data.bpe"]
    # A separate process group: Ctrl-C in the terminal reaches only the parent, which stops this process.
    completed = subprocess.run(
        command,
        input=json.dumps(job | {"parent": os.getpid()}).encode(),
        stdout=subprocess.PIPE,
        env=environment,
        check=False,
        process_group=0,
    )
    if completed.returncode == ConfigError.exit_code:
        raise ConfigError(completed.stdout.decode())
    if completed.returncode != 0:
        raise KumiError(f"the training of the tokenizer ended with code {completed.returncode}; its message is above")


def _texts(job: dict[str, Any], faults: list[Fault]) -> Iterator[str]:
    """Yield the training texts of the sample, up to each unit's limit; add the first unreadable record to `faults`."""
    for unit in job["chosen"]:
        remaining = unit["limit"]
        fraction = unit.get("validation", job["validation"])
        for number, segment in enumerate(unit["segments"]):
            for item in _rows(unit, number, segment):
                if isinstance(item, Fault):
                    faults[:] = faults or [item]
                    continue
                content, texts = item
                if not in_validation(content, fraction):
                    for text in texts:
                        remaining -= len(text)
                        yield from tokenizer.pieces(text, tokenizer.PIECE)
                if remaining <= 0:
                    break


def _rows(
    unit: dict[str, Any], number: int, segment: dict[str, Any]
) -> Iterator[tuple[str | bytes, Sequence[str]] | Fault]:
    """Yield (content, texts) of each row of segment `number` of `unit`, or a Fault; the content decides whether the row
    is held out.

    Rows that a list leaves out are not yielded.
    """
    file, bounds = segment["file"], (segment["start"], segment["end"])
    path, excluded = Path(file["path"]), excluded_in(unit, number, Counter())
    if "format" not in unit:
        for item in records.read_range(path, file["format"], unit["text_key"], *bounds):
            if isinstance(item, Fault):
                yield item
            elif excluded is None or not excluded.leaves_out(TextRow(item.file, item.line, item.text)):
                yield item.text, [item.text]
        return
    fmt = Format(**unit["format"])
    for row in read_rows(path, file["format"], fmt.reads, *bounds):
        if isinstance(row, Fault):
            yield row
            continue
        try:
            example = to_example(fmt, row[1], str(path), row[0])
        except RowRefused as error:
            yield Fault(str(path), row[0], error.kind, error.reason)
            continue
        if excluded is None or not excluded.leaves_out(example_row(example)):
            yield content_of(example), [text for text in example_texts(example) if text]


def _train(job: dict[str, Any]) -> None:
    """Train the tokenizer of `job` and write its folder. Raise ConfigError when the sources have no text."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=job["vocab_size"],
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in _SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    faults: list[Fault] = []
    texts = _texts(job, faults)
    first = next(texts, None)
    if first is None:
        held_out = f" outside of the held-out fraction of {job['validation']}" if job["validation"] else ""
        reasons = "".join(f" ({fault.file}:{fault.line}: {fault.reason})" for fault in faults)
        raise ConfigError(
            f"the sources have no text to train a tokenizer on{held_out}; add readable documents{reasons}"
        )
    backend.train_from_iterator(chain([first], texts), trainer=trainer)
    _write(Path(job["folder"]), backend)


def _write(folder: Path, backend: Any) -> None:
    """Write the tokenizer's files to `folder`; first the file that marks the folder as written by kumi and
    incomplete."""
    make_folder(folder)
    write_text(folder / tokenizer.ORIGIN, "{}\n")
    special = {"bos_token": EOS, "eos_token": EOS, "pad_token": PAD}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    write_text(folder / "special_tokens_map.json", json.dumps(special, indent=2) + "\n")
    partial = folder / "tokenizer.json.partial"
    remove_file(partial)
    try:
        backend.save(str(partial))
    except Exception as error:  # the library raises plain Exception
        raise OSError(f"{partial}: {error}") from error
    os.replace(partial, folder / "tokenizer.json")


def _exit_after(parent: int) -> None:
    """Exit this process once the process `parent` has ended, because a new run may then write to the same folder."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _main() -> int:
    """Run the job on standard input and return the exit code; a ConfigError's message goes to standard output."""
    job = json.load(sys.stdin)
    threading.Thread(target=_exit_after, args=(job["parent"],), daemon=True).start()
    try:
        _train(job)
    except ConfigError as error:
        sys.stdout.write(str(error))
        return error.exit_code
    except OSError as error:
        sys.stdout.write(f"the tokenizer cannot be trained or written: {error}; free some space or name another folder")
        return ConfigError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main())
