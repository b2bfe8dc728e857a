"""What a dry run measured, beside what the planner says of the same rank, as plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kumi.dryrun.messages import Message
from kumi.dryrun.program import Measured
from kumi.plan.memory import rank_memory, usable
from kumi.plan.traffic import AXES, collectives
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import embedding_ops, head_ops, layer_ops
from kumi.spec.schedule import placement
from kumi.spec.sharding import stage_bounds

# Kind, axis and bytes of a message.
Key = tuple[str, str, int]


def compared(job: Job, layout: Layout, rank: int, found: Measured) -> dict[str, Any]:
    """`found` of `rank` beside the planner's memory, the ledger's FLOPs and the planner's list of messages."""
    pp_rank = layout.coords(rank)["pp"]
    planned = rank_memory(job, layout, pp_rank)
    kinds = {kind: size for kind, size in asdict(planned).items() if kind != "reserved"}
    total = sum(kinds.values())
    names = list(dict.fromkeys([*kinds, *found.memory]))
    ledger = model_flops(job, layout, pp_rank)
    return {
        "rank": rank,
        "coordinates": layout.coords(rank),
        "microbatches": {"step": job.batch.microbatches(layout), "carried_out": found.microbatches},
        "memory": {
            "kinds": {name: {"measured": found.memory.get(name, 0), "planned": kinds.get(name, 0)} for name in names},
            "measured": found.peak,
            "planned": total,
            "difference": found.peak / total - 1,
            "reserved": planned.reserved,
            "device": job.cluster.device.memory,
            "usable": usable(job.cluster.device),
            "fits": found.peak + planned.reserved <= usable(job.cluster.device),
        },
        "flops": {"measured": found.flops, "model": ledger},
        "collectives": messages(found, job, layout, pp_rank),
    }


def model_flops(job: Job, layout: Layout, pp_rank: int) -> float:
    """The ledger's FLOPs of a step in the stages of `pp_rank`, dealt out evenly over the ranks that share them: a
    forward, and a backward of twice its size, attention in full and nothing twice."""
    bounds = stage_bounds(layout, job.model.num_hidden_layers)
    held = placement(layout.schedule, layout.pp, layout.stages)[pp_rank]
    layers = [index for stage in held for index in range(*bounds[stage])]
    ops = [op for index in layers for op in layer_ops(job.model, index)]
    ops += embedding_ops(job.model) if 0 in held else ()
    ops += head_ops(job.model) if len(bounds) - 1 in held else ()
    tokens = job.batch.tokens_per_step
    return sum(op.train_flops(tokens, job.batch.seq_len) for op in ops) / (layout.dp * layout.cp * layout.tp)


def messages(found: Measured, job: Job, layout: Layout, pp_rank: int) -> list[dict[str, Any]]:
    """The messages of a step by kind, axis and bytes, with how many were sent and how many the planner lists.

    What is sent in other sizes than listed, such as gradients in buckets, is one row with the bytes of all.
    """
    listed: dict[Key, list[Any]] = {}
    for one in collectives(job, layout, pp_rank):
        row = listed.setdefault((one.kind, one.axis, round(one.bytes)), [0, one.degree, []])
        row[0] += one.count
        row[2] += [one.what] if one.what not in row[2] else []
    sent = _sent(found.messages, found.groups, set(listed))
    rows, odd = [], dict[tuple[str, str], list[Key]]()
    for key in dict.fromkeys([*listed, *sent]):
        count, _, what = listed.get(key, (0, 0, []))
        if count and sent.get(key):
            rows.append(_row(key, sent[key], sent[key] * key[2], count, count * key[2], ", ".join(what)))
        else:
            odd.setdefault(key[:2], []).append(key)
    for (kind, axis), keys in odd.items():
        ours, theirs = ({key: found[key] for key in keys if key in found} for found in (sent, _counts(listed)))
        rows.append(
            _row(
                (kind, axis, 0),
                sum(ours.values()),
                _bytes(ours),
                sum(theirs.values()),
                _bytes(theirs),
                ", ".join(dict.fromkeys(word for key in keys if key in listed for word in listed[key][2])),
            )
        )
    return rows


def _counts(listed: Mapping[Key, Sequence[Any]]) -> dict[Key, int]:
    return {key: row[0] for key, row in listed.items()}


def _bytes(counts: Mapping[Key, int]) -> int:
    return sum(count * key[2] for key, count in counts.items())


def _row(key: Key, sent: int, sent_bytes: int, listed: int, listed_bytes: int, what: str) -> dict[str, Any]:
    """`agrees`: as often and as much, or, in other portions, as much to a hundredth."""
    same = sent == listed and sent_bytes == listed_bytes
    near = key[2] == 0 and listed_bytes > 0 and abs(sent_bytes / listed_bytes - 1) < 0.01
    return {
        "kind": key[0],
        "axis": key[1],
        "bytes": key[2],
        "sent": sent,
        "listed": listed,
        "sent_bytes": sent_bytes,
        "listed_bytes": listed_bytes,
        "what": what,
        "agrees": same or near,
    }


def _sent(counts: Mapping[Message, int], groups: Mapping[str, tuple[str, ...]], listed: set[Key]) -> dict[Key, int]:
    """How often each message was sent. Several axes may have the same ranks: then it goes to the one that lists it."""
    found: dict[Key, int] = defaultdict(int)
    for message, count in counts.items():
        axes = [AXES.get(name, name) for name in groups.get(message.group, ())] or ["world"]
        keys = [(message.kind, axis, message.bytes) for axis in axes]
        near = [key for key in keys if any(key[:2] == one[:2] for one in listed)]
        found[next((key for key in keys if key in listed), (near or keys)[0])] += count
    return dict(found)
