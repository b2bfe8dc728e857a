"""What became of a vocabulary: as data, in a model card, and for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kumi.convert.vocab.base import Base
from kumi.convert.vocab.corpus import Corpus, fertility
from kumi.convert.vocab.rows import Place

# New tokens that a terminal shows.
_SHOWN = 8


@dataclass(frozen=True)
class New:
    """A new token: its spelling in the vocabulary, what it is, and the old rows (id, share) that its row is the sum of,
    none where it is the mean of all."""

    text: str
    kind: str
    shares: tuple[tuple[int, float], ...]


def reported(
    base: str | Path,
    out: Path,
    old: Base,
    wide: Base,
    new: Sequence[New],
    place: Place,
    corpus: Corpus | None,
    init: str,
) -> dict[str, Any]:
    """What is done, as data: sizes, rows, every new token, and fertility where there is a corpus."""
    end = place.first + place.count
    found: dict[str, Any] = {
        "base": str(base),
        "out": str(out),
        "tokens": {"before": old.size, "after": wide.size},
        "vocab_size": {"before": place.old, "after": place.new},
        "rows": {
            "in_place_of_padding": min(end, place.old) - place.first,
            "appended": max(0, end - place.old),
            "padding": place.new - end,
        },
        "init": init,
        "added": [_entry(old, wide, number, one) for number, one in enumerate(new, place.first)],
    }
    if corpus is not None:
        before, after = (fertility(one.backend, corpus.measure) for one in (old, wide))
        found["fertility"] = {"documents": len(corpus.measure), "before": before, "after": after}
        found["records_left_out"] = corpus.faults
    return found


def _entry(old: Base, wide: Base, number: int, one: New) -> dict[str, Any]:
    spelled = [old.backend.id_to_token(part) for part, _ in one.shares]
    text = wide.backend.decode([number], skip_special_tokens=False)
    return {
        "id": number,
        "token": one.text,
        "text": text,
        "kind": one.kind,
        "made_of": spelled,
        "shares": [round(share, 6) for _, share in one.shares],
    }


def facts(report: Mapping[str, Any]) -> dict[str, str]:
    """What the model card says of it."""
    kinds = [entry["kind"] for entry in report["added"]]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("learnt", "added", "special") if kind in kinds)
    found = {
        "made by": f"kumi vocab extend; new rows are untrained ({report['init']})",
        "vocabulary": f"{report['tokens']['before']} tokens and {len(kinds)} new ones: {counts}",
    }
    if "fertility" in report:
        before, after = (report["fertility"][key]["bytes_per_token"] for key in ("before", "after"))
        found["bytes a token"] = (
            f"{before:.2f} before, {after:.2f} after, on {report['fertility']['documents']} documents"
        )
    return found


def lines(report: Mapping[str, Any]) -> list[str]:
    """A few lines on what `extend` did."""
    tokens, size, rows = report["tokens"], report["vocab_size"], report["rows"]
    found = [
        f"tokens     {tokens['before']:,} -> {tokens['after']:,}; vocab_size {size['before']:,} -> {size['after']:,}",
        f"rows       {rows['in_place_of_padding']:,} in place of padding, {rows['appended']:,} appended, "
        f"{rows['padding']:,} of padding",
    ]
    for entry in report["added"][:_SHOWN]:
        made = " + ".join(map(repr, entry["made_of"])) or "mean of all tokens"
        found.append(f"{entry['kind']:10} {entry['id']} {entry['text']!r} from {made}")
    if len(report["added"]) > _SHOWN:
        found.append(f"           and {len(report['added']) - _SHOWN:,} more; --json lists them")
    if "fertility" in report:
        before, after = report["fertility"]["before"], report["fertility"]["after"]
        found.append(
            f"fertility  {before['tokens_per_word']:.3f} -> {after['tokens_per_word']:.3f} tokens a word, "
            f"{before['bytes_per_token']:.3f} -> {after['bytes_per_token']:.3f} bytes a token, on "
            f"{report['fertility']['documents']:,} documents"
        )
    if report.get("records_left_out"):
        found.append(f"data       {report['records_left_out']:,} records could not be read")
    if report["files_left_out"]:
        found.append(f"left out   {', '.join(report['files_left_out'])}: the old vocabulary in another format")
    found += [f"note       {note}" for note in report["notes"]]
    return [*found, f"wrote      {report['out']}"]
