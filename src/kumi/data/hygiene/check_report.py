"""The result of a check of sources as lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def check_lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a result of `check_sources`, with control characters of the data escaped."""
    for line in _lines(result):
        yield "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)


def _lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines with the characters of the data as they are."""
    for source in result["sources"]:
        tokens = source["files_of_tokens"]
        unread = f", {source['faults']:,} that cannot be read or used" if source["faults"] else ""
        yield f"{source['path']}: {source['rows']:,} rows{unread}" + (
            f"; {tokens:,} files of tokens are not compared" if tokens else ""
        )
    for kind in ("exact", "near"):
        if result[kind] is not None:
            yield from _duplicates(kind, result[kind], result["rows"])
    for file in result["against"]:
        short = f" ({file['too_short']:,} are too short to compare)" if file["too_short"] else ""
        shared = f"{file['hits']:,} rows of the data share text with {file['matched']:,} of its {file['rows']:,} rows"
        yield f"{file['file']}: {shared}{short}"
        for example in file["examples"]:
            yield f"  {example['file']}:{example['line']} and line {example['of']['line']}: {example['words']}"
    if result["list"] is not None:
        yield f'{result["listed"]:,} rows listed; data.exclude_rows = "{result["list"]}" leaves them out'


def _duplicates(kind: str, summary: dict[str, Any], rows: int) -> Iterator[str]:
    """Yield the lines about the "exact" or "near" duplicates among all `rows` rows."""
    share = summary["rows"] / max(rows, 1)
    repeated = f"they repeat {summary['of']:,} of the others"
    yield f"{kind} duplicates: {summary['rows']:,} of {rows:,} rows ({share:.1%}); {repeated}"
    for example in summary["examples"]:
        of = example["of"]
        yield f"  {example['file']}:{example['line']} of {of['file']}:{of['line']}"
        for text in dict.fromkeys((example["text"], of["text"])):
            yield f"    {text}"
