"""Extend a model's vocabulary: add tokens to its tokenizer, and their rows to its embeddings and head."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kumi.convert.hf import write_folder
from kumi.convert.hf.card import mark_verified, model_card
from kumi.convert.hf.origin import origin_of
from kumi.convert.hf.publish import model_folder_of
from kumi.convert.open_model import Source, open_source
from kumi.convert.vocab import rows
from kumi.convert.vocab.base_tokenizer import Base, load_base
from kumi.convert.vocab.corpus import Corpus, read_corpus, words
from kumi.convert.vocab.edit import extended_tokenizer, write_files
from kumi.convert.vocab.extension_report import NewRow, card_facts, extension_report
from kumi.convert.vocab.learn import Piece, learn
from kumi.convert.vocab.requested_tokens import NewToken, check_tokens, read_tokens
from kumi.errors import ConfigError, KumiError, ModelError
from kumi.spec.model import ModelSpec

# How the row of a new token is initialized: the mean of the rows of the old tokens that spell the token, their mean
# weighted by bytes, or the mean of all rows.
INITS = ("pieces", "weighted", "mean")


@dataclass(frozen=True)
class Request:
    """The tokens to add, and the initialization of their rows.

    add        files of tokens to add
    special    files of special tokens to add
    learn      number of tokens to learn from `data`
    data       texts to learn from, and to measure the tokenizer on
    text_key   key of the text in a record
    init       initialization of rows, one of `INITS`
    multiple   round the table up to a multiple of this many rows
    """

    add: Sequence[str] = ()
    special: Sequence[str] = ()
    learn: int = 0
    data: Sequence[str] = ()
    text_key: str = "text"
    init: str = "pieces"
    multiple: int = 1


def extend(base: str | Path, out: str | Path, request: Request, *, verify: bool = False) -> dict[str, Any]:
    """Write the model `base` with the tokens of `request` into the new Hugging Face folder `out`.

    Return the result as data. `base` is a folder, a kumi checkpoint or a hub id. Old tokens keep their ids and, bit for
    bit, their rows; all other tensors are copied. Padding rows of `base` are used first. With `verify`, the folder is
    read back and compared.

    Raise ConfigError or ModelError, before anything is written, if the request is not valid or does not fit the model.
    """
    _check_request(request)
    target = Path(out)
    write_folder.check_target(target, replace=False)
    source = open_source(model_folder_of(base, "vocab"))
    tokenizer = load_base(source.tokenizer)
    _check_sizes(source, tokenizer)
    tokens = [
        *(token for file in request.add for token in read_tokens(file, special=False)),
        *(token for file in request.special for token in read_tokens(file, special=True)),
    ]
    check_tokens(tokens, tokenizer)
    corpus = read_corpus(request.data, request.text_key) if request.data else None
    pieces = _learn_pieces(tokenizer, request, corpus, tokens)
    if not pieces and not tokens:
        raise ConfigError(
            f"--learn {request.learn}: {', '.join(request.data)} has no pair of tokens that occurs twice; "
            f"give more text"
        )
    new = [_new_piece(tokenizer, piece, request.init) for piece in pieces]
    new += [_new_token(tokenizer, token, request.init) for token in tokens]
    place = _place(source.spec, tokenizer, len(new), request.multiple)
    _check_passthrough(source, place)
    _check_config_ids(source.config, place)
    extended_base = extended_tokenizer(tokenizer, pieces, tokens)
    report = extension_report(base, target, tokenizer, extended_base, new, place, corpus, request.init)
    spec = replace(source.spec, vocab_size=place.new)
    report["notes"] = list(source.spec.notes)
    report["files_left_out"] = _write(source, target, spec, (tokenizer, extended_base, tokens), place, new, report)
    if verify:
        _verify(source, target, place)
    return report


def _check_request(request: Request) -> None:
    """Raise ConfigError unless the request names tokens and a known initialization."""
    if not (request.add or request.special or request.learn):
        raise ConfigError("vocab: nothing to add; name a file with --add or --special, or give --learn N and --data")
    if request.learn and not request.data:
        raise ConfigError(f"--learn {request.learn}: there are no texts to learn from; name some with --data")
    if request.init not in INITS:
        raise ConfigError(f"--init {request.init}: must be one of {', '.join(INITS)}")


def _check_sizes(source: Source, tokenizer: Base) -> None:
    """Raise ModelError if the tokenizer has more entries than the model has rows."""
    if tokenizer.size > source.spec.vocab_size:
        raise ModelError(
            f"{tokenizer.folder}: the tokenizer has {tokenizer.size} entries, but the model only "
            f"{source.spec.vocab_size} rows; they belong to different models"
        )


def _learn_pieces(tokenizer: Base, request: Request, corpus: Corpus | None, tokens: Sequence[NewToken]) -> list[Piece]:
    """Return the tokens learnt from the corpus; empty unless the request has a number of tokens to learn."""
    if not request.learn or corpus is None:
        return []
    return learn(tokenizer, words(tokenizer, corpus.learn), request.learn, [token.text for token in tokens])


def _new_piece(base: Base, piece: Piece, init: str) -> NewRow:
    """Return the new row of a learnt token."""
    return NewRow(piece.text, "learnt", _shares(base, piece.parts, init))


def _new_token(base: Base, token: NewToken, init: str) -> NewRow:
    """Return the new row of a named token; a special one starts as the mean, since its letters carry no meaning."""
    kind = "special" if token.special else "added"
    return NewRow(token.text, kind, () if token.special else _shares(base, base.token_ids(token.text), init))


def _shares(base: Base, parts: Sequence[int], init: str) -> tuple[tuple[int, float], ...]:
    """Return the weight of each old token in `parts`: equal, or in proportion to the bytes of its text.

    Empty if the row is the mean of all rows.
    """
    if init == "mean" or not parts:
        return ()
    weights = [float(_text_bytes(base, part)) if init == "weighted" else 1.0 for part in parts]
    return tuple((part, weight / sum(weights)) for part, weight in zip(parts, weights))


def _text_bytes(base: Base, token_id: int) -> int:
    """Return the bytes of text of an old token; SentencePiece's blank ▁ counts as one."""
    text = str(base.backend.id_to_token(token_id))
    if re.fullmatch(r"<0x[0-9A-F]{2}>", text):
        return 1
    decoder = json.dumps(base.data.get("decoder"))
    return max(1, len(text) if '"ByteLevel"' in decoder else len(text.replace("▁", " ").encode()))


