"""Convert between text and base units: bytes, seconds, bytes/s, FLOP/s, counts. kumi's quantities are in base units.

The functions `parse_...` raise ConfigError for a text that they cannot read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from kumi.errors import ConfigError

_BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
# Vendors give the bandwidth of links in bits per second (small b), and the bandwidth of memory in bytes per second.
_BANDWIDTH_UNITS = {f"{unit}/s": Decimal(size) for unit, size in _BYTE_UNITS.items()} | {
    f"{prefix}b/s": Decimal(10**power) / 8 for prefix, power in (("", 0), ("K", 3), ("M", 6), ("G", 9), ("T", 12))
}
_FLOPS_UNITS = {f"{prefix}FLOP/s": 10**power for prefix, power in (("", 0), ("M", 6), ("G", 9), ("T", 12), ("P", 15))}
_COUNT_UNITS = {"": Decimal(1), "K": Decimal(10**3), "M": Decimal(10**6), "B": Decimal(10**9), "T": Decimal(10**12)}
_SHORT_UNITS = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "ns": Decimal("1e-9")}
# From large to small, as the parts of a duration follow each other.
_DURATION_UNITS = {"d": Decimal(86400), "h": Decimal(3600), "m": Decimal(60), **_SHORT_UNITS}
_NUMBER = r"[0-9][0-9_]*(?:\.[0-9]+)?"


def parse_bytes(text: str) -> int:
    """Return the bytes of a text such as "80 GiB" or "200GB"."""
    return int(_parse(text, _BYTE_UNITS, "80 GiB"))


def parse_bandwidth(text: str) -> float:
    """Return the bytes/s of a text such as "3.35 TB/s" or "400 Gb/s", which is 50 GB/s."""
    return float(_parse(text, _BANDWIDTH_UNITS, "400 Gb/s"))


def parse_flops(text: str) -> float:
    """Return the FLOP/s of a text such as "989.4 TFLOP/s"."""
    return float(_parse(text, _FLOPS_UNITS, "312 TFLOP/s"))


def parse_duration(text: str) -> float:
    """Return the seconds of a text such as "24h", "1d12h30m", "1.5 s" or "25 us": parts from large to small units."""
    parts = re.findall(rf"({_NUMBER})\s*([A-Za-z]+)\s*", text)
    indexes = [list(_DURATION_UNITS).index(unit) for _, unit in parts if unit in _DURATION_UNITS]
    is_complete = re.fullmatch(rf"\s*(?:{_NUMBER}\s*[A-Za-z]+\s*)+", text) is not None and len(indexes) == len(parts)
    if not is_complete or indexes != sorted(set(indexes)):
        raise ConfigError(
            f"{text!r} is not a duration; write a number and one of {', '.join(_DURATION_UNITS)}, such as '90m' or "
            f"'25 us', or several from large to small, such as '1d12h'"
        )
    return float(sum(Decimal(number.replace("_", "")) * _DURATION_UNITS[unit] for number, unit in parts))


def parse_count(text: str) -> int:
    """Return the count of a text such as "15T", "1.5B", "2e12" or "1_000_000"."""
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([kKMBT]?)\s*", text)
    if match is None:
        raise ConfigError(f"{text!r} is not a count; write a number, such as '2e12', or '15T' (k, M, B, T)")
    return int(Decimal(match[1].replace("_", "")) * _COUNT_UNITS[match[2].upper()])


def _parse(text: str, units: Mapping[str, int | Decimal], example: str) -> Decimal:
    """Return the number in `text` times its unit, exactly: the inverse of `_write`, to the last digit."""
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z/]+)\s*", text)
    if match is None or match[2] not in units:
        raise ConfigError(
            f"{text!r} is not a quantity; write a number and one of {', '.join(units)}, such as {example!r}"
        )
    return Decimal(match[1].replace("_", "")) * units[match[2]]


def write_bytes(count: int) -> str:
    """Return `count` as text that `parse_bytes` reads back exactly."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if count and count % _BYTE_UNITS[unit] == 0), "B")
    return f"{count // _BYTE_UNITS[unit]} {unit}"


def write_bandwidth(rate: float) -> str:
    """Return `rate` in bytes/s as text that `parse_bandwidth` reads back exactly."""
    return _write(rate, {unit: Decimal(_BYTE_UNITS[unit[:-2]]) for unit in ("TB/s", "GB/s", "MB/s", "B/s")})


def write_flops(rate: float) -> str:
    """Return `rate` in FLOP/s as text that `parse_flops` reads back exactly."""
    return _write(rate, {unit: Decimal(_FLOPS_UNITS[unit]) for unit in ("TFLOP/s", "GFLOP/s", "FLOP/s")})


def write_duration(seconds: float) -> str:
    """Return `seconds` as text that `parse_duration` reads back exactly."""
    return _write(seconds, _SHORT_UNITS)


def _write(value: float, units: Mapping[str, Decimal]) -> str:
    """Return `value` as text with the digits of its repr, in the largest unit that is not larger than `value`.

    `units` are ordered from large to small.
    """
    exact = Decimal(repr(float(value)))
    unit = next((unit for unit, size in units.items() if exact >= size), list(units)[-1])
    return f"{(exact / units[unit]).normalize():f} {unit}"


def format_bytes(count: float) -> str:
    """Return `count` bytes as text with three digits and a binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def format_count(count: float) -> str:
    """Return `count` as text with three digits and k, M, B or T (thousand, million, billion, trillion)."""
    value = float(count)
    for unit in ("", "k", "M", "B", "T"):
        if abs(value) < 999.5 or unit == "T":
            break
        value /= 1000
    return f"{value:.3g}{unit}"


def format_seconds(seconds: float) -> str:
    """Return `seconds` as text: 42s, 3m05s, 1h12m or 2d03h."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"
