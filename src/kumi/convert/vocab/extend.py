"""A model with a larger vocabulary: tokens into its tokenizer, rows for them into its embeddings and head."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kumi.convert import hf_write
from kumi.convert.card import mark_verified, model_card
from kumi.convert.origin import origin_of
from kumi.convert.publish import located
from kumi.convert.source import Source, open_source
from kumi.convert.vocab import rows
from kumi.convert.vocab.base import Base, load_base
from kumi.convert.vocab.corpus import Corpus, read_corpus, words
from kumi.convert.vocab.edit import extended, write_files
from kumi.convert.vocab.learn import Piece, learn
from kumi.convert.vocab.report import New, facts, reported
from kumi.convert.vocab.wanted import Wanted, check_wanted, read_wanted
from kumi.errors import ConfigError, KumiError, ModelError
from kumi.spec.model import ModelSpec

INITS = ("pieces", "weighted", "mean")


@dataclass(frozen=True)
class Request:
    """What to add: the tokens of files `add` and, as marks, `special`; `learn` more from `data`, on which the tokenizer
    is measured, too. How rows begin: `init`. The table gets a multiple of `multiple` rows."""

    add: Sequence[str] = ()
    special: Sequence[str] = ()
    learn: int = 0
    data: Sequence[str] = ()
    text_key: str = "text"
    init: str = "pieces"
    multiple: int = 1


def extend(base: str | Path, out: str | Path, request: Request, *, verify: bool = False) -> dict[str, Any]:
    """What was done, as data: the model `base` (a folder, a checkpoint of kumi or a hub id) is in the new Hugging Face
    folder `out`, with the tokens that `request` names.

    Old tokens keep their ids and, bit for bit, their rows; every other tensor is copied. Rows that `base` has beyond
    its tokens are used first. With `verify`, the folder is read back and compared. Refusals are ConfigErrors, before
    anything is written.
    """
    _check_request(request)
    target = Path(out)
    hf_write.check_target(target, replace=False)
    source = open_source(located(base, "vocab"))
    tokenizer = load_base(source.tokenizer)
    _check_sizes(source, tokenizer)
    tokens = [
        *(token for file in request.add for token in read_wanted(file, special=False)),
        *(token for file in request.special for token in read_wanted(file, special=True)),
    ]
    check_wanted(tokens, tokenizer)
    corpus = read_corpus(request.data, request.text_key) if request.data else None
    pieces = _learnt(tokenizer, request, corpus, tokens)
    if not pieces and not tokens:
        raise ConfigError(
            f"--learn {request.learn}: nothing in {', '.join(request.data)} occurs twice that is not one "
            f"token already; give more text"
        )
    new = [_new_piece(tokenizer, piece, request.init) for piece in pieces]
    new += [_new_token(tokenizer, token, request.init) for token in tokens]
    place = _place(source.spec, tokenizer, len(new), request.multiple)
    _check_carried(source, place)
    _check_meanings(source.config, place)
    wide = extended(tokenizer, pieces, tokens)
    report = reported(base, target, tokenizer, wide, new, place, corpus, request.init)
    spec = replace(source.spec, vocab_size=place.new)
    report["notes"] = list(source.spec.notes)
    report["files_left_out"] = _write(source, target, spec, (tokenizer, wide, tokens), place, new, report)
    if verify:
        _verify(source, target, place)
    return report


def _check_request(request: Request) -> None:
    if not (request.add or request.special or request.learn):
        raise ConfigError("vocab: nothing to add; name a file with --add or --special, or give --learn N and --data")
    if request.learn and not request.data:
        raise ConfigError(f"--learn {request.learn}: there is nothing to learn from; name texts with --data")
    if request.init not in INITS:
        raise ConfigError(f"--init {request.init}: rows begin as {', '.join(INITS)}")


def _check_sizes(source: Source, tokenizer: Base) -> None:
    if tokenizer.size > source.spec.vocab_size:
        raise ModelError(
            f"{tokenizer.folder}: the tokenizer has {tokenizer.size} entries and the model "
            f"{source.spec.vocab_size} rows; they belong to different models"
        )


def _learnt(tokenizer: Base, request: Request, corpus: Corpus | None, tokens: Sequence[Wanted]) -> list[Piece]:
    if not request.learn or corpus is None:
        return []
    return learn(tokenizer, words(tokenizer, corpus.learn), request.learn, [token.text for token in tokens])


def _new_piece(base: Base, piece: Piece, init: str) -> New:
    return New(piece.text, "learnt", _shares(base, piece.parts, init))


def _new_token(base: Base, token: Wanted, init: str) -> New:
    """The letters of a mark say nothing about it, so that it begins as the mean of all tokens."""
    kind = "special" if token.special else "added"
    return New(token.text, kind, () if token.special else _shares(base, base.pieces(token.text), init))


def _shares(base: Base, parts: Sequence[int], init: str) -> tuple[tuple[int, float], ...]:
    """The share of each of `parts`: equal ones, or by the bytes that it stands for."""
    if init == "mean" or not parts:
        return ()
    weights = [float(_bytes(base, part)) if init == "weighted" else 1.0 for part in parts]
    return tuple((part, weight / sum(weights)) for part, weight in zip(parts, weights))


def _bytes(base: Base, number: int) -> int:
    """How many bytes of text the old token stands for, a blank that SentencePiece draws counting as one."""
    text = str(base.backend.id_to_token(number))
    if re.fullmatch(r"<0x[0-9A-F]{2}>", text):
        return 1
    kinds = json.dumps(base.data.get("decoder"))
    return max(1, len(text) if '"ByteLevel"' in kinds else len(text.replace("▁", " ").encode()))


def _place(spec: ModelSpec, tokenizer: Base, count: int, multiple: int) -> rows.Place:
    needed = max(spec.vocab_size, tokenizer.size + count)
    return rows.Place(tokenizer.size, count, spec.vocab_size, -(-needed // multiple) * multiple)


def _check_carried(source: Source, place: rows.Place) -> None:
    """Nothing, unless a tensor that is only copied has a row for every token, too."""
    for name, span in source.carried.items():
        if place.old in span.shape and place.new != place.old:
            raise ModelError(
                f"{source.folder}: {name!r} {span.shape} is carried along, and has a row for every token, "
                f"as it seems; kumi does not extend it: add at most {place.old - place.first} tokens, for "
                f"which there are rows"
            )


def _check_meanings(config: Mapping[str, Any], place: rows.Place, inside: str = "") -> None:
    """Nothing, unless config.json gives a meaning, such as that of an image, to the id of a new token."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_meanings(value, place, f"{inside}{key}.")
        numbers = value if isinstance(value, list) else [value]
        taken = [one for one in numbers if isinstance(one, int) and place.first <= one < place.first + place.count]
        if re.search(r"_token_(id|index)s?$", key) and taken:
            raise ModelError(
                f"config.json: {inside}{key}={value} is an id that the tokenizer has no token for, and "
                f"that a new one would get; add at most {min(taken) - place.first} tokens"
            )