def _place(spec: ModelSpec, tokenizer: Base, count: int, multiple: int) -> rows.Place:
    """Return the position of `count` new rows, the table rounded up to a multiple of `multiple` rows."""
    needed = max(spec.vocab_size, tokenizer.size + count)
    return rows.Place(tokenizer.size, count, spec.vocab_size, -(-needed // multiple) * multiple)


def _check_passthrough(source: Source, place: rows.Place) -> None:
    """Raise ModelError if the table grows and a passthrough tensor seems to have a row per token, too."""
    for name, span in source.passthrough.items():
        if place.old in span.shape and place.new != place.old:
            raise ModelError(
                f"{source.folder}: kumi copies {name!r} {span.shape} unchanged, although it seems to have a row "
                f"per token; add at most {place.old - place.first} tokens, which fit into the padding rows"
            )


def _check_config_ids(config: Mapping[str, Any], place: rows.Place, prefix: str = "") -> None:
    """Raise ModelError if config.json already uses the id of a new token, such as that of an image token."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_config_ids(value, place, f"{prefix}{key}.")
        ids = value if isinstance(value, list) else [value]
        taken = [
            token_id
            for token_id in ids
            if isinstance(token_id, int) and place.first <= token_id < place.first + place.count
        ]
        if re.search(r"_token_(id|index)s?$", key) and taken:
            raise ModelError(
                f"config.json: {prefix}{key}={value} is an id without a token in the tokenizer, and "
                f"a new token would get it; add at most {min(taken) - place.first} tokens"
            )


def _write(
    source: Source,
    target: Path,
    spec: ModelSpec,
    tokenizers: tuple[Base, Base, Sequence[NewToken]],
    place: rows.Place,
    new: Sequence[NewRow],
    report: Mapping[str, Any],
) -> list[str]:
    """Write the folder; return the names of the tokenizer files left out.

    `tokenizers`: the old tokenizer, the extended one, and the tokens that the user named.
    """
    old, extended_base, tokens = tokenizers
    reader = rows.extended_reader(source, place, [row.shares for row in new])
    origin = replace(origin_of(source.folder), relation="finetune")
    card = model_card(name=target.name, model=spec, facts=card_facts(report), origin=origin)
    with tempfile.TemporaryDirectory(prefix="kumi-vocab-") as folder:
        names = (*write_folder.TOKENIZER_FILES, "generation_config.json")
        left_out = write_files(old, extended_base, tokens, Path(folder), names)
        write_folder.write_hf_folder(
            target,
            spec,
            reader,
            base_config=source.config,
            dtype=source.dtypes,
            tokenizer_folder=folder,
            card=card,
            passthrough=source.passthrough,
        )
    return left_out


def _verify(source: Source, target: Path, place: rows.Place) -> None:
    """Raise KumiError if a tensor or an old row differs; else mark the folder as verified."""
    tensor_name = rows.first_different_tensor(source, open_source(target), place)
    if tensor_name is not None:
        raise KumiError(f"{target}: {tensor_name!r} differs from {source.folder}; the disk may be failing")
    mark_verified(target, "against the base: every tensor, and the row of every old token, equal bit for bit")
