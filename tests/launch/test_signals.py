"""The flag that signals set: the first asks, an echo of it is not a second, the second insists."""

import os
import signal
import time

import pytest

from forked import run_forked
from kumi import cli
from kumi.launch import signals


def send(signum):
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGUSR1, 75)]
)
def test_the_first_signal_sets_the_flag(signum, code):
    with signals.installed() as flag:
        assert flag.requested is None
        send(signum)
        assert flag.requested == signum
        assert signals.exit_code(flag.requested) == code
        assert not flag.insisted


def test_one_request_may_come_on_several_ways():
    with signals.installed() as flag:
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            send(signum)
        assert flag.requested == signal.SIGTERM
        assert not flag.insisted


def test_the_second_request_stops_at_once(monkeypatch):
    monkeypatch.setattr(signals, "_SAME_REQUEST_SECONDS", 0.0)
    with signals.installed() as flag:
        send(signal.SIGINT)
        with pytest.raises(SystemExit) as caught:
            send(signal.SIGTERM)
        assert caught.value.code == 130
        assert flag.insisted


def test_the_third_request_leaves_no_say(monkeypatch):
    monkeypatch.setattr(signals, "_SAME_REQUEST_SECONDS", 0.0)
    child = os.fork()
    if child == 0:
        with signals.installed():
            for _ in range(3):
                try:
                    send(signal.SIGTERM)
                except SystemExit:
                    continue
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143


def test_a_patient_flag_only_notes_the_second(monkeypatch):
    monkeypatch.setattr(signals, "_SAME_REQUEST_SECONDS", 0.0)
    with signals.installed() as flag:
        flag.patient = True
        for _ in range(3):
            send(signal.SIGINT)
        assert flag.insisted


def test_installing_again_gives_the_same_flag_and_the_end_restores():
    before = {signum: signal.getsignal(signum) for signum in signals.EXIT_CODES}
    with signals.installed() as flag:
        assert signals.install() is flag
    assert {signum: signal.getsignal(signum) for signum in signals.EXIT_CODES} == before


def test_what_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.installed() as flag:
            send(signal.SIGHUP)
            assert flag.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGUSR1, 75)])
def test_a_signal_before_training_ends_the_command_with_its_code(capsys, signum, code):
    before = signal.getsignal(signum)
    with pytest.raises(SystemExit) as caught, signals.exit_on_signal():
        send(signum)
    assert caught.value.code == code
    assert f"{signum.name}: stopped; run the same command again" in capsys.readouterr().err
    assert signal.getsignal(signum) is before


def test_a_signal_ends_the_command_with_its_code_from_its_first_line_on(monkeypatch):
    """Batch systems may send SIGUSR1 a minute early, long before PyTorch is imported."""
    monkeypatch.setattr(cli, "_parser", lambda: send(signal.SIGUSR1))
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "run.toml"])
    assert caught.value.code == 75


def test_standard_input_that_closes_hangs_up():
    def command():
        ends = os.pipe()
        os.dup2(ends[0], 0)
        signals.hang_up_with_stdin()
        os.write(ends[1], b"dropped")
        time.sleep(0.2)
        with signals.exit_on_signal():
            os.close(ends[1])
            time.sleep(60)

    code, _, stderr = run_forked(command, timeout=50)
    assert code == 143
    assert "SIGHUP: stopped" in stderr


def test_training_has_its_own_way_with_signals_and_ignored_ones_stay_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.exit_on_signal():
            send(signal.SIGHUP)
            with signals.installed() as flag:
                send(signal.SIGTERM)
            assert flag.requested == signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
