"""The result of a vocabulary extension: as data, for the model card, and for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kumi.convert.vocab.base_tokenizer import Base
from kumi.convert.vocab.corpus import Corpus, fertility
from kumi.convert.vocab.rows import Place

# New tokens shown on the terminal.
_SHOWN = 8


@dataclass(frozen=True)
class NewRow:
    """A new token and the initialization of its row.

    text     spelling in the vocabulary
    kind     "learnt", "added" or "special"
    shares   old rows (id, weight) that are summed; empty for the mean of all rows
    """

    text: str
    kind: str
    shares: tuple[tuple[int, float], ...]


def extension_report(
    base: str | Path,
    out: Path,
    old: Base,
    extended: Base,
    new: Sequence[NewRow],
    place: Place,
    corpus: Corpus | None,
    init: str,
) -> dict[str, Any]:
    """Return the result as data: sizes, rows, every new token, and fertility if there is a corpus."""
    end = place.first + place.count
    result: dict[str, Any] = {
        "base": str(base),
        "out": str(out),
        "tokens": {"before": old.size, "after": extended.size},
        "vocab_size": {"before": place.old, "after": place.new},
        "rows": {
            "in_place_of_padding": min(end, place.old) - place.first,
            "appended": max(0, end - place.old),
            "padding": place.new - end,
        },
        "init": init,
        "added": [_entry(old, extended, token_id, token) for token_id, token in enumerate(new, place.first)],
    }
    if corpus is not None:
        before, after = (fertility(tokenizer.backend, corpus.measure) for tokenizer in (old, extended))
        result["fertility"] = {"documents": len(corpus.measure), "before": before, "after": after}
        result["records_left_out"] = corpus.faults
    return result


def _entry(old: Base, extended: Base, token_id: int, token: NewRow) -> dict[str, Any]:
    """Return one new token as data."""
    spelled = [old.backend.id_to_token(row) for row, _ in token.shares]
    text = extended.backend.decode([token_id], skip_special_tokens=False)
    return {
        "id": token_id,
        "token": token.text,
        "text": text,
        "kind": token.kind,
        "made_of": spelled,
        "shares": [round(share, 6) for _, share in token.shares],
    }


def card_facts(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of the model card's table."""
    kinds = [entry["kind"] for entry in report["added"]]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("learnt", "added", "special") if kind in kinds)
    result = {
        "made by": f"kumi vocab extend; new rows are untrained ({report['init']})",
        "vocabulary": f"{report['tokens']['before']} tokens and {len(kinds)} new ones: {counts}",
    }
    if "fertility" in report:
        before, after = (report["fertility"][key]["bytes_per_token"] for key in ("before", "after"))
        result["bytes per token"] = (
            f"{before:.2f} before, {after:.2f} after, on {report['fertility']['documents']} documents"
        )
    return result


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the result as lines for the terminal."""
    tokens, size, rows = report["tokens"], report["vocab_size"], report["rows"]
    result = [
        f"tokens     {tokens['before']:,} -> {tokens['after']:,}; vocab_size {size['before']:,} -> {size['after']:,}",
        f"rows       {rows['in_place_of_padding']:,} in place of padding, {rows['appended']:,} appended, "
        f"{rows['padding']:,} of padding",
    ]
    for entry in report["added"][:_SHOWN]:
        source = " + ".join(map(repr, entry["made_of"])) or "mean of all tokens"
        result.append(f"{entry['kind']:10} {entry['id']} {entry['text']!r} from {source}")
    if len(report["added"]) > _SHOWN:
        result.append(f"           and {len(report['added']) - _SHOWN:,} more; --json lists them")
    if "fertility" in report:
        before, after = report["fertility"]["before"], report["fertility"]["after"]
        result.append(
            f"fertility  {before['tokens_per_word']:.3f} -> {after['tokens_per_word']:.3f} tokens per word, "
            f"{before['bytes_per_token']:.3f} -> {after['bytes_per_token']:.3f} bytes per token, on "
            f"{report['fertility']['documents']:,} documents"
        )
    if report.get("records_left_out"):
        result.append(f"data       {report['records_left_out']:,} records are unreadable")
    if report["files_left_out"]:
        result.append(f"left out   {', '.join(report['files_left_out'])}: the old vocabulary in another format")
    result += [f"note       {note}" for note in report["notes"]]
    return [*result, f"wrote      {report['out']}"]
