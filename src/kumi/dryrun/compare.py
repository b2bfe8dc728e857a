"""Compare the measurements of a dry run with the planner's figures for the same rank, as plain data.

The ledger (`kumi.spec.ledger`) is the list of the model's operations, from which the planner counts FLOPs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kumi.dryrun.observed_messages import Message
from kumi.dryrun.program import Measured
from kumi.plan.memory.device_memory import rank_training_memory, usable_memory
from kumi.plan.time.traffic import LISTED_AXES, collectives
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import embedding_ops, head_ops, layer_ops
from kumi.spec.schedule import stage_assignment
from kumi.spec.sharding import stage_bounds

# Kind, axis and bytes of a message.
_Key = tuple[str, str, int]


def compare_rank(job: Job, layout: Layout, rank: int, measured: Measured) -> dict[str, Any]:
    """Return the measurements of `rank` beside the planner's memory and messages and the ledger's FLOPs."""
    pp_rank = layout.coords(rank)["pp"]
    planned = rank_training_memory(job, layout, pp_rank)
    kinds = {kind: size for kind, size in asdict(planned).items() if kind != "reserved"}
    total = sum(kinds.values())
    names = list(dict.fromkeys([*kinds, *measured.memory]))
    ledger = model_flops(job, layout, pp_rank)
    return {
        "rank": rank,
        "coordinates": layout.coords(rank),
        "microbatches": {"step": job.batch.microbatches(layout), "carried_out": measured.microbatches},
        "memory": {
            "kinds": {
                name: {"measured": measured.memory.get(name, 0), "planned": kinds.get(name, 0)} for name in names
            },
            "measured": measured.peak,
            "planned": total,
            "difference": measured.peak / total - 1,
            "reserved": planned.reserved,
            "device": job.cluster.device.memory,
            "usable": usable_memory(job),
            "fits": measured.peak + planned.reserved <= usable_memory(job),
        },
        "flops": {"measured": measured.flops, "model": ledger},
        "collectives": compare_messages(measured, job, layout, pp_rank),
    }


def model_flops(job: Job, layout: Layout, pp_rank: int) -> float:
    """Return one rank's part of the ledger's FLOPs of a step in the stages of `pp_rank`.

    All ranks that have these stages compute the same number. The backward counts as twice the forward, with full
    attention and no recomputation.
    """
    bounds = stage_bounds(layout, job.model.num_hidden_layers)
    stages = stage_assignment(layout.schedule, layout.pp, layout.stages)[pp_rank]
    layers = [index for stage in stages for index in range(*bounds[stage])]
    ops = [op for index in layers for op in layer_ops(job.model, index)]
    ops += embedding_ops(job.model) if 0 in stages else ()
    ops += head_ops(job.model) if len(bounds) - 1 in stages else ()
    tokens = job.batch.tokens_per_step
    return sum(op.train_flops(tokens, job.batch.seq_len) for op in ops) / (layout.dp * layout.cp * layout.tp)


def compare_messages(measured: Measured, job: Job, layout: Layout, pp_rank: int) -> list[dict[str, Any]]:
    """Return the messages of a step by kind, axis and bytes: how many were sent, and how many the planner lists.

    Messages whose sizes differ from the listed ones, such as bucketed gradients, form one row per kind and axis with
    their total bytes.
    """
    listed: dict[_Key, list[Any]] = {}  # key -> [count, degree of the axis, what is sent]
    for item in collectives(job, layout, pp_rank):
        row = listed.setdefault((item.kind, item.axis, round(item.bytes)), [0, item.degree, []])
        row[0] += item.count
        row[2] += [item.what] if item.what not in row[2] else []
    sent = _count_sent(measured.messages, measured.groups, set(listed))
    rows, unmatched = [], dict[tuple[str, str], list[_Key]]()
    for key in dict.fromkeys([*listed, *sent]):
        count, _, what = listed.get(key, (0, 0, []))
        if count and sent.get(key):
            rows.append(_row(key, sent[key], sent[key] * key[2], count, count * key[2], ", ".join(what)))
        else:
            unmatched.setdefault(key[:2], []).append(key)
    for (kind, axis), keys in unmatched.items():
        observed, planned = ({key: counts[key] for key in keys if key in counts} for counts in (sent, _counts(listed)))
        rows.append(
            _row(
                (kind, axis, 0),
                sum(observed.values()),
                _bytes(observed),
                sum(planned.values()),
                _bytes(planned),
                ", ".join(dict.fromkeys(word for key in keys if key in listed for word in listed[key][2])),
            )
        )
    return rows


def _counts(listed: Mapping[_Key, Sequence[Any]]) -> dict[_Key, int]:
    return {key: row[0] for key, row in listed.items()}


def _bytes(counts: Mapping[_Key, int]) -> int:
    return sum(count * key[2] for key, count in counts.items())


def _row(key: _Key, sent: int, sent_bytes: int, listed: int, listed_bytes: int, what: str) -> dict[str, Any]:
    """Return a row of `compare_messages`.

    `agrees` is True if dry run and planner have the same counts and bytes; for a row of various sizes, if their bytes
    differ by less than 1 %.
    """
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


def _count_sent(
    counts: Mapping[Message, int], groups: Mapping[str, tuple[str, ...]], listed: set[_Key]
) -> dict[_Key, int]:
    """Return how often each message was sent.

    Several axes may share a group; a message is then attributed to the axis for which the planner lists it.
    """
    sent: dict[_Key, int] = defaultdict(int)
    for message, count in counts.items():
        axes = [LISTED_AXES.get(name, name) for name in groups.get(message.group, ())] or ["world"]
        keys = [(message.kind, axis, message.bytes) for axis in axes]
        same_axis = [key for key in keys if any(key[:2] == other[:2] for other in listed)]
        sent[next((key for key in keys if key in listed), (same_axis or keys)[0])] += count
    return dict(sent)
