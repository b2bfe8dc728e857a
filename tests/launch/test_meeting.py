"""Ranks of an outside launcher that meet in one store: a second time, and late, when rank 0 is about to leave."""

import multiprocessing
import sys
import time

import pytest
from torch.distributed import TCPStore

from kumi.errors import CommunicationError, ConfigError
from kumi.launch.rendezvous import rendezvous
from kumi.launch.standing import LaunchedRank

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked")

DEADLINE = 30.0


@pytest.fixture
def address(monkeypatch):
    """The address of the rendezvous: a free port, unless a test serves a store there."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port))


def in_ranks(program):
    """Run program(rank, answers, event) as ranks 0 and 1 in two processes; the answers, in the order they came."""
    context = multiprocessing.get_context("fork")
    answers, event = context.Queue(), context.Event()
    ranks = [context.Process(target=program, args=(rank, answers, event)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    until = time.monotonic() + DEADLINE
    for rank in ranks:
        rank.join(max(0.0, until - time.monotonic()))
    stuck = [index for index, rank in enumerate(ranks) if rank.is_alive()]
    for rank in ranks:
        rank.kill()
    assert not stuck, f"ranks {stuck} hang"
    return [answers.get(timeout=1.0) for _ in ranks]


def test_a_second_meeting_has_words_of_its_own(address, monkeypatch):
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent serves it
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))

    def program(rank, answers, second):
        with rendezvous(LaunchedRank(rank, 2, rank)) as meeting:
            meeting.receive() if rank else meeting.broadcast("first")
        if rank == 0:
            second.wait(0.5)  # rank 1 listens meanwhile
        with rendezvous(LaunchedRank(rank, 2, rank)) as meeting:
            answers.put(meeting.receive() if rank else meeting.broadcast("second"))

    assert set(in_ranks(program)) == {"second", None}


def test_rank_0_stays_until_a_late_rank_has_heard(address):
    def program(rank, answers, answered):
        if rank:
            answered.wait()
            time.sleep(0.5)
        with rendezvous(LaunchedRank(rank, 2, rank)) as meeting:
            if rank == 0:
                meeting.broadcast("finished")
                answered.set()
            answers.put(meeting.receive() if rank else None)

    assert set(in_ranks(program)) == {"finished", None}


def test_a_late_rank_hears_why_rank_0_failed(address):
    def program(rank, answers, failed):
        if rank:
            failed.wait()
            time.sleep(0.5)
        try:
            with rendezvous(LaunchedRank(rank, 2, rank)) as meeting:
                if rank == 0:
                    failed.set()
                    raise ConfigError("a typo")
                meeting.receive()
        except (ConfigError, CommunicationError) as error:
            answers.put(str(error))

    assert set(in_ranks(program)) == {"a typo", "rank 1 ends because rank 0 failed: ConfigError: a typo"}


def test_rank_0_leaves_without_a_rank_that_never_comes(address, monkeypatch):
    monkeypatch.setattr("kumi.launch.rendezvous._LINGER_SECONDS", 0.1)
    began = time.monotonic()
    with rendezvous(LaunchedRank(0, 2, 0)) as meeting:
        meeting.broadcast("finished")
    assert time.monotonic() - began < 30  # without the limit it would wait for the timeout of the group
