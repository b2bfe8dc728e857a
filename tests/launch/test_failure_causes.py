"""Which of several failures a launcher reports, and in which words."""

import signal
from types import SimpleNamespace

import pytest

from kumi.launch.control_folder import Failure
from kumi.launch.failure_causes import rank_timeout_error, root_cause
from kumi.launch.watch import RankDeath

PRIMARY = Failure(0, 3.0, ["ValueError"], "bad value", "ValueError: bad value", secondary=False)
SECONDARY = Failure(1, 1.0, ["RuntimeError"], "connection reset", "RuntimeError: connection reset", secondary=True)
KILLED = RankDeath(2, 3.5, -signal.SIGKILL)
ABORTED = RankDeath(3, 2.0, -signal.SIGABRT)
UNKNOWN = RankDeath(4, 2.5, None)


@pytest.mark.parametrize(
    ("deaths", "failures", "message"),
    [
        ([ABORTED], [PRIMARY, SECONDARY], "rank 0 failed unexpectedly"),
        ([KILLED, ABORTED], [SECONDARY], r"rank 2 was killed by signal 9 \(SIGKILL\)"),
        ([UNKNOWN, ABORTED], [SECONDARY], r"rank 3 was killed by signal 6 \(SIGABRT\)"),
        ([UNKNOWN], [SECONDARY], "rank 4 ended with an unknown exit code without reporting a cause"),
        ([], [SECONDARY], "rank 1 lost the connection to another rank"),
        ([], [], "a rank ended without reporting a cause"),
    ],
)
def test_the_cause_is_the_earliest_of_the_lowest_class(deaths, failures, message, tmp_path):
    watch = SimpleNamespace(deaths=deaths, killed={})
    error = root_cause(watch, {}, failures, tmp_path, out_of_memory=False).error
    with pytest.raises(type(error), match=message):
        raise error


def test_the_record_of_collectives_is_named_if_nccl_wrote_it(tmp_path):
    watch = SimpleNamespace(deaths=[ABORTED], killed={})
    assert "last collectives" not in str(root_cause(watch, {}, [], tmp_path, out_of_memory=False).error)
    (tmp_path / "flight_recorder_3").touch()
    words = str(root_cause(watch, {}, [], tmp_path, out_of_memory=False).error)
    assert words.endswith(f"and the last collectives of each rank in {tmp_path}/flight_recorder_*")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ({3: ""}, "rank 3 did not join .* look for the cause on that rank, raise train.timeout_s if it was only slow"),
        (
            {3: "", 5: "stopped by a signal"},
            r"rank 3 and rank 5 \(stopped by a signal\) did not join .* look for the cause on those ranks, raise "
            "train.timeout_s if they were only slow",
        ),
    ],
)
def test_a_timeout_names_one_rank_or_several(ranks, words):
    with pytest.raises(Exception, match=words):
        raise rank_timeout_error(ranks, waiting=0)
