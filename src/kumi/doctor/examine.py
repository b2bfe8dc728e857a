"""Examine this machine, or all nodes of a run: make every check of the table, and judge the readings of all nodes.

    workers start (they import torch meanwhile)
    checks of each node alone     -> readings -> the meeting -> findings
    checks of all nodes together  -> readings -> the meeting -> findings, one check after the other

All nodes get all readings and judge them by the same rules, so all have the same findings; node 0 shows them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kumi.doctor.check_table import CHECKS
from kumi.doctor.device_workers import device_workers
from kumi.doctor.finding import Check, Finding, Fleet, Reading, Verdict, judge, parse_reading, take_reading
from kumi.doctor.here import Devices, Here, RunNeeds
from kumi.doctor.meeting import Meeting, PortTakenError, Seat, gather, open_meeting
from kumi.errors import CommunicationError

# Time in which all nodes must have come, if the user gives none.
ARRIVAL_SECONDS = 15.0
# Time in which each node must have sent the readings that it takes alone.
_FACTS_SECONDS = 15.0


@dataclass(frozen=True)
class Examination:
    """The result: one finding per check, in order; the seconds it took; whether this process shows it.

    `hosts`: the host name of each node that came, by number.
    `met`: False if this node has not met the others, so that only its own checks were made.
    """

    findings: tuple[Finding, ...]
    seat: Seat
    hosts: Mapping[int, str]
    seconds: float
    shown_here: bool
    met: bool = True

    @property
    def verdict(self) -> Verdict:
        """The worst verdict: fail, warn or ok."""
        verdicts = {finding.verdict for finding in self.findings}
        return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"


def examine(
    seat: Seat,
    devices: Devices,
    run: RunNeeds | None,
    environ: Mapping[str, str],
    *,
    worker_environ: Mapping[str, str],
    wait: float = ARRIVAL_SECONDS,
    checks: Sequence[Check] = CHECKS,
) -> Examination:
    """Make all `checks`. With several nodes, every node calls this; `wait`: seconds in which all must have come.

    `environ`: variables of this process; `worker_environ`: those of its devices' processes. A node that is missing, or
    that cannot reach node 0, is a finding like any other. Raise OtherNodeFailedError if a node says that it has failed.
    """
    began, met = time.monotonic(), True
    device_numbers = range(devices.first, devices.first + devices.count)
    with device_workers(devices.kind, device_numbers, worker_environ) as workers:
        try:
            with open_meeting(seat) as meeting:
                here = Here(meeting, workers, devices, environ, run)
                findings = _findings(here, checks, began + wait)
                hosts, shown_here = dict(meeting.hosts), seat.node == 0
        except PortTakenError as error:
            met, finding = (
                False,
                _head_finding(str(error), "stop the process that has the port, or choose another port"),
            )
            findings, hosts, shown_here = _alone(Here(Meeting(seat), workers, devices, environ, run), checks, finding)
        except CommunicationError as error:
            remedy = (
                "check that `kumi doctor` runs on node 0 with the same number of nodes, that the head's address is "
                "right, and that no firewall blocks its port"
            )
            met, finding = False, _head_finding(str(error), remedy)
            here = Here(Meeting(seat), workers, devices, environ, run)
            findings, hosts, shown_here = _alone(here, checks, finding)
    return Examination(tuple(findings), seat, hosts, time.monotonic() - began, shown_here, met)


def local_findings(here: Here, checks: Sequence[Check]) -> list[Finding]:
    """Return the findings of the checks that this node makes alone."""
    fleet, node = Fleet("node", {here.meeting.seat.node: ""}), here.meeting.seat.node
    return [judge(check, {node: take_reading(check, here)}, fleet) for check in checks if not check.together]


def _alone(here: Here, checks: Sequence[Check], finding: Finding) -> tuple[list[Finding], dict[int, str], bool]:
    """Return the findings of a node that has not met the others, its host name by node, and True: it shows them itself.

    `finding`: why it has not met them.
    """
    return [finding, *local_findings(here, checks)], dict(here.meeting.hosts), True


def _head_finding(reason: str, remedy: str) -> Finding:
    return Finding("head", reason, "node 0 answers at the head's port", "fail", remedy)


def _findings(here: Here, checks: Sequence[Check], until: float) -> list[Finding]:
    """Return the findings of all nodes that come until the time `until`.

    Raise CommunicationError if this node lost node 0.
    """
    meeting = here.meeting
    alone = [check for check in checks if not check.together]
    facts = {check.name: take_reading(check, here).plain() for check in alone}
    refused = gather(meeting, until)
    all_facts = meeting.exchange("facts", {"readings": facts, "refused": refused}, _FACTS_SECONDS)
    fleet = Fleet(meeting.seat.noun, meeting.hosts)
    readings = {node: values["readings"] for node, values in all_facts.items()}
    findings = [
        _judge_plain(check, {node: plain.get(check.name) for node, plain in readings.items()}, fleet) for check in alone
    ]
    for check in checks:
        if check.together:
            findings.append(_together(check, here, fleet, findings))
    present = _present(meeting, all_facts.get(0, {}).get("refused", []))
    return [*([present] if here.several_nodes else []), *findings]


def _together(check: Check, here: Here, fleet: Fleet, before: Sequence[Finding]) -> Finding:
    """Return the finding of a check that all nodes make at the same time.

    Its verdict is "skip" if a check that it needs has failed.
    """
    failed = [finding.name for finding in before if finding.name in check.needs and finding.verdict == "fail"]
    if failed:
        return Finding(check.name, f"not measured, since {' and '.join(failed)} failed", "", "skip", "")
    reading = take_reading(check, here)
    return _judge_plain(check, here.meeting.exchange(check.name, reading.plain(), check.seconds), fleet)


def _judge_plain(check: Check, values: Mapping[int, object], fleet: Fleet) -> Finding:
    """Return the finding for the readings that the nodes sent, as `Reading.plain` writes them."""
    readings = {
        node: parse_reading(value) if isinstance(value, Mapping) else Reading(absent="another version of kumi")
        for node, value in values.items()
    }
    return judge(check, readings, fleet)


def _present(meeting: Meeting, refused: Sequence[str]) -> Finding:
    """Return the finding about nodes that did not come, or that left."""
    seat = meeting.seat
    fleet, limit = Fleet(seat.noun, meeting.hosts), f"all {seat.nodes} {seat.noun}s"
    missing = [node for node in range(seat.nodes) if node not in meeting.hosts]
    texts = [f"{seat.noun} {node} did not come" for node in missing]
    texts += [f"{fleet.label(node)} left or hung during {topic!r}" for node, topic in meeting.lost.items()]
    texts += list(refused)
    if texts:
        remedy = (
            "look at the output of the named nodes; start `kumi doctor` on all of them within the time of --wait, with "
            "the same head and number of nodes, and check that they can reach the head's port"
        )
        return Finding(f"{seat.noun}s", "; ".join(texts[:6]), limit, "fail", remedy, (*missing, *meeting.lost))
    return Finding(f"{seat.noun}s", ", ".join(sorted(set(meeting.hosts.values()))[:6]), limit, "ok", "")
