"""The examples of a source in numbers, as lines for the terminal."""

from __future__ import annotations

from typing import Any

# Characters of the longest bar.
_BAR = 40


def unit_lines(source: dict[str, Any]) -> list[str]:
    """Return lines on a source of examples: `source` is its entry of `kumi data inspect`, with its "examples"."""
    examples = source["examples"]
    refused = ", ".join(f"{count} {kind}" for kind, count in source["faults"].items()) or "none"
    lines = [
        f"{source['name']}: {source['kind']}, {source['rows']:,} rows, left out: {refused}",
        f"  {source['train_units']:,} examples to train on, {source['validation_units']:,} held out; "
        f"{examples['samples_a_row']:.2f} examples a row; {examples['trained_share']:.1%} of the tokens are trained",
        "  tokens by role: " + ", ".join(f"{count:,} {role}" for role, count in source["roles"].items() if count),
        f"  columns used: {', '.join(source['used']) or 'none'}; ignored: {', '.join(source['ignored']) or 'none'}",
    ]
    if source["special_tokens_in_text"]:
        lines.append(f"  {source['special_tokens_in_text']:,} control tokens spelt in the data were made text")
    if examples["unequal_pairs"]:
        lines.append(f"  {examples['unequal_pairs']:,} pairs have one side at least 4 times as long as the other")
    if (packed := examples["packed"]) is not None:
        left_out = packed["too_long"] + packed["empty"]
        lines.append(
            f"  packed into {packed['rows']:,} rows, {packed['filled']:.1%} filled; {left_out:,} examples left out"
            f" ({packed['too_long']:,} longer than a row)"
        )
    lines += _histogram("tokens", examples["lengths"])
    return lines + _histogram("trained", examples["trained_lengths"])


def _histogram(title: str, ranges: list[dict[str, int]]) -> list[str]:
    """Return a line for each range of lengths, with a bar as long as its share of the largest count."""
    most = max((entry["count"] for entry in ranges), default=0)
    if not most:
        return []
    spans = [f"{entry['from']:,}-{entry['to']:,}" for entry in ranges]
    lines = [f"  {title + ' an example':>20}"]
    for span, count in zip(spans, (entry["count"] for entry in ranges), strict=True):
        bar = "#" * max(round(_BAR * count / most), count > 0)
        lines.append(f"  {span:>20}  {bar} {count:,}")
    return lines
