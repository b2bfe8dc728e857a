"""One source of a store, the folder of prepared data, and its rows: windows of documents, packed examples or prompts.

A unit is what packing puts into a row as a whole: a sequence of an example, or both sides of a preference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kumi.data import binfile, unit_files
from kumi.data.binfile import Array
from kumi.data.checksums import Checksums
from kumi.data.packing import PackedRows, mean_sequence_span, open_bins, pack_units
from kumi.data.prompt_rows import PromptRows
from kumi.data.row_source import RowSource
from kumi.data.text_windows import TextWindows, mean_document_span
from kumi.data.unit_files import UnitFile
from kumi.errors import ConfigError, RefusedError
from kumi.objectives import LM_ROWS, OBJECTIVES, RowForm

# (name of a source, side) -> the reference model's log-probs of its sequences, and of its mismatched sequences (for
# KTO, see `PackedRows.mismatched_of`) or None.
References = Mapping[tuple[str, str], tuple[Array, Array | None]]


@dataclass(frozen=True)
class StoredSource:
    """The tokens of one source.

    train, validation: prefix of the token files; None when the side has no document.
    kind: "text" for documents; else the kind of the rows, whose units `Store.open_units` opens.
    faults: number of skipped records by kind.
    special_tokens_in_text: special tokens that are spelled out in the text of documents.
    unigram_entropy: entropy of the frequencies of the training tokens, in nats per token.
    train_digest, validation_digest: digest of token ids and document lengths; of units also of all their other files.
    train_checksums, validation_checksums: checksums of the .bin file; None in a store of an earlier version that has
        not been verified yet.
    rows: rows of the files, used and refused. This and all fields below are 0, false or empty for documents.
    train_units, validation_units: units of examples.
    train_trained, validation_trained: trained tokens.
    train_weighted, validation_weighted: whether a token has a weight other than 1.
    roles: tokens by role; "template" for text of the template.
    samples: number of rows by their number of units.
    used, ignored: columns of the files that were read, and the others.
    sidecar_checksums: checksums of the other files of units, by side and suffix.
    """

    name: str
    path: str
    weight: float
    train: Path | None
    validation: Path | None
    train_documents: int
    train_tokens: int
    validation_documents: int
    validation_tokens: int
    faults: dict[str, int]
    special_tokens_in_text: int
    unigram_entropy: float
    train_digest: str
    validation_digest: str
    train_checksums: Checksums | None = None
    validation_checksums: Checksums | None = None
    kind: str = "text"
    rows: int = 0
    train_units: int = 0
    validation_units: int = 0
    train_trained: int = 0
    validation_trained: int = 0
    train_weighted: bool = False
    validation_weighted: bool = False
    roles: Mapping[str, int] = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)
    used: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    sidecar_checksums: Mapping[str, Mapping[str, Checksums]] = field(default_factory=dict)


def open_source_units(source: StoredSource, side: str, vocab_size: int) -> UnitFile:
    """Open the units of `side` ("train" or "validation") of `source`.

    Raise RefusedError when they are damaged, or the side has none.
    """
    prefix: Path | None = getattr(source, side)
    if prefix is None or source.kind == "text":
        raise RefusedError(f"source {source.path!r} has no units of examples to open for {side}")
    checksums = dict(source.sidecar_checksums.get(side, {}))
    return unit_files.open_units(prefix, source.kind, checksums, vocab_size, getattr(source, f"{side}_weighted"))


def open_rows(
    source: StoredSource,
    side: str,
    vocab_size: int,
    seq_len: int,
    seed: int,
    form: RowForm = LM_ROWS,
    *,
    cross_document: bool = False,
    references: References | None = None,
) -> RowSource:
    """Open the rows of `side` of `source`, which has some: windows of documents, packed units of examples, or prompts.

    `references`: the reference model's log-probs, for an objective that compares with it.
    Raise RefusedError for a damaged file, or without the plan that `pack_side` stores; ConfigError if attention would
    cross examples.
    """
    if source.kind == "text":
        checksums = getattr(source, f"{side}_checksums")
        return TextWindows(binfile.open_file(getattr(source, side), checksums, vocab_size), seq_len, cross_document)
    if cross_document:
        raise ConfigError(
            f"data.cross_document: source {source.path!r} has examples ({source.kind}), and attention never crosses "
            "the examples of a row; set data.cross_document=false, or leave the source out"
        )
    units = open_source_units(source, side, vocab_size)
    if source.kind == "prompt":
        return PromptRows(units, seq_len, form)
    bins = open_bins(units, *_plan_inputs(source, side, seq_len, seed), form)
    log_probs = (None, None) if references is None else references[source.name, side]
    return PackedRows(units, bins, seq_len, form, *log_probs)


def check_kind(source: StoredSource, form: RowForm) -> None:
    """Raise ConfigError unless an objective that trains rows of `form` supports the rows and weights of `source`."""
    if source.kind not in form.kinds:
        kinds = [kind for kind, objective in OBJECTIVES.items() if source.kind in objective.rows.kinds]
        remedy = f"set objective.kind to {' or '.join(map(repr, kinds))}, or leave the source out"
        raise ConfigError(
            f"data source {source.path!r}: has rows of kind {source.kind!r}, but the objective trains "
            f"{' and '.join(form.kinds)} rows; {remedy if kinds else 'leave the source out'}"
        )
    if form.sequences and (source.train_weighted or source.validation_weighted):
        raise ConfigError(
            f"data source {source.path!r}: has messages with a weight other than 1, but an objective on {source.kind} "
            "rows gives all trained tokens of a reply the same weight; remove the key `weight` from the messages"
        )


def pack_side(
    source: StoredSource, side: str, vocab_size: int, seq_len: int, seed: int, form: RowForm = LM_ROWS
) -> PackedRows:
    """Return the packed rows of `side` of `source`, a source of examples; store the plan with the units of each row.

    Raise ConfigError if no unit fits a row.
    """
    units = open_source_units(source, side, vocab_size)
    return PackedRows(units, pack_units(units, *_plan_inputs(source, side, seq_len, seed), form), seq_len, form)


def source_span(source: StoredSource, vocab_size: int, seq_len: int, form: RowForm = LM_ROWS) -> float:
    """Return the mean document span of the training rows of `source`; 0 for data of less than two tokens."""
    if source.train is None or source.train_tokens < 2:
        return 0.0
    if source.kind != "text":
        return mean_sequence_span(open_source_units(source, "train", vocab_size), seq_len, form)
    return mean_document_span(binfile.open_file(source.train, source.train_checksums, vocab_size), seq_len)


def _plan_inputs(source: StoredSource, side: str, seq_len: int, seed: int) -> tuple[str, int, int]:
    """Return content, row length and seed of a plan of bins. Held-out rows are the same for every seed."""
    return getattr(source, f"{side}_digest"), seq_len, seed if side == "train" else 0
