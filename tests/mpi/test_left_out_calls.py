"""A rank leaves out a call, and the next calls are equal: the lines of the program show it. A branch shows nothing."""

import functools
import re

import numpy as np
import pytest
from mpi4py import MPI

from mpistrat.communicators.construction import communicator_for
from mpistrat.communicators.contract.contract import Contract
from mpistrat.communicators.router import Router, Transports
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.liveness.records.record import RankRecord
from mpistrat.liveness.records.watch import CommunicatorWatch

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LAST = SIZE - 1
several = pytest.mark.skipif(SIZE == 1, reason="needs 2 MPI ranks or more")


def by_message():
    """A communicator whose ranks do not share a node, as far as it knows."""
    mpi = MpiTransport(WORLD.Dup())
    record = RankRecord(None)
    record.start(RANK, SIZE, "node")
    return Router(Transports(mpi), Contract(mpi, "tests", CommunicatorWatch(record)))


def by_memory():
    return communicator_for(WORLD.Dup())


def a(call):
    call()


def b(call):
    call()


def c(call):
    call()


def d(call):
    call()


LINES = {"a": a, "b": b, "c": c, "d": d}


def notices_of_ranks(communicator, others, last, barrier=False):
    """What ranks know of a call that was left out, when the last rank has called at the lines `last`."""
    value = np.ones(1)
    call = functools.partial(communicator.all_reduce, value, out=np.empty(1))
    if barrier:
        call = communicator.barrier
    for line in last if RANK == LAST else others:
        LINES[line](call)
    return set(WORLD.allgather(communicator.contract.watch.left_out)) - {""}


LEFT_OUT = {
    "in a row": ("abc", "bcd", "ab"),
    "several calls of a line": ("aabbcc", "bbccdd", "ab"),
    "a loop that ends early": ("aaaabc", "aaabcd", "ab"),
    "in a loop of three": ("abcabca", "abcacab", "bc"),
    "in a loop of two": ("ababababab", "ababaababa", "ba"),
}


@several
@pytest.mark.parametrize("make", [by_memory, by_message])
@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_call_that_one_rank_has_left_out(make, name):
    others, last, (at, instead) = LEFT_OUT[name]
    texts = notices_of_ranks(make(), others, last)
    assert texts
    line, other = (LINES[each].__code__.co_firstlineno + 1 for each in (at, instead))
    expected = (
        rf"rank {LAST} left out the call at \S+:{line} in {at}: rank \d made it together with "
        rf"rank {LAST}'s call at \S+:{other} in {instead}\. .*"
    )
    assert all(re.fullmatch(expected, text) for text in texts), texts


BRANCHES = {
    "once": ("aaa", "aba"),
    "all calls": ("abababab", "cdcdcdcd"),
    "one line for many": ("abcdabcd", "aaaabbbb"),
    "another order": ("abababab", "babababa"),
    "another order after the same": ("ababbaab", "abababab"),
}


@several
@pytest.mark.parametrize("make", [by_memory, by_message])
@pytest.mark.parametrize("name", BRANCHES)
def test_branches_for_one_rank_are_silent(make, name):
    assert notices_of_ranks(make(), *BRANCHES[name]) == set()


@several
@pytest.mark.parametrize("make", [by_memory, by_message])
def test_barriers_mix_no_values(make):
    """The first rank passes its own barrier after one that all ranks pass; the others pass theirs before."""
    assert notices_of_ranks(make(), "abc", "bcd", barrier=True) == set()
