"""A node with its device and links as the TOML file that `cluster.source` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kumi.config.cluster_file import NodeFile
from kumi.errors import RefusedError
from kumi.units import write_bandwidth, write_bytes, write_duration, write_flops

_WRITE = {
    "memory": write_bytes,
    "reserved": write_bytes,
    "nvme": write_bytes,
    "memory_bandwidth": write_bandwidth,
    "bandwidth": write_bandwidth,
    "device_bandwidth": write_bandwidth,
    "nvme_bandwidth": write_bandwidth,
    "launch": write_duration,
    "latency": write_duration,
}


def node_toml(node: NodeFile, remarks: Sequence[str] = ()) -> str:
    """`node` as TOML that `read_node` reads back, with `remarks` as comments on top."""
    import tomli_w

    written = _texts(node.model_dump(mode="json", exclude_none=True, exclude_defaults=True))
    return "".join(f"# {line}\n" if line else "#\n" for line in remarks) + tomli_w.dumps(written)


def _texts(table: Mapping[str, Any]) -> dict[str, Any]:
    """`table` with every quantity as text with its unit."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key == "sources":
            found[key] = value
        elif key == "peak_flops":
            found[key] = {dtype: write_flops(flops) for dtype, flops in value.items()}
        elif key in _WRITE:
            found[key] = _WRITE[key](value)
        elif isinstance(value, dict):
            found[key] = _texts(value)
        elif key == "links":
            found[key] = [_texts(link) for link in value]
        else:
            found[key] = value
    return found


def refuse_existing(out: Path, flag: str) -> None:
    """Nothing where `out` can be written as a new file; RefusedError where something is there, or no folder for it."""
    if out.suffix != ".toml":
        raise RefusedError(
            f"{flag} {out}: cluster.source takes names that end in .toml; name a new file such as {out}.toml"
        )
    if out.exists():
        raise RefusedError(f"{flag} {out}: exists, and nothing is overwritten; name a new file, or remove that one")
    if not out.absolute().parent.is_dir():
        raise RefusedError(f"{flag} {out}: there is no folder {out.parent}; make it, or name another place")


def write_new(out: Path, text: str, flag: str) -> None:
    """Write `text` to the new file `out`; RefusedError when one has appeared there."""
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        refuse_existing(out, flag)


def digits(value: float) -> float:
    """`value` to four significant digits: more would be noise."""
    return float(f"{value:.4g}")
