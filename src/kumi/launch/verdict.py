"""The end of a run on several nodes: one exit code and one root cause, decided from the reports of all agents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import kumi.errors
from kumi.errors import OK, CommunicationError, KumiError
from kumi.launch.failure_causes import PRIMARY, RootCause, rank_timeout_error
from kumi.safe_output import visible

# Most characters of an error's text that nodes send to each other.
_LONGEST_MESSAGE = 4000


@dataclass(frozen=True)
class Report:
    """How the agent of a node ended: with an exit code, and with an error if it failed.

    `severity`: class of the failure (see `kumi.launch.failure_causes`); None if the node did not fail, or only because
    the head ended it. `at`: time of the failure in seconds; on the wire it is the time since then, because clocks
    differ. `kind` and `message`: class name and text of the error. `waiting`: rank that timed out in a collective.
    `silent`: ranks that were killed before they reported anything -> unusual state of their process, or "".
    """

    node: int
    code: int
    severity: int | None = None
    at: float = 0.0
    kind: str = ""
    message: str = ""
    waiting: int | None = None
    silent: Mapping[int, str] = field(default_factory=dict)

    def to_json(self, now: float) -> dict[str, Any]:
        """Return the record of the report that the agent sends at the monotonic time `now`."""
        silent = {str(rank): state for rank, state in self.silent.items()}
        return {**vars(self), "at": now - self.at, "silent": silent}

    @classmethod
    def from_json(cls, record: Mapping[str, Any], node: int, now: float) -> Report:
        """Return the report in the `record` of `node`, which arrived at the monotonic time `now`."""
        values = {name: record[name] for name in ("code", "severity", "kind", "message", "waiting")}
        silent = {int(rank): str(state) for rank, state in record["silent"].items()}
        return cls(node=node, at=now - float(record["at"]), silent=silent, **values)


@dataclass(frozen=True)
class Verdict:
    """What all agents end with. `node`: where the root cause is; None without a failure."""

    code: int
    node: int | None = None
    kind: str = ""
    message: str = ""

    def error(self, node: int) -> KumiError | None:
        """Return the error for the agent of `node` to raise; None if the run ends with an exit code alone."""
        if not self.kind:
            return None
        kind = getattr(kumi.errors, self.kind, KumiError)
        kind = kind if isinstance(kind, type) and issubclass(kind, KumiError) else KumiError
        return kind(self.message if node == self.node else f"node {self.node}: {self.message}")


def failure_report(node: int, error: BaseException, cause: RootCause | None, now: float) -> Report:
    """Return the report of a `node` that failed with `error`. `cause`: why its ranks failed, if they did."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == KumiError.__module__]
    code = error.exit_code if isinstance(error, KumiError) else 1
    kind = kinds[0] if kinds else KumiError.__name__
    message = str(error) if isinstance(error, KumiError) else f"{type(error).__name__}: {error}"
    if cause is None or cause.error is not error:
        return Report(node, code, PRIMARY, now, kind, message)
    return Report(node, code, cause.severity, cause.at, kind, message, cause.waiting, cause.silent)


def failure_message(report: Report, nodes: int) -> dict[str, Any]:
    """Return the message of a node of `nodes` that failed before its agent connected (`kumi.launch.early_failure`)."""
    failed = {"code": report.code, "kind": report.kind, "message": report.message[:_LONGEST_MESSAGE]}
    return {"node": report.node, "nodes": nodes, "failed": failed}


def early_failure(message: Mapping[str, Any], nodes: int, now: float) -> Report | None:
    """Return the report in the `message` that `failure_message` made for a run of `nodes`; None for any other message.

    `now`: the monotonic time at which the message came.
    """
    node, failed = message.get("node"), message.get("failed")
    if type(node) is not int or not 0 <= node < nodes or message.get("nodes") != nodes or not isinstance(failed, dict):
        return None
    code, kind, text = failed.get("code"), failed.get("kind"), failed.get("message")
    if type(code) is not int or not 0 < code < 256 or not isinstance(kind, str) or not isinstance(text, str):
        return None
    return Report(node, code, PRIMARY, now, kind, visible(text[:_LONGEST_MESSAGE]))  # anyone may have sent it


def decide(reports: Iterable[Report]) -> Verdict:
    """Return the verdict on a run from the reports of all its nodes.

    The root cause is the earliest failure of the lowest class. Ranks that timed out waiting for ranks of another node
    blame these ranks. Without a failure, the exit code is the first that is not 0, by node: the ranks agreed on it.
    """
    reports = sorted(reports, key=lambda report: report.node)
    failures = [report for report in reports if report.severity is not None]
    if not failures:
        return Verdict(next((report.code for report in reports if report.code != OK), OK))
    cause = min(failures, key=lambda report: (report.severity, report.at))
    silent = {rank: state for report in reports for rank, state in report.silent.items()}
    if cause.waiting is not None and silent:
        error = rank_timeout_error(silent, waiting=cause.waiting)
        node = next(report.node for report in reports if report.silent)
        return Verdict(CommunicationError.exit_code, node, CommunicationError.__name__, str(error))
    return Verdict(cause.code, cause.node, cause.kind, cause.message)
