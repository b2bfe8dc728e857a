"""Layouts, kinds and numbers in words: said once for the terminal, the page and the pictures."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from kumi.spec.cluster import ClusterSpec
from kumi.spec.layout import Layout

# What `MemoryEstimate` and `Estimate.time` call a kind, as a reader would. The letter draws a stage in the terminal.
MEMORY = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer states",
    "gathered": "gathered in passing",
    "weights": "cast weights",
    "activations": "activations",
    "head": "logits and loss",
    "buffers": "buffers",
    "reserved": "context, allocator",
}
LETTERS = {
    "params": "P",
    "grads": "G",
    "optimizer": "O",
    "gathered": "u",
    "weights": "w",
    "activations": "A",
    "head": "L",
    "buffers": "b",
    "reserved": "c",
}
TIME = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recomputation",
    "tp": "exposed tp traffic",
    "cp": "exposed cp traffic",
    "ep": "exposed ep traffic",
    "pp": "exposed pp traffic",
    "dp": "exposed dp traffic",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "offload": "exposed offload traffic",
    "host": "waiting for the host",
}
COMPUTE, TRAFFIC = ("forward", "backward"), ("tp", "cp", "ep", "pp", "dp")
# What one writes of every layout; the rest only where it is not the default, which a search over it then finds again.
CORE = ("pp", "dp_replicate", "dp_shard", "tp", "zero", "microbatch", "recompute")
MFU = "attention counted in full, recomputation not"


def time_name(kind: str) -> str:
    """What a kind of time is called."""
    return TIME.get(kind, kind)


def seconds(value: float) -> str:
    """Seconds of a step with three digits: 12.3 s, 310 ms, 0.042 ms."""
    if value == 0:
        return "0 s"
    if abs(value) >= 1:
        return f"{digits(value)} s"
    return f"{digits(1e3 * value)} ms"


def percent(share: float) -> str:
    """A share with two or three digits; what is nearly all is not called all."""
    whole = 0.1 <= abs(share) < 0.99 or share == 0 or share >= 0.9995
    return f"{100 * share:.0f}%" if whole else f"{100 * share:.1f}%"


def times(factor: float) -> str:
    """A factor: 1.3x, 12x."""
    return f"{factor:.0f}x" if factor >= 10 else f"{factor:.2f}x" if factor < 1.1 else f"{factor:.1f}x"


def rate(bytes_per_second: float) -> str:
    """Bytes a second in decimal units, as data sheets give them."""
    return f"{volume(bytes_per_second)}/s"


def volume(count: float) -> str:
    """Bytes that travel, in decimal units like the rates that carry them."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{digits(count / size)} {unit}"
    return f"{count:.0f} B"


def digits(value: float) -> str:
    """`value` with three digits, and no exponent."""
    size = abs(value)
    places = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{value:.{places}f}" if size >= 0.9995 else f"{value:.3f}" if size < 0.1 else f"{value:.3g}"


def capital(text: str) -> str:
    """`text` as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def plural(count: int, noun: str) -> str:
    """`count` and its noun: 1 node, 8 nodes, 2 batches."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def machines(cluster: ClusterSpec) -> str:
    """The devices and how they stand: 64 x H100 (8 nodes of 8)."""
    name = f"{cluster.devices:,} x {cluster.device.name}" if cluster.devices > 1 else cluster.device.name
    if cluster.nodes == 1:
        return name
    sites = f", {cluster.sites} sites" if cluster.sites > 1 else ""
    return f"{name} ({cluster.nodes:,} nodes of {cluster.devices_per_node}{sites})"


def arrangement(layout: Layout) -> str:
    """The degrees in words: TP 8 x PP 4 (1f1b) x ZeRO-1 over 2; "over 2 x CP" where cp divides the states, too."""
    return " x ".join(_degrees(layout)) or "one device"


def _degrees(layout: Layout) -> Iterator[str]:
    if layout.tp > 1:
        yield f"TP {layout.tp}"
    if layout.cp > 1:
        yield f"CP {layout.cp}" + f" ({layout.context})" * (layout.context != "ring")
    if layout.ep > 1:
        yield f"EP {layout.ep}"
    if layout.expert_tp > 1:
        yield f"ETP {layout.expert_tp}"
    if layout.pp > 1:
        stages = f", {layout.stages} stages a rank" if layout.stages > 1 else ""
        yield f"PP {layout.pp} ({layout.schedule}{stages})"
    if layout.zero == 0 and layout.dp > 1:
        yield f"DDP over {layout.dp}"
    elif layout.dp_shard * layout.cp > 1 and layout.zero > 0:
        name = "FSDP (ZeRO-3)" if layout.zero == 3 else f"ZeRO-{layout.zero}"
        copies = f" in {layout.dp_replicate} copies" if layout.dp_replicate > 1 else ""
        yield f"{name} over {_shards(layout)}{copies}"


def _shards(layout: Layout) -> str:
    """What states are divided over: context-parallel ranks have the same, and divide them, too."""
    if layout.cp == 1:
        return f"{layout.dp_shard}"
    return f"{layout.dp_shard} x CP" if layout.dp_shard > 1 else "CP"


def details(layout: Layout) -> str:
    """What the degrees do not say: microbatch, recomputation, offload."""
    parts = [f"microbatch {layout.microbatch}"]
    if layout.recompute != "none":
        some = "" if layout.recompute_layers is None else f" in {plural(layout.recompute_layers, 'layer')} a rank"
        parts.append(f"{layout.recompute} recompute{some}")
    if layout.stage_layers:
        runs = [f"{len(list(run))} x {size}" for size, run in groupby(layout.stage_layers)]
        parts.append(f"stages of {' + '.join(runs)} layers")
    if layout.offload != "none":
        parts.append(f"{layout.offload} offloaded")
    return ", ".join(parts)


def holder(layout: Layout) -> str:
    """Whose memory is spoken of: ranks differ where there is a pipeline."""
    return "the fullest rank" if layout.pp > 1 else "a device"


def layout_words(layout: Layout) -> str:
    """The whole layout in one line."""
    return f"{arrangement(layout)}, {details(layout)}"


def layout_toml(layout: Layout) -> str:
    """The `[layout]` section that pins `layout`, without what is at its default and follows from the rest."""
    default = Layout()
    fields = {name: getattr(layout, name) for name in Layout.__dataclass_fields__}
    kept = {name: value for name, value in fields.items() if name in CORE or value != getattr(default, name)}
    if layout.pp > 1:
        kept["schedule"] = layout.schedule
    return "\n".join(["[layout]", *(f"{name} = {_toml(value)}" for name, value in kept.items() if value is not None)])


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
