"""Names of layouts and of kinds of memory and time, and formats of numbers, for the terminal, page and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from kumi.plan.uncertainty.intervals import Interval
from kumi.spec.cluster import ClusterSpec
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import num_params
from kumi.units import format_count

# Display names of the fields of `MemoryEstimate`, and the letters that draw them in the terminal's stage bars.
MEMORY = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer states",
    "gathered": "unsharded buffers",
    "weights": "weights in compute dtype",
    "activations": "activations",
    "head": "logits and loss",
    "buffers": "buffers",
    "reference": "reference model",
    "critic": "states of the critic",
    "cache": "cache of replies",
    "reward_models": "reward models",
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
    "reference": "R",
    "critic": "C",
    "cache": "k",
    "reward_models": "r",
    "reserved": "c",
}
# Display names of the kinds of `Estimate.time`.
TIME = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recomputation",
    "tp": "exposed tp communication",
    "cp": "exposed cp communication",
    "ep": "exposed ep communication",
    "pp": "exposed pp communication",
    "dp": "exposed dp communication",
    "bubble": "pipeline bubble",
    "passes": "forward passes of the loss",
    "rollout": "generation of replies",
    "scoring": "scores by reward models",
    "critic": "critic",
    "optimizer": "optimizer",
    "offload": "exposed offload transfers",
    "host": "waiting for kernel launches",
}
# Display names of the regimes of `Uncertainty.regime`.
REGIMES = {
    "": "models of all kinds",
    "dense": "dense models",
    "experts": "models with experts",
    "communication-bound": "communication-bound runs",
}
# Kinds of time: of computation, and of exposed communication by axis.
COMPUTE, TRAFFIC = ("forward", "backward"), ("tp", "cp", "ep", "pp", "dp")
# Fields that `layout_toml` always writes. It leaves out other fields where they have the values that a layout
# has by default.
CORE = ("pp", "dp_replicate", "dp_shard", "tp", "zero", "microbatch", "recompute")
TWICE_THE_TOKENS = "twice the tokens per step"
NO_LINKS = "the cluster describes no links, so communication is estimated as free"
NOT_COUNTED = "recomputation not counted"


def counted_flops(job: Job) -> str:
    """Return in words which FLOPs MFU counts."""
    if job.attention_len == job.batch.seq_len:
        return f"full attention counted, {NOT_COUNTED}"
    return f"attention counted within documents, over {job.attention_len:,.0f} tokens on average, {NOT_COUNTED}"


def assumed_documents(job: Job) -> str:
    """Return the note that attention is estimated over whole rows because the documents are not known, or ""."""
    if job.engine.whole_rows or job.batch.document_span is not None:
        return ""
    return (
        "assumed: every row is one document; with shorter ones, which training keeps apart, attention takes less time "
        "(set batch.mean_document_tokens, or prepare the data)"
    )


def time_name(kind: str) -> str:
    """Return the display name of a kind of time."""
    return TIME.get(kind, kind)


def seconds(value: float) -> str:
    """Format seconds with three digits: 12.3 s, 310 ms, 0.042 ms."""
    if value == 0:
        return "0 s"
    if abs(value) >= 1:
        return f"{digits(value)} s"
    return f"{digits(1e3 * value)} ms"


def percent(share: float) -> str:
    """Format a share with two or three digits; shares just below 1 are not rounded to 100%."""
    integer = 0.1 <= abs(share) < 0.99 or share == 0 or share >= 0.9995
    return f"{100 * share:.0f}%" if integer else f"{100 * share:.1f}%"


def times(factor: float) -> str:
    """Format a factor: 1.3x, 12x."""
    return f"{factor:.0f}x" if factor >= 10 else f"{factor:.2f}x" if factor < 1.1 else f"{factor:.1f}x"


def rate(bytes_per_second: float) -> str:
    """Format bytes per second in decimal units, as data sheets do."""
    return f"{volume(bytes_per_second)}/s"


def volume(count: float) -> str:
    """Format bytes sent, in decimal units as in `rate`."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{digits(count / size)} {unit}"
    return f"{count:.0f} B"


def digits(value: float) -> str:
    """Format `value` with three digits and no exponent."""
    size = abs(value)
    places = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{value:.{places}f}" if size >= 0.9995 else f"{value:.3f}" if size < 0.1 else f"{value:.3g}"


def capital(text: str) -> str:
    """Return `text` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def plural(count: int, noun: str) -> str:
    """Return `count` and its noun: 1 node, 8 nodes, 2 batches."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def machines(cluster: ClusterSpec) -> str:
    """Return the devices and their nodes: 64 x H100 (8 nodes of 8)."""
    name = f"{cluster.devices:,} x {cluster.device.name}" if cluster.devices > 1 else cluster.device.name
    if cluster.nodes == 1:
        return name
    sites = f", {cluster.sites} sites" if cluster.sites > 1 else ""
    return f"{name} ({cluster.nodes:,} nodes of {cluster.devices_per_node}{sites})"


