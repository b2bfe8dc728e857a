"""Published runs, read from CSV: one `Run` a row, blank cells None.

Three headers are understood: that of tests/published/runs.csv (and failures.csv), that of torchtitan.csv and that of
megatron.csv; the latter two are put into the columns of the first.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planner_readings import stated_tool

NEEDED = ("id", "source", "model_name", "gpu", "gpus", "tp", "pp", "seq_len")
GIB = 2**30
# nvidia-smi prints MiB: "80GB" of an A100 are 80 thousand of its 81,920, for 80 GiB are more than programs get.
SMI_GB = 1000 * 2**20


@dataclass(frozen=True)
class Run:
    """One published run, in base units: bytes, seconds, FLOP/s, parameters; None where the source does not say.

    `source` is the set it belongs to, `text` all that its source and notes say, in lower case. `reading` is the
    tool that the notes say memory was read with (`planner_readings.TOOLS`), "" where they do not.
    """

    id: str
    source: str
    text: str
    model: str
    gpu: str
    params: float | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    seq_len: int | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    intra: str = ""
    inter: str = ""
    tp: int | None = None
    sp: bool | None = None
    pp: int | None = None
    vpp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    sharding: str = ""
    micro_batch: int | None = None
    global_batch: int | None = None
    recompute: str = ""
    precision: str = ""
    flash: bool | None = None
    seconds: float | None = None
    flops_per_gpu: float | None = None
    tokens_per_s_per_gpu: float | None = None
    memory: float | None = None
    reading: str = ""


def read(path: str | Path) -> list[Run]:
    """The runs of a CSV file. Raises ValueError, naming file and line, where it cannot be understood."""
    with open(path, newline="", encoding="utf-8") as stream:
        table = csv.DictReader(stream)
        header = table.fieldnames or []
        convert = _torchtitan if "row_id" in header else _megatron if "mbs" in header else dict
        missing = [] if convert is not dict else [name for name in NEEDED if name not in header]
        if missing:
            raise ValueError(f"{path}: no column {', '.join(missing)}; see tests/published/README.md for the format")
        return list(_runs(path, table, convert))


def _runs(path, table, convert) -> Iterator[Run]:
    for line, cells in enumerate(table, start=2):
        if None in cells or None in cells.values():
            raise ValueError(f"{path}:{line}: has not as many cells as the header; correct the line")
        try:
            yield run_of(convert(cells))
        except ValueError as error:
            raise ValueError(f"{path}:{line}: {error}") from None


def run_of(cells: dict[str, str]) -> Run:
    """A run from the cells of a row in the columns of runs.csv."""
    get = {name: (value or "").strip() for name, value in cells.items()}.get
    text = f"{get('source', '')} {get('model_name', '')} {get('notes', '')}".lower()
    reading = stated_tool(text, get("peak_mem_gb", ""))
    names = (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "ffn",
        "vocab",
        "seq_len",
        "gpus",
        "gpus_per_node",
        "tp",
        "pp",
        "vpp",
        "dp",
        "cp",
        "ep",
        "micro_batch",
        "global_batch",
    )
    return Run(
        id=get("id", ""),
        source=source_of(get("id", ""), get("source", "")),
        text=text,
        model=get("model_name", ""),
        gpu=get("gpu", ""),
        params=scaled("params_B", get("params_B", ""), 1e9),
        **{name: whole(name, get(name, "")) for name in names},
        intra=get("intra_node_bw", ""),
        inter=get("inter_node_bw", ""),
        sp=truth(get("sp", "")),
        sharding=get("zero_stage_or_fsdp", ""),
        recompute=get("recompute", "").lower(),
        precision=get("precision", "").lower(),
        flash=truth(get("flash_attention", "")),
        seconds=scaled("step_time_s", get("step_time_s", ""), 1.0),
        flops_per_gpu=scaled("tflops_per_gpu", get("tflops_per_gpu", ""), 1e12),
        tokens_per_s_per_gpu=scaled("tokens_per_s_per_gpu", get("tokens_per_s_per_gpu", ""), 1.0),
        memory=scaled("peak_mem_gb", get("peak_mem_gb", ""), SMI_GB if reading == "nvidia-smi" else GIB),
        reading=reading,
    )


def source_of(identity: str, source: str) -> str:
    """The set a run belongs to: its id without the number at the end, else the text of its source."""
    name = re.sub(r"[-_]?\d+$", "", identity)
    return name or source or "unnamed"


def scaled(name: str, cell: str, unit: float) -> float | None:
    """The number in `cell` times `unit`; None for a blank cell. Raises ValueError for what is no number above zero."""
    if not cell:
        return None
    try:
        value = float(cell.replace(",", ""))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: {cell!r} is no number above zero; correct the cell")
    return value * unit


def whole(name: str, cell: str) -> int | None:
    """The whole number in `cell`; None for a blank cell. Raises ValueError for one that is not whole."""
    value = scaled(name, cell, 1.0)
    if value is not None and value != int(value):
        raise ValueError(f"{name}: {cell!r} is no whole number; correct the cell")
    return None if value is None else int(value)


def truth(cell: str) -> bool | None:
    """Whether `cell` says yes; None for a blank cell."""
    return cell.lower() in ("y", "yes", "true", "1") if cell else None


def _torchtitan(cells: dict[str, str]) -> dict[str, str]:
    """A row of torchtitan.csv in the columns of runs.csv. With a pipeline, the local batch is cut further."""
    same = {
        name: cells[name]
        for name in ("gpu", "seq_len", "tp", "cp", "pp", "ep", "precision", "tokens_per_s_per_gpu", "source")
    }
    compiled = {"no": "torch.compile=n", "yes": "torch.compile"}.get(cells["compile"], "")
    pipeline = cells["pp"] not in ("", "1")
    default = re.search(r"default LBS (\d+)", cells["notes"])
    local = cells["local_batch"] or (default.group(1) if default else "")
    notes = [cells["notes"], compiled, f"async_tp={cells['async_tp']}", cells["pp_schedule"]]
    notes += [f"local batch {local}" if pipeline else "", f"torchtitan of {cells['date']}"]
    degrees = [int(cells[name] or 1) for name in ("dp_replicate", "fsdp")]
    return same | {
        "id": f"torchtitan-{cells['row_id']}",
        "model_name": cells["model"],
        "params_B": cells["params_b"],
        "gpus": cells["num_gpus"],
        "dp": str(degrees[0] * degrees[1]) if cells["fsdp"] else "",
        "zero_stage_or_fsdp": f"HSDP={degrees[1]}" if degrees[0] > 1 else "FSDP2 (ZeRO-3)",
        "micro_batch": "" if pipeline else local,
        "global_batch": cells["global_batch_seqs"],
        "recompute": cells["ac"].split("-")[0],
        "flash_attention": "y",
        "peak_mem_gb": cells["peak_mem_gib"],
        "notes": "; ".join(note for note in notes if note),
    }


def _megatron(cells: dict[str, str]) -> dict[str, str]:
    """A row of megatron.csv in the columns of runs.csv."""
    same = {
        name: cells[name]
        for name in (
            "gpu",
            "gpus",
            "seq_len",
            "tp",
            "pp",
            "vpp",
            "cp",
            "ep",
            "dp",
            "precision",
            "step_time_s",
            "peak_mem_gb",
            "hidden",
            "layers",
            "heads",
        )
    }
    recompute = cells["recompute"].split("(")[0].strip()
    return same | {
        "id": f"{cells['set']}-0",
        "source": cells["source"],
        "model_name": cells["model"],
        "params_B": cells["params_b"],
        "sp": cells["sequence_parallel"],
        "micro_batch": cells["mbs"],
        "global_batch": cells["gbs"],
        "recompute": recompute if recompute in ("none", "full", "selective") else "",
        "zero_stage_or_fsdp": "FSDP" if cells["fsdp"] not in ("", "0") else "",
        "tokens_per_s_per_gpu": cells["tokens_s_gpu"],
        "tflops_per_gpu": cells["tflops_gpu"],
        "notes": f"{cells['release']}; {cells['note']}; {cells['derived']}",
    }
