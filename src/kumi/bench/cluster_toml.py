"""Write a cluster file: a node with its device and links as TOML, which the key `cluster.source` of a run can name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kumi.config.cluster_file import NodeFile
from kumi.errors import RefusedError
from kumi.units import write_bandwidth, write_bytes, write_duration, write_flops

# Key of a quantity -> the function that writes it with its unit.
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
    """Return `node` as TOML that `read_node` reads back, with `remarks` as comments at the top."""
    import tomli_w

    written = _texts(node.model_dump(mode="json", exclude_none=True, exclude_defaults=True))
    return "".join(f"# {line}\n" if line else "#\n" for line in remarks) + tomli_w.dumps(written)


def _texts(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return `table` with every quantity as text with its unit."""
    texts: dict[str, Any] = {}
    for key, value in table.items():
        if key == "sources":
            texts[key] = value
        elif key == "peak_flops":
            texts[key] = {dtype: write_flops(flops) for dtype, flops in value.items()}
        elif key in _WRITE:
            texts[key] = _WRITE[key](value)
        elif isinstance(value, dict):
            texts[key] = _texts(value)
        elif key == "links":
            texts[key] = [_texts(link) for link in value]
        else:
            texts[key] = value
    return texts


def refuse_existing(out: Path, flag: str) -> None:
    """Raise RefusedError unless `out` is a new file with a name that ends in .toml, in an existing folder."""
    if out.suffix != ".toml":
        raise RefusedError(
            f"{flag} {out}: cluster.source takes files whose names end in .toml; name a new file such as {out}.toml"
        )
    if out.exists():
        raise RefusedError(f"{flag} {out}: the file exists and is not overwritten; name a new file, or remove this one")
    if not out.absolute().parent.is_dir():
        raise RefusedError(f"{flag} {out}: the folder {out.parent} does not exist; create it, or name another file")


def write_new(out: Path, text: str, flag: str) -> None:
    """Write `text` to the new file `out`. Raise RefusedError if another process has created it."""
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        refuse_existing(out, flag)


def round_to_four_digits(value: float) -> float:
    """Round `value` to four significant digits, because measurements are no more precise."""
    return float(f"{value:.4g}")
