"""Kinds of rows by their columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import cast

from kumi.data.formats.example import RowKind
from kumi.errors import ConfigError
from kumi.spec.data_source import ROW_KINDS

# Columns with the same meaning: the first that a row has is read.
CHAT = ("messages", "conversations")
LABELS = ("kto_tag", "desirable", "label")
_INSTRUCTION = ("instruction", "input", "system", "history")
_TEMPLATE = ("tools", "chat_template_kwargs")
# All columns that each kind reads. A "prompt" row has all others in `extra`.
COLUMNS: dict[str, tuple[str, ...]] = {
    "chat": (*CHAT, "system", *_TEMPLATE),
    "prompt-completion": ("prompt", "completion", *_TEMPLATE),
    "instruction": (*_INSTRUCTION, "output", *_TEMPLATE),
    "preference": ("prompt", "chosen", "rejected", "conversations", *_INSTRUCTION, "margin", *_TEMPLATE),
    "feedback": ("prompt", "completion", *CHAT, *_INSTRUCTION, "output", *LABELS, *_TEMPLATE),
    "prompt": ("prompt", *_TEMPLATE),
}
# Groups of columns that a kind reads its prompt from, the required ones before the "", the optional ones after it. The
# first group whose required columns are all there counts.
_PROMPTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "preference": (("prompt", ""), ("conversations", ""), ("instruction", "", *_INSTRUCTION)),
    "feedback": (
        ("prompt", "completion", ""),
        ("instruction", "output", "", *_INSTRUCTION),
        ("messages", "", "system"),
        ("conversations", "", "system"),
    ),
}
# What a row of each kind needs, for messages.
_NEEDS = {
    "chat": "messages or conversations",
    "prompt-completion": "prompt and completion",
    "instruction": "instruction and output",
    "preference": "chosen and rejected (and prompt, if they are text)",
    "feedback": "prompt, completion and label",
    "prompt": "prompt",
    "text": "the column that text_key names",
}


@dataclass(frozen=True, slots=True)
class Format:
    """How the rows of a source are read.

    kind: the kind of all rows; rows of another kind are faults.
    columns: kumi's name of a column -> its name in the files, where they differ.
    used, ignored: the columns of the first rows, under their names in the files. Keys of messages that are ignored are
        in it as "messages[].key".
    forced: whether the run file sets the kind, so that rows need only its columns.
    """

    kind: RowKind
    columns: Mapping[str, str] = field(default_factory=dict)
    used: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    forced: bool = False

    @property
    def reads(self) -> tuple[str, ...] | None:
        """The columns to read from a file, under their names there; None for all."""
        if self.kind in ("prompt", "text"):
            return None
        # The columns of all kinds: a row of another kind is recognised by its other columns.
        names = COLUMNS[self.kind] if self.forced else sorted({name for group in COLUMNS.values() for name in group})
        return tuple(self.columns.get(name, name) for name in names)


def kind_of(names: Collection[str], text_key: str = "text") -> RowKind | None:
    """Return the kind of a row whose columns `names` are not null; None if no kind fits. The first that fits counts.

    Replies with a judgement come before replies alone, which a judged reply would look like.
    """
    has = names.__contains__
    chat = has("messages") or has("conversations")
    reply = (has("prompt") and has("completion")) or (has("instruction") and has("output"))
    if has("chosen") and has("rejected"):
        return "preference"
    if ((chat or reply) and (has("kto_tag") or has("desirable"))) or (
        not chat and has("prompt") and has("completion") and has("label")
    ):
        return "feedback"
    if chat:
        return "chat"
    if has("prompt") and has("completion"):
        return "prompt-completion"
    if has("instruction") and has("output"):
        return "instruction"
    if has(text_key):
        # Before a prompt alone: texts that were generated are published with their prompts.
        return "text"
    return "prompt" if has("prompt") else None


def missing_columns(kind: str, names: Collection[str]) -> str:
    """Return the columns that a row of `kind` needs, as words, if `names` lacks them; otherwise ""."""
    has = names.__contains__
    chat = has("messages") or has("conversations")
    prompted = has("prompt") and has("completion")
    instructed = has("instruction") and has("output")
    enough = {
        "chat": chat,
        "prompt-completion": prompted,
        "instruction": instructed,
        "preference": has("chosen") and has("rejected"),
        "feedback": (chat or prompted or instructed) and any(map(has, LABELS)),
        "prompt": has("prompt"),
    }
    return "" if enough.get(kind, True) else _NEEDS[kind]


def rename(columns: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return kumi's name of each column of a file; a column whose name another one takes is left out."""
    inverse = {file_name: name for name, file_name in columns.items()}
    return {name: inverse.get(name, name) for name in names if name in inverse or name not in columns}


def split_columns(kind: str, columns: Mapping[str, str], names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the columns `names` of files that rows of `kind` use, and those that are ignored."""
    names = list(names)
    renamed = rename(columns, names)
    reads = _read_columns(kind, set(renamed.values()))
    is_used = {name: renamed.get(name) in reads or (kind == "prompt" and name in renamed) for name in names}
    return [name for name in names if is_used[name]], [name for name in names if not is_used[name]]


def _read_columns(kind: str, names: Set[str]) -> Set[str]:
    """Return the columns among `names` that `kumi.data.formats.to_example` reads of a row that has all of them."""
    reads = names & set(COLUMNS.get(kind, ()))
    asked = next((group for group in _PROMPTS.get(kind, ()) if set(group[: group.index("")]) <= names), None)
    if asked is not None:
        reads -= {name for group in _PROMPTS[kind] for name in group} - set(asked)
    for group in (CHAT, LABELS):
        present = [name for name in group if name in reads]
        reads -= set(present[1:])
    return reads


def check_columns(path: str, columns: Mapping[str, str] | None) -> None:
    """Raise ConfigError unless all keys of a source's `columns` are columns that some kind reads."""
    known_columns = sorted({name for group in COLUMNS.values() for name in group})
    for name in columns or {}:
        if name not in known_columns:
            raise ConfigError(
                f"data source {path!r}: columns.{name} is no column that kumi reads; the columns are "
                f"{', '.join(known_columns)}, and that of texts is set by text_key"
            )


def no_kind(path: str, names: Iterable[str]) -> ConfigError:
    """Return the error for rows of no kind."""
    present = ", ".join(sorted(names)[:12]) or "none"
    needs = "; ".join(f"{kind}: {_NEEDS[kind]}" for kind in ROW_KINDS if kind in _NEEDS)
    return ConfigError(
        f"data source {path!r}: its columns ({present}) fit no kind of rows ({needs}); name them in columns, such as "
        "{ messages = 'dialog' }, or set text_key"
    )


def as_kind(kind: str) -> RowKind:
    """Return `kind`, a value of a run file that was checked already, with the type RowKind."""
    return cast(RowKind, kind)