def arrangement(layout: Layout) -> str:
    """Return the degrees: TP 8 x PP 4 (1f1b) x ZeRO-1 over 2. If ZeRO also shards over cp, it is "over 2 x CP"."""
    return " x ".join(_degrees(layout)) or "one device"


def _degrees(layout: Layout) -> Iterator[str]:
    """Yield the parts of `arrangement`: one for each axis in use."""
    if layout.tp > 1:
        yield f"TP {layout.tp}"
    if layout.cp > 1:
        yield f"CP {layout.cp}" + f" ({layout.context})" * (layout.context != "ring")
    if layout.ep > 1:
        yield f"EP {layout.ep}"
    if layout.expert_tp > 1:
        yield f"ETP {layout.expert_tp}"
    if layout.pp > 1:
        stages = f", {layout.stages} stages per rank" if layout.stages > 1 else ""
        yield f"PP {layout.pp} ({layout.schedule}{stages})"
    if layout.zero == 0 and layout.dp > 1:
        yield f"DDP over {layout.dp}"
    elif layout.dp_shard * layout.cp > 1 and layout.zero > 0:
        name = "FSDP (ZeRO-3)" if layout.zero == 3 else f"ZeRO-{layout.zero}"
        replicas = f", {layout.dp_replicate} replicas" if layout.dp_replicate > 1 else ""
        yield f"{name} over {_shards(layout)}{replicas}"


def _shards(layout: Layout) -> str:
    """Return the ranks over which ZeRO shards: those of dp_shard, and those of cp, which use the same parameters."""
    if layout.cp == 1:
        return f"{layout.dp_shard}"
    return f"{layout.dp_shard} x CP" if layout.dp_shard > 1 else "CP"


def details(layout: Layout) -> str:
    """Return the choices besides the degrees: microbatch, recomputation, uneven stages, offload."""
    parts = [f"microbatch {layout.microbatch}"]
    if layout.recompute != "none":
        layers = "" if layout.recompute_layers is None else f" in {plural(layout.recompute_layers, 'layer')} per rank"
        parts.append(f"{layout.recompute} recompute{layers}")
    if layout.stage_layers:
        runs = [f"{len(list(run))} x {size}" for size, run in groupby(layout.stage_layers)]
        parts.append(f"stages of {' + '.join(runs)} layers")
    if layout.offload != "none":
        parts.append(f"{layout.offload} offloaded")
    return ", ".join(parts)


def holder(layout: Layout) -> str:
    """Return the words for the ranks that have the peak memory: with a pipeline, ranks need different amounts."""
    return "the fullest rank" if layout.pp > 1 else "each device"


def layout_words(layout: Layout) -> str:
    """Return the layout in one line."""
    return f"{arrangement(layout)}, {details(layout)}"


def layout_toml(layout: Layout) -> str:
    """Return the `[layout]` section that pins `layout`; fields outside `CORE` are left out at their defaults."""
    default = Layout()
    fields = {name: getattr(layout, name) for name in Layout.__dataclass_fields__}
    written = {name: value for name, value in fields.items() if name in CORE or value != getattr(default, name)}
    if layout.pp > 1:
        written["schedule"] = layout.schedule
    lines = [f"{name} = {_toml(value)}" for name, value in written.items() if value is not None]
    return "\n".join(["[layout]", *lines])


def _toml(value: object) -> str:
    """Return a field's value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


# Uncertainty, names and amounts

# Times that differ by less than this share are not worth a sentence: two runs on one machine differ as much.
SMALL_ERROR = 0.05


def model_title(job: Job) -> str:
    """Return the model's name, or its family if it has none, and its size."""
    return f"{job.model_name or job.model.family}, {format_count(num_params(job.model))} parameters"


def interval(bounds: Interval, text: Callable[[float], str]) -> str:
    """Return both bounds formatted by `text`; a unit that they share is written once."""
    low, high = text(bounds.low), text(bounds.high)
    (first, unit), other = low.rsplit(" ", 1), high.rsplit(" ", 1)[1]
    return f"{first if unit == other else low} to {high}"


def probability(share: float) -> str:
    """Format a probability: 92%, or a bound where rounding would make it certain."""
    return "over 99%" if share > 0.99 else "under 1%" if share < 0.01 else f"{100 * share:.0f}%"


def longer(share: float) -> str:
    """Return a relative difference in time: 3% longer, 5% shorter."""
    return f"{percent(abs(share))} {'longer' if share >= 0 else 'shorter'}"


def ratio(factor: float) -> str:
    """Format a ratio that may be below 1, which `times` would round too far: 0.49x, 1.90x, from 9.95 on 12x."""
    return f"{factor:.2f}x" if factor < 9.95 else f"{factor:.0f}x"


def amount(value: float) -> str:
    """Format an amount with three digits and thousands separators."""
    return f"{value:,.0f}" if value >= 999.5 else digits(value)
