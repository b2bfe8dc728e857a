"""Checks by measuring: the speed of each device, messages between nodes, and an all-reduce over all devices."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from kumi.doctor.device_workers import Reply, first_error
from kumi.doctor.finding import Fleet, Judgement, Reading, Verdict
from kumi.doctor.fleet_rules import shorten
from kumi.doctor.here import Here
from kumi.doctor.network_checks import machine_id
from kumi.report import phrases

# A device that is more than NOTICED below the median speed is a warning, one that is more than SLOW below it a failure.
# While there is such a device, all are measured again, _MEASUREMENTS times at most and _SECONDS each.
NOTICED, SLOW = 0.1, 0.25
_MEASUREMENTS, _SECONDS = 3, 1.0
# The same for the bandwidth between the two nodes of a pair.
NOTICED_PAIR, SLOW_PAIR = 0.25, 0.5
# How much longer than its work a worker may take to answer, and the time in which all must have joined the group.
_LATE_SECONDS = 10.0
_JOIN_SECONDS = 8.0
# Rounds in which each node measures with one other: with at most _ROUNDS + 1 nodes, all pairs are measured.
_ROUNDS = 7
# A CPU's worker that gets the CPU for less than this share of the time competes with other processes.
_BUSY_SHARE = 0.9


def device_speed(here: Here) -> Reading:
    """Return FLOP/s by device. All nodes measure at once, and again while a device is slow; the best of each counts."""
    best: dict[str, float] = {}
    shares: dict[str, float] = {}
    for attempt in range(_MEASUREMENTS):
        here.workers.send("speed", {device: {"seconds": _SECONDS} for device in here.workers.processes})
        if attempt == 0 and here.devices.kind == "cuda":
            _ = here.smi  # nvidia-smi runs while the GPUs compute; errors appear in the checks of GPUs
        replies = here.workers.receive(_SECONDS + _LATE_SECONDS)
        error = first_error(replies)
        for device, reply in replies.items():
            if "rate" in reply and reply["rate"] > best.get(_device_name(here, device), 0.0):
                best[_device_name(here, device)], shares[_device_name(here, device)] = reply["rate"], reply["cpu_share"]
        own = {"rates": best, "failed": bool(error)}
        told = here.meeting.exchange(f"speeds {attempt}", own, seconds=_SECONDS + _LATE_SECONDS + 5.0)
        rates = [rate for node in told.values() for rate in node["rates"].values()]
        # All nodes decide alike: a node that stopped alone would be lost to those that measure again.
        failed = any(node["failed"] for node in told.values())
        if failed or not rates or min(rates) > (1 - NOTICED) * median(rates):
            break
    if error:
        return Reading(best, problems=(error,))
    return Reading({"rates": best, "shares": shares})


def _device_name(here: Here, device: int) -> str:
    """Return the name of a device in sentences; "" if this machine computes on its CPU as one device."""
    return f"GPU {device}" if here.devices.kind == "cuda" else f"rank {device}" if here.devices.per_node > 1 else ""


def speed_near_median(readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
    """No device is more than `SLOW` below the median of all. If a slow one did not always get its CPU, say how much."""
    rates = {(node, name): rate for node, reading in readings.items() for name, rate in reading.value["rates"].items()}
    middle = median(rates.values())
    limit = f"at most {SLOW:.0%} below the median, {_flops(middle)}"
    slow = sorted((rate, *key) for key, rate in rates.items() if rate < (1 - NOTICED) * middle)
    if not slow:
        return Judgement("ok", f"{_flops(min(rates.values()))} to {_flops(max(rates.values()))}", limit)
    listed = []
    for rate, node, name in slow:
        share = readings[node].value["shares"].get(name, 1.0)
        busy = f"; had the CPU for {share:.0%} of the time" if share < _BUSY_SHARE else ""
        text = f"{name + ' ' if name else ''}{_flops(rate)}, {1 - rate / middle:.0%} below the median{busy}"
        listed.append(fleet.about(node, text))
    verdict: Verdict = "fail" if slow[0][0] < (1 - SLOW) * middle else "warn"
    return Judgement(verdict, shorten(listed), limit, tuple(sorted({node for _, node, _ in slow})))


def _flops(rate: float) -> str:
    return f"{phrases.digits(rate / 1e12)} TFLOP/s" if rate >= 1e12 else f"{phrases.digits(rate / 1e9)} GFLOP/s"


def all_reduce_sum(here: Here) -> Reading:
    """Join all devices of all nodes in a process group, and return the bytes/s that each sends in an all-reduce.

    A wrong sum is a problem.
    """
    counts = here.meeting.exchange("number of devices", len(here.workers.processes), seconds=10.0)
    world = sum(counts.values())
    if world == 1:
        return Reading(absent="one device")
    error = _join(here, counts)
    errors = here.meeting.exchange("joined", error, seconds=_JOIN_SECONDS + _LATE_SECONDS)
    if any(errors.values()):
        return Reading(problems=(error,)) if error else Reading(absent="another node could not join")
    replies = here.workers.ask("all_reduce", _LATE_SECONDS)
    here.noted["joined"] = not first_error(replies)
    if error := first_error(replies):
        return Reading(problems=(error,))
    wrong = {device: reply["wrong"] for device, reply in replies.items() if reply["wrong"]}
    if wrong:
        listed = ", ".join(f"{count} on device {device}" for device, count in wrong.items())
        return Reading(problems=(f"elements of the sum are wrong: {listed}",))
    sent = (
        2 * (world - 1) / world * replies[min(replies)]["bytes"] / max(reply["seconds"] for reply in replies.values())
    )
    return Reading({"rate": sent, "world": world})


def _join(here: Here, counts: Mapping[int, int]) -> str:
    """Make a process group of all workers, numbered by node and device. Return the reason if that fails, or ""."""
    node, world = here.meeting.seat.node, sum(counts.values())
    first = sum(count for other, count in counts.items() if other < node)
    host = here.meeting.seat.host or "127.0.0.1"
    devices = sorted(here.workers.processes)
    served: Mapping[int, Reply] = {}
    if node == min(counts):
        served = here.workers.ask_one(devices[0], "serve", {"host": host}, _LATE_SECONDS)
    opened: dict[str, Any] = {"port": served[devices[0]].get("port"), "error": first_error(served)} if served else {}
    answers = here.meeting.exchange("port of the process group", opened, seconds=2 * _LATE_SECONDS)
    answer = answers.get(min(counts)) or {}
    if not answer.get("port"):
        return str(answer.get("error") or "node 0 opened no process group")
    address = {"host": host, "port": answer["port"], "world": world, "seconds": _JOIN_SECONDS}
    each = {device: {**address, "rank": first + place} for place, device in enumerate(devices)}
    return first_error(here.workers.ask("join", _JOIN_SECONDS + _LATE_SECONDS / 2, each))


def right_sum(readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
    """The sums are right: a wrong one is a problem of its node."""
    value = next(iter(readings.values())).value
    return Judgement("ok", f"right on {value['world']} devices, {phrases.rate(value['rate'])} each", "the exact sum")


def pair_bandwidth(here: Here) -> Reading:
    """Return the bytes/s that the first device of this node sends to the first device of other nodes, by node."""
    if not here.several_nodes:
        return Reading(absent="one node")
    meeting = here.meeting
    counts = meeting.exchange("devices of all nodes", len(here.workers.processes), seconds=10.0)
    ready = meeting.exchange("joined the group", bool(here.noted.get("joined")), seconds=10.0)
    if not all(ready.values()) or len(counts) < 2:
        return Reading(absent="the devices have no process group")
    ranks = {node: sum(count for other, count in counts.items() if other < node) for node in counts}
    partners = [other for other in rounds_of(meeting.seat.node, sorted(counts)) if other is not None]
    first = min(here.workers.processes)
    peers = {"peers": [ranks[other] for other in partners]}
    best, machine = dict.fromkeys(map(str, partners), 0.0), machine_id()
    for attempt in range(_MEASUREMENTS):
        reply = here.workers.ask_one(first, "transfers", peers, 1.5 * _LATE_SECONDS)[first]
        best = {
            other: max(best[other], rate) for other, rate in zip(best, reply.get("rates", best.values()), strict=True)
        }
        values = meeting.exchange(
            f"bandwidths {attempt}", {"machine": machine, "rates": best, "error": reply.get("error")}, 2 * _LATE_SECONDS
        )
        rates = _between_machines(values).values()
        failed = any(value["error"] for value in values.values())
        if failed or not rates or min(rates) > (1 - NOTICED_PAIR) * median(rates):
            break
    if "error" in reply:
        return Reading(problems=(str(reply["error"]),))
    return Reading({"machine": machine, "rates": best})


def _between_machines(values: Mapping[int, Mapping[str, Any]]) -> dict[tuple[int, int], float]:
    """Return the rates from node to node, without those between processes of one machine."""
    return {
        (node, int(other)): rate
        for node, value in values.items()
        for other, rate in value["rates"].items()
        if int(other) in values and values[int(other)]["machine"] != value["machine"]
    }


def rounds_of(node: int, nodes: list[int]) -> list[int | None]:
    """Return the partner of `node` in each round of a round-robin tournament; None in a round without one.

    In each round every node has at most one partner. There are at most `_ROUNDS` rounds.
    """
    circle: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    partners = []
    for _ in range(min(len(circle) - 1, _ROUNDS)):
        place = circle.index(node)
        partners.append(circle[len(circle) - 1 - place])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return partners


def pairs_near_median(readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
    """No pair of machines is more than `SLOW_PAIR` below the median of all, in either direction."""
    rates = _between_machines({node: reading.value for node, reading in readings.items()})
    if not rates:
        inside = [rate for reading in readings.values() for rate in reading.value["rates"].values()]
        return Judgement("ok", f"within one machine: {phrases.rate(min(inside))} or more", "")
    middle = median(rates.values())
    limit = f"at most {SLOW_PAIR:.0%} below the median, {phrases.rate(middle)}"
    slow = sorted((rate, *pair) for pair, rate in rates.items() if rate < (1 - NOTICED_PAIR) * middle)
    if not slow:
        low, high = phrases.rate(min(rates.values())), phrases.rate(max(rates.values()))
        return Judgement("ok", f"{len(rates)} directions: {low} to {high}", limit)
    listed = [
        f"{fleet.label(a)} to {fleet.label(b)}: {phrases.rate(rate)}, {1 - rate / middle:.0%} below the median"
        for rate, a, b in slow
    ]
    verdict: Verdict = "fail" if slow[0][0] < (1 - SLOW_PAIR) * middle else "warn"
    common = set.intersection(*({a, b} for _, a, b in slow))
    nodes = common if len(slow) > 2 and common else {node for _, a, b in slow for node in (a, b)}
    return Judgement(verdict, shorten(listed), limit, tuple(sorted(nodes)))
