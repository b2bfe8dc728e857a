"""The stop file: a request to save and end that reaches a run through its folder."""

import os
import signal
import time

import pytest

from kumi.launch import signals, stop_file
from kumi.launch.stop_file import STOP_FILE, obey_stop_file, process_age


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(stop_file, "_POLL_SECONDS", 0.02)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stop_file_is_a_request_like_sigusr1(tmp_path, capfd):
    with signals.installed() as flag, obey_stop_file(tmp_path, age=60.0):
        time.sleep(0.1)
        assert flag.requested is None
        (tmp_path / STOP_FILE).write_text("stop\n")
        wait_for(lambda: flag.requested is not None)
        assert flag.requested == signal.SIGUSR1
        time.sleep(0.1)
        assert not flag.insisted
    assert list(tmp_path.iterdir()) == []
    assert f"stop       asked for by {tmp_path / STOP_FILE}" in capfd.readouterr().err


def test_before_training_it_ends_the_command_with_75(tmp_path):
    (tmp_path / STOP_FILE).touch()
    with pytest.raises(SystemExit) as ended, signals.exit_on_signal(), obey_stop_file(tmp_path, age=60.0):
        time.sleep(20)
    assert ended.value.code == 75


def test_a_stop_file_from_before_this_start_is_removed(tmp_path):
    file = tmp_path / STOP_FILE
    file.touch()
    past = time.time() - 100
    os.utime(file, (past, past))
    with signals.installed() as flag, obey_stop_file(tmp_path, age=10.0):
        assert not file.exists()
        time.sleep(0.1)
        assert flag.requested is None


def test_a_program_without_handlers_is_not_killed(tmp_path):
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        (tmp_path / STOP_FILE).touch()
        with obey_stop_file(tmp_path, age=60.0):
            time.sleep(0.2)
            with signals.installed() as flag:  # training begins
                wait_for(lambda: flag.requested is not None)
                assert flag.requested == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_age_of_this_process():
    age = process_age()
    assert 0 < age < 10 * 86400
    time.sleep(0.05)
    assert process_age() > age
