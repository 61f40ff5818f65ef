"""How the ranks of a node share its cores; the ranks are played by a communicator that knows their answers."""

import os

import pytest
import torch

from mpistrat.communicators.local import LocalCommunicator
from mpistrat.errors import CollectiveMismatchError
from mpistrat.machine.cpu_share import THREAD_COUNTS
from mpistrat.strategies import threads
from mpistrat.topology import Topology


class Ranks(LocalCommunicator):
    """Rank 0 of several, each with its node and the CPUs it may run on."""

    def __init__(self, *answers):
        self.answers = answers
        self.size = len(answers)

    def all_gather_object(self, value, *, label=""):
        assert value == self.answers[0]
        return list(self.answers)


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in THREAD_COUNTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "announced", False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def eight_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def topology(*hosts):
    return Topology.from_hosts(0, hosts, "test")


def test_unbound_ranks_share_the_cores(eight_cpus, capsys):
    everywhere = (0, list(range(8)), None)
    threads.share_cores(Ranks(everywhere, everywhere), topology("a", "a"))
    assert torch.get_num_threads() == 4
    assert capsys.readouterr().err.startswith("mpistrat: 4 compute threads per rank (2 ranks of")


def test_ranks_of_other_nodes_do_not_count(eight_cpus, capsys):
    all_of_it = list(range(8))
    ranks = Ranks((0, all_of_it, None), (1, all_of_it, None), (1, all_of_it, None))
    threads.share_cores(ranks, topology("a", "b", "b"))
    assert torch.get_num_threads() == 8
    assert "1 rank of" in capsys.readouterr().err


def test_it_is_said_once(eight_cpus, capsys):
    everywhere = (0, list(range(8)), None)
    for _ in range(2):
        threads.share_cores(Ranks(*[everywhere] * 8), topology(*"aaaaaaaa"))
    assert torch.get_num_threads() == 1
    assert capsys.readouterr().err.count("mpistrat: 1 compute thread per rank") == 1


def test_a_rank_alone_keeps_torch_s_choice(eight_cpus, capsys):
    torch.set_num_threads(3)
    threads.share_cores(LocalCommunicator(), Topology.single())
    assert torch.get_num_threads() == 3
    assert not capsys.readouterr().err


def test_what_the_user_set_stays(eight_cpus, monkeypatch, capsys):
    monkeypatch.setenv("MKL_NUM_THREADS", "5")
    torch.set_num_threads(5)
    everywhere = (0, list(range(8)), None)
    threads.share_cores(Ranks(everywhere, everywhere), topology("a", "a"))
    assert torch.get_num_threads() == 5
    assert not capsys.readouterr().err


def test_deterministic_ranks_use_one_thread_however_many_they_are(eight_cpus, capsys):
    torch.set_num_threads(3)
    assert threads.share_cores(LocalCommunicator(), Topology.single(), deterministic=True) == 1
    assert torch.get_num_threads() == 1
    torch.set_num_threads(3)
    everywhere = (0, list(range(8)), 1)
    ranks = Ranks(everywhere, everywhere)
    assert threads.share_cores(ranks, topology("a", "a"), deterministic=True) == 1
    assert torch.get_num_threads() == 1
    assert not capsys.readouterr().err


def test_deterministic_ranks_use_the_user_s_number(eight_cpus, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    assert threads.share_cores(LocalCommunicator(), Topology.single(), deterministic=True) == 2
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("other", [2, None])
def test_deterministic_ranks_that_differ_are_told(eight_cpus, other):
    ranks = Ranks((0, list(range(8)), 1), (0, list(range(8)), other))
    with pytest.raises(
        CollectiveMismatchError, match=r"rank 0: 1 threads, rank 1: (2 threads|not)"
    ):
        threads.share_cores(ranks, topology("a", "a"), deterministic=True)
