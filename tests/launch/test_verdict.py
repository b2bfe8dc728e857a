"""One exit code and one root cause from the reports of all nodes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kumi.errors import CommunicationError, ConfigError, DataError, KumiError, LayoutError
from kumi.launch.failure_causes import RootCause
from kumi.launch.verdict import Report, Verdict, decide, early_failure, failure_message, failure_report


def failed(node, severity, at, code=7, kind="CommunicationError", **more):
    return Report(node, code, severity, at, kind, f"message of {node}", **more)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([Report(0, 0), Report(1, 0)], Verdict(0)),
        ([Report(1, 75), Report(0, 75)], Verdict(75)),
        ([Report(0, 0), Report(1, 75)], Verdict(75)),
        ([Report(2, 143), Report(1, 75), Report(0, 0)], Verdict(75)),
        # A secondary failure comes before its cause is reported; an earlier failure of the same class counts.
        ([failed(0, 2, 1.0), failed(1, 0, 2.0, 2, "LayoutError")], Verdict(2, 1, "LayoutError", "message of 1")),
        ([failed(0, 0, 5.0), failed(1, 0, 4.0)], Verdict(7, 1, "CommunicationError", "message of 1")),
        ([failed(0, 1, 5.0), failed(1, 2, 4.0)], Verdict(7, 0, "CommunicationError", "message of 0")),
        # A second signal ended the ranks of node 1 at once, and those of node 0 lost their connections.
        ([failed(0, 2, 1.0), Report(1, 130, 0, 2.0)], Verdict(130, 1)),
    ],
)
def test_the_verdict(reports, expected):
    assert decide(reports) == expected
    assert decide(reports[::-1]) == expected


def test_ranks_that_time_out_blame_the_silent_ranks_of_another_node():
    verdict = decide([failed(0, 2, 1.0, waiting=1), Report(1, 0, silent={5: "stopped by a signal"})])
    assert (verdict.code, verdict.node, verdict.kind) == (7, 1, "CommunicationError")
    assert "rank 5 (stopped by a signal) did not join a collective in which rank 1 waited" in verdict.message


class DataPathError(DataError):
    """Like an error that a package other than kumi.errors defines."""


@pytest.mark.parametrize(
    ("error", "code", "kind", "message"),
    [
        (LayoutError("tp=6"), 2, LayoutError, "tp=6"),
        (DataPathError("x"), 3, DataError, "x"),
        (ZeroDivisionError("one by zero"), 1, KumiError, "ZeroDivisionError: one by zero"),
        (OSError(28, "No space left"), 1, KumiError, "OSError: [Errno 28] No space left"),
    ],
)
def test_an_error_reaches_the_other_nodes_with_its_kind_and_node(error, code, kind, message):
    report = failure_report(1, error, None, 5.0)
    record = json.loads(json.dumps(report.to_json(now=7.0)))
    assert Report.from_json(record, 1, now=102.0) == Report(1, code, 0, 100.0, kind.__name__, message)
    verdict = decide([report, Report(0, 0)])
    assert verdict.code == code
    assert type(verdict.error(0)) is type(verdict.error(1)) is kind
    assert str(verdict.error(0)) == f"node 1: {message}"
    assert str(verdict.error(1)) == message


def test_the_failure_of_ranks_has_their_class_and_time():
    error = CommunicationError("rank 2 was killed")
    report = failure_report(1, error, RootCause(error, 1, 3.0, 2, {3: "T"}), 5.0)
    assert report == Report(1, 7, 1, 3.0, "CommunicationError", "rank 2 was killed", 2, {3: "T"})
    assert failure_report(1, ConfigError("later"), RootCause(error, 1, 3.0), 5.0).severity == 0


def test_a_name_that_is_no_error_is_not_made_one():
    for kind in ("OK", "annotations", "no such name", "__name__"):
        assert type(Verdict(1, 0, kind, "x").error(0)) is KumiError


REPORTS = st.lists(
    st.builds(
        Report,
        node=st.integers(0, 5),
        code=st.sampled_from([0, 1, 2, 7, 75, 130, 143]),
        severity=st.sampled_from([None, 0, 1, 2, 3]),
        at=st.floats(0, 100),
        kind=st.sampled_from(["CommunicationError", "LayoutError", "KumiError"]),
        message=st.text(max_size=5),
        waiting=st.none() | st.integers(0, 9),
        silent=st.dictionaries(st.integers(0, 9), st.sampled_from(["", "stopped by a signal"]), max_size=2),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda report: report.node,
)


@given(REPORTS)
def test_the_verdict_is_that_of_a_report_and_does_not_depend_on_their_order(reports):
    verdict = decide(reports)
    assert decide(sorted(reports, key=lambda report: report.at)) == verdict
    assert verdict.code in {report.code for report in reports} | {0, 7}
    failures = [report for report in reports if report.severity is not None]
    assert (verdict.error(0) is None) == (not failures)
    if failures and not any(report.silent for report in reports):
        cause = next(report for report in reports if report.node == verdict.node)
        assert all((cause.severity, cause.at) <= (report.severity, report.at) for report in failures)


def test_a_node_that_fails_early_is_reported_in_one_message():
    report = failure_report(1, ConfigError("train.stepz: unknown key"), None, 3.0)
    message = json.loads(json.dumps(failure_message(report, 4)))
    assert early_failure(message, 4, 3.0) == report
    assert early_failure(message, 3, 3.0) is None, "a node of another run"
    assert early_failure({**message, "node": 4}, 4, 3.0) is None
    long = early_failure(failure_message(failure_report(1, ConfigError("x" * 9999), None, 0.0), 4), 4, 0.0)
    assert long is not None
    assert len(long.message) == 4000


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"node": 1, "nodes": 4},
        {"node": True, "nodes": 4, "failed": {"code": 2, "kind": "ConfigError", "message": ""}},
        {"node": 1, "nodes": 4, "failed": {"code": 0, "kind": "ConfigError", "message": ""}},
        {"node": 1, "nodes": 4, "failed": {"code": 2, "kind": None, "message": ""}},
        {"node": 1, "nodes": 4, "failed": {"code": 2, "kind": "ConfigError"}},
        {"node": 1, "nodes": 4, "failed": "ConfigError"},
    ],
)
def test_other_messages_are_no_early_failure(message):
    assert early_failure(message, 4, 0.0) is None


def test_the_message_of_an_early_failure_steers_no_terminal():
    report = early_failure({"node": 1, "nodes": 2, "failed": {"code": 2, "kind": "X", "message": "a\x1b[2Jb"}}, 2, 0.0)
    assert report is not None
    assert report.message == "a\\x1b[2Jb"
