"""Text and base units: bytes, seconds, counts. Inside kumi every quantity is in base units."""

from __future__ import annotations

import re

from kumi.errors import ConfigError

_BYTE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
               "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Bytes in a text such as "80 GiB" or "200GB"."""
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2] not in _BYTE_UNITS:
        raise ConfigError(
            f"{text!r} is not a quantity; write a number and one of {', '.join(_BYTE_UNITS)}, such as '80 GiB'"
        )
    return int(float(match[1].replace("_", "")) * _BYTE_UNITS[match[2]])


def format_bytes(count: float) -> str:
    """`count` bytes with three digits and a binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def format_count(count: float) -> str:
    """`count` with three digits and k, M, B or T (thousand, million, billion, trillion)."""
    value = float(count)
    for unit in ("", "k", "M", "B", "T"):
        if abs(value) < 999.5 or unit == "T":
            break
        value /= 1000
    return f"{value:.3g}{unit}"


def format_seconds(seconds: float) -> str:
    """`seconds` as 42s, 3m05s, 1h12m or 2d03h."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"
