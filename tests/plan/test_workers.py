"""Worker processes search as threads do, and say it where one dies."""

from __future__ import annotations

import os
import subprocess
from subprocess import PIPE

import pytest
from small import HOST, job, model

from kumi.errors import KumiError
from kumi.plan.search import search_layouts as searching
from kumi.plan.search import workers


@pytest.fixture
def two_processes(monkeypatch):
    monkeypatch.setattr(workers, "ROWS_PER_PROCESS", 1)
    monkeypatch.setattr(searching, "CHUNK_ROWS", 500)
    monkeypatch.setattr(searching, "usable_cores", lambda: 2)


def test_processes_and_threads_give_the_same_result(two_processes, monkeypatch):
    task, done, started = job(of=model(8, experts=4), sequences=8, host=HOST, memory=2.5e9), [], []
    start = workers._start_process
    monkeypatch.setattr(workers, "_start_process", lambda: started.append(start()) or started[-1])
    in_processes = searching.search(task, {}, progress=done.append)
    assert len(started) == 2
    assert done == sorted(done)
    assert done[-1] == 1
    assert all(process.poll() is not None for process in started)
    monkeypatch.setattr(workers, "ROWS_PER_PROCESS", 1 << 40)
    assert searching.search(task, {}) == in_processes
    assert len(started) == 2


@pytest.mark.parametrize(("free", "rows", "workers_started"), [(10, 100, 5), (10, 3, 3), (3, 100, 1), (None, 100, 8)])
def test_workers_take_half_of_the_free_memory(monkeypatch, free, rows, workers_started):
    """`free`: in the memory of a worker. With less than that of two, one thread searches."""
    monkeypatch.setattr(workers, "ROWS_PER_PROCESS", 1)
    monkeypatch.setattr(workers, "free_memory", lambda: free and free * workers._WORKER_BYTES)
    monkeypatch.setattr(workers, "_start_process", lambda: subprocess.Popen(["cat"], stdin=PIPE, stdout=PIPE))
    with workers.start_workers(divmod, 8, rows) as (submit, count):
        assert count == workers_started
        if count == 1:
            assert submit(7, 2).result() == (3, 1)


def test_a_search_with_little_memory_finds_the_same(two_processes, monkeypatch):
    task = job(of=model(8, experts=4), sequences=8, host=HOST, memory=2.5e9)
    monkeypatch.setattr(workers, "_start_process", pytest.fail)
    monkeypatch.setattr(workers, "free_memory", lambda: 0)
    in_one_thread = searching.search(task, {})
    monkeypatch.setattr(workers, "free_memory", lambda: None)
    monkeypatch.setattr(workers, "ROWS_PER_PROCESS", 1 << 40)
    assert searching.search(task, {}) == in_one_thread


@pytest.mark.usefixtures("two_processes")
def test_an_error_in_a_process_is_raised():
    with workers.start_workers(divmod, 2, 10) as (submit, count):
        assert count == 2
        assert submit(7, 2).result() == (3, 1)
        with pytest.raises(ZeroDivisionError):
            submit(1, 0).result()
        assert submit(9, 2).result() == (4, 1)


@pytest.mark.usefixtures("two_processes")
def test_a_process_that_dies_is_an_error():
    with (
        workers.start_workers(os._exit, 2, 10) as (submit, _),
        pytest.raises(KumiError, match="a worker process of the search exited with code 3; run the same command again"),
    ):
        submit(3).result()
