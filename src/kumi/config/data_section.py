"""The section [data] of a run file: sources, tokenizer, and how conversations become tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from kumi.config.section import Fraction, NotNegative, Number, Positive, Section, Switch, Text, spec_key
from kumi.spec.data_source import FORMATS, ROW_KINDS, TURNS, ChatOptions, Source

# Types of keys with listed values. The modules that implement the values define the lists.
if TYPE_CHECKING:
    SourceFormat: TypeAlias = str
    RowKind: TypeAlias = str
    Turns: TypeAlias = str
else:
    SourceFormat, RowKind, Turns = Literal[FORMATS], Literal[ROW_KINDS], Literal[TURNS]


class SourceSection(Section):
    """One source of documents or examples."""

    path: Text = spec_key(Source, "path", examples=["data/*.jsonl"])
    weight: Annotated[Number, Field(gt=0)] = spec_key(Source, "weight")
    text_key: str = spec_key(Source, "text_key")
    format: SourceFormat = spec_key(Source, "format")
    exclude: tuple[str, ...] = spec_key(Source, "exclude")
    kind: RowKind = spec_key(Source, "kind")
    columns: dict[Text, Text] | None = spec_key(Source, "columns")
    epochs: Annotated[Number, Field(gt=0)] | None = spec_key(Source, "epochs")
    max: Positive | None = spec_key(Source, "max")
    validation: Text | None = spec_key(Source, "validation")


class ChatSection(Section):
    """How conversations become tokens; text needs none of it."""

    template: Text | None = spec_key(ChatOptions, "template")
    template_kwargs: dict[Text, Any] | None = spec_key(ChatOptions, "template_kwargs")
    date: Annotated[Text, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] = spec_key(ChatOptions, "date")
    turns: Turns = spec_key(ChatOptions, "turns")
    stop_tokens: tuple[Text, ...] = spec_key(ChatOptions, "stop_tokens")
    timeout_s: Annotated[Number, Field(gt=0)] = spec_key(ChatOptions, "timeout_s")
    memory_gib: Annotated[Number, Field(gt=0)] = spec_key(ChatOptions, "memory_gib")
    max_refused: Fraction = spec_key(ChatOptions, "max_refused")


class TrainedTokenizer(Section):
    """A byte-level BPE tokenizer to train on the sources."""

    vocab_size: Annotated[Positive, Field(ge=260)] = Field(
        description="Entries of the vocabulary, special tokens included.", examples=[32_768]
    )


class DataSection(Section):
    """The training data."""

    sources: tuple[SourceSection, ...] = Field(
        min_length=1, description="The sources, mixed by weight.", examples=[[{"path": "data/*.jsonl"}]]
    )
    tokenizer: Text | TrainedTokenizer = Field(
        description="A Hugging Face tokenizer folder or hub id, or { vocab_size = N } to train one on the sources.",
        examples=["Qwen/Qwen3-0.6B"],
    )
    validation: Annotated[Number, Field(ge=0, le=0.5)] = Field(
        0.01, description="Share of documents held out, by a hash of their text, so copies are held out, too."
    )
    on_error: Literal["skip", "fail"] = Field(
        "skip", description="A record that cannot be read is skipped and reported, or stops the run."
    )
    add_bos: Switch = Field(False, description="Begin every document with the bos_token of the tokenizer's files.")
    cross_document: Switch = Field(
        False, description="Let attention and prediction cross the boundaries of documents in a sequence."
    )
    shares: Literal["tokens", "sequences"] = Field(
        "tokens",
        description="The weights of sources are shares of the tokens, or of the sequences: documents or examples.",
    )
    exclude_rows: Text | None = Field(
        None, description="A list of rows to leave out, as `kumi data check --write` makes it."
    )
    chat: ChatSection = ChatSection()
    workers: NotNegative = Field(0, description="Processes that tokenise; 0 means one per core.")
    cache: Text | None = Field(None, description="Folder of tokenised data; by default `data` inside `train.out`.")

    @property
    def holds_out(self) -> bool:
        """Return True if the run may have held-out documents: a share of all, or a source's own."""
        return self.validation > 0 or any(source.validation is not None for source in self.sources)

    @model_validator(mode="after")
    def _check_epochs(self) -> DataSection:
        """Refuse `epochs` of some sources only, and `epochs` beside a weight."""
        epochs = [source.epochs for source in self.sources]
        given = sum(each is not None for each in epochs)
        if 0 < given < len(epochs):
            raise ValueError(
                f"epochs is set for {given} of {len(epochs)} sources, so the shares of the others are not known; set "
                f"it for all sources, or give all of them a weight instead"
            )
        if given:
            for source in self.sources:
                if source.weight != 1.0:
                    raise ValueError(
                        f"source {source.path!r} has epochs={source.epochs:g} and weight={source.weight:g}, which both "
                        f"set its share; give only one of them"
                    )
        return self