def _write(
    source: Source,
    target: Path,
    spec: ModelSpec,
    tokenizers: tuple[Base, Base, Sequence[Wanted]],
    place: rows.Place,
    new: Sequence[New],
    report: Mapping[str, Any],
) -> list[str]:
    """Write the folder; the names of the tokenizer's files that were left out."""
    old, wide, tokens = tokenizers
    reader = rows.extended_reader(source, place, [one.shares for one in new])
    origin = replace(origin_of(source.folder), relation="finetune")
    card = model_card(name=target.name, model=spec, facts=facts(report), origin=origin)
    with tempfile.TemporaryDirectory(prefix="kumi-vocab-") as folder:
        names = (*hf_write.TOKENIZER_FILES, "generation_config.json")
        left_out = write_files(old, wide, tokens, Path(folder), names)
        hf_write.write(
            target,
            spec,
            reader,
            base_config=source.config,
            dtype=source.dtypes,
            tokenizer_folder=folder,
            card=card,
            carried=source.carried,
        )
    return left_out


def _verify(source: Source, target: Path, place: rows.Place) -> None:
    wrong = rows.check_rows(source, open_source(target), place)
    if wrong is not None:
        raise KumiError(f"{target}: {wrong!r} differs from {source.folder}; the disk may be failing")
    mark_verified(target, "against the base: every tensor, and the row of every old token, equal bit for bit")
