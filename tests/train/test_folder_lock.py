"""One process leads a run at a time, also where locks of files hold on one machine only."""

import fcntl
import json
import os
import time
from dataclasses import asdict

import pytest

from forked import run_forked
from kumi.errors import RefusedError
from kumi.train import folder_lock
from kumi.train.folder_lock import LOCK, LockOwner, lock_folder

ELSEWHERE = LockOwner("0123", "gpu007", "another machine", 4711)


def owner(out):
    return LockOwner(**json.loads((out / LOCK).read_text()))


def test_the_lock_file_names_its_owner_and_is_empty_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "_BEAT_SECONDS", 0.02)
    with lock_folder(tmp_path):
        first = owner(tmp_path)
        assert first.pid == os.getpid()
        deadline = time.monotonic() + 20
        while folder_lock._read(tmp_path) in (None, first):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert (tmp_path / LOCK).read_text() == ""
    with lock_folder(tmp_path):
        assert owner(tmp_path).token != first.token


def test_another_process_of_this_machine_is_refused_by_name(tmp_path):
    def second():
        words = rf"is in use by another kumi process \(process {parent} on "
        with pytest.raises(RefusedError, match=words), lock_folder(tmp_path, patience=0.2):
            pass

    parent = os.getpid()
    with lock_folder(tmp_path):
        code, stdout, stderr = run_forked(second)
    assert code == 0, stdout + stderr


def test_a_living_owner_on_another_machine_is_refused_although_the_lock_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "_BEAT_SECONDS", 0.1)

    def beat_elsewhere():
        for beat in range(1000):
            draft = tmp_path / "draft"
            draft.write_text(json.dumps(asdict(LockOwner("0123", "gpu007", "another machine", 4711, beat))))
            draft.rename(tmp_path / LOCK)
            time.sleep(0.02)

    child = os.fork()
    if child == 0:
        beat_elsewhere()
        os._exit(0)
    try:
        while not (tmp_path / LOCK).exists():
            time.sleep(0.01)
        words = r"in use by another kumi process \(process 4711 on gpu007\)"
        with pytest.raises(RefusedError, match=words), lock_folder(tmp_path, patience=10.0):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_dead_owner_on_another_machine_is_waited_for_once(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "_BEAT_SECONDS", 0.1)
    (tmp_path / LOCK).write_text(json.dumps(asdict(ELSEWHERE)))
    began = time.monotonic()
    with lock_folder(tmp_path, patience=0.6):
        assert time.monotonic() - began > 0.5
        assert owner(tmp_path).host != "gpu007"


def test_a_folder_without_locks_is_kept_by_its_owners_name(tmp_path, monkeypatch):
    def no_lock(*_):
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", no_lock)
    with lock_folder(tmp_path):
        assert owner(tmp_path).pid == os.getpid()


def test_an_owner_whose_folder_was_taken_over_ends(tmp_path):
    def lead():
        folder_lock._BEAT_SECONDS = 0.05
        with lock_folder(tmp_path):
            (tmp_path / LOCK).write_text(json.dumps(asdict(ELSEWHERE)))
            time.sleep(60)

    code, _, stderr = run_forked(lead, timeout=60)
    assert code == 2
    assert "was taken over by another kumi process (process 4711 on gpu007)" in stderr


@pytest.mark.parametrize("text", ["", "12345\n", "{", "[]", '{"token": 1}', "\x00" * 100])
def test_a_lock_file_of_an_earlier_version_is_no_owner(tmp_path, text):
    (tmp_path / LOCK).write_text(text)
    began = time.monotonic()
    with lock_folder(tmp_path):
        assert time.monotonic() - began < 10
