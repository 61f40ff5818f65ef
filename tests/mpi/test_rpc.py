"""Requests, answers and notices between ranks: over pipes, and over MPI as between nodes."""

import gc
import pickle
import threading
import time
import weakref

import numpy as np
import pytest
from mpi4py import MPI

from mpistrat import errors
from mpistrat.parameter_server.rpc.channel import Channel
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint
from mpistrat.parameter_server.rpc.mpi_messages import BUFFERS, HEAD, MpiMessages

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
OTHERS = [rank for rank in range(SIZE) if rank != RANK] or [RANK]


class Talk:
    """A rpc whose ranks answer each other, and know when all have come to the end of a test."""

    def __init__(self, pipes: bool) -> None:
        comm = WORLD.Dup()
        self.rpc = RpcEndpoint(Channel(comm, pipes=pipes), stall_seconds=40)
        self.finished: set[int] = set()
        self.notices: list[tuple[int, object]] = []
        self.rpc.handle("finished", lambda source, _: self.finished.add(source))
        self.rpc.handle("notice", lambda source, body: self.notices.append((source, body)))
        self.rpc.handle("echo", self._echo)
        self.rpc.handle("fail", self._fail)

    def _echo(self, request) -> None:
        request.reply(request.body)

    def _fail(self, request) -> None:
        request.reply(request.body(f"of rank {RANK}"))

    def finish(self) -> None:
        for rank in range(SIZE):
            self.rpc.notify(rank, "finished")
        assert self.rpc.run_until(lambda: len(self.finished) == SIZE, 40)
        WORLD.Barrier()
        self.finished.clear()


@pytest.fixture(scope="module", params=[True, False], ids=["pipes", "mpi"])
def talk(request: pytest.FixtureRequest) -> Talk:
    return Talk(request.param)


def test_everybody_asks_everybody(talk) -> None:
    bodies = [None, 0, "text", {"a": [1, (2, 3)]}, np.arange(5), np.zeros((0, 3)), b"x" * 10_000]
    replies = [(body, talk.rpc.call(to, "echo", body)) for body in bodies for to in range(SIZE)]
    for body, reply in reversed(replies):  # in any order
        np.testing.assert_equal(reply.wait(), body)
    talk.finish()


@pytest.mark.parametrize(
    "kind",
    [ValueError, IndexError, errors.NotFoundError, errors.InvalidArgumentError, RuntimeError],
)
def test_errors_come_back_with_their_class(talk, kind) -> None:
    for to in range(SIZE):
        with pytest.raises(kind, match=f"of rank {to}") as caught:
            talk.rpc.call(to, "fail", kind).wait()
        assert type(caught.value) is kind
    assert talk.rpc.call(OTHERS[0], "echo", 1).wait() == 1
    talk.finish()


def test_large_messages_both_ways_at_once(talk) -> None:
    """More than the pipes hold, from all to all: nobody waits for a receiver that waits for it."""
    large = np.random.default_rng(RANK).integers(0, 255, 3 << 20).astype(np.uint8)
    replies = [talk.rpc.call(to, "echo", large) for to in OTHERS for _ in range(2)]
    for reply in replies:
        assert np.array_equal(reply.wait(), large)
    talk.finish()


def test_messages_of_a_rank_come_in_its_order(talk) -> None:
    sizes = np.random.default_rng(0).integers(0, 20_000, 100)
    for number, size in enumerate(sizes):
        for to in OTHERS:
            talk.rpc.notify(to, "notice", (number, np.zeros(size, np.uint8)))
    assert talk.rpc.run_until(lambda: len(talk.notices) == 100 * len(OTHERS), 40)
    for source in OTHERS:
        mine = [body for sender, body in talk.notices if sender == source]
        assert [(number, len(data)) for number, data in mine] == list(enumerate(sizes))
    talk.notices.clear()
    talk.finish()


def test_threads_ask_at_the_same_time(talk) -> None:
    wrong: list[object] = []

    def ask(thread: int) -> None:
        try:
            for number in range(40):
                body = (RANK, thread, number, b"y" * 500 * thread)
                to = OTHERS[number % len(OTHERS)]
                if talk.rpc.call(to, "echo", body).wait() != body:
                    wrong.append(body)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    assert wrong == []
    talk.finish()


def test_wake(talk) -> None:
    woken = threading.Event()

    def wake() -> None:
        time.sleep(0.1)
        woken.set()
        talk.rpc.channel.wake()

    thread = threading.Thread(target=wake)
    thread.start()
    assert talk.rpc.run_until(woken.is_set, 40)
    thread.join()
    talk.finish()


def test_a_limit_to_waiting(talk) -> None:
    begin = time.monotonic()
    assert not talk.rpc.run_until(lambda: False, 0.2)
    assert time.monotonic() - begin >= 0.19
    talk.finish()


def test_a_wait_for_a_third_is_told_of_and_goes_on(talk, monkeypatch) -> None:
    requests = {}
    talk.rpc.handle("later", lambda request: requests.update({request.source: request}))
    talk.rpc.handle("now", lambda source, _: requests[source].reply(5))
    monkeypatch.setattr(talk.rpc, "stall_seconds", 0.1)
    notices = []

    def notify(text: str) -> None:
        notices.append(text)
        talk.rpc.notify(OTHERS[0], "now")

    monkeypatch.setattr("mpistrat.parameter_server.rpc.endpoint.tell", notify)
    assert talk.rpc.call(OTHERS[0], "later").wait(limited=False) == 5
    assert f"rank {OTHERS[0]} to answer 'later'" in notices[0]
    talk.finish()


class Unreadable:
    """Cannot be unpickled."""

    def __reduce__(self) -> object:
        return int, ("no number",)


def test_what_cannot_be_unpickled_does_not_keep_others_from_being_read(talk) -> None:
    replies = [talk.rpc.call(RANK, "echo", number) for number in range(3)]
    talk.rpc.notify(RANK, "notice", Unreadable())
    replies += [talk.rpc.call(RANK, "echo", number) for number in range(3, 6)]
    with pytest.raises(RuntimeError, match=f"what rank {RANK} has sent cannot be unpickled: Value"):
        talk.rpc.run_until(lambda: False, 40)
    assert [reply.wait() for reply in replies] == list(range(6))
    talk.finish()


def test_buffers_that_mpi_writes_to_outlive_the_sender(monkeypatch) -> None:
    """Who has died may have sent the head of a message, and MPI goes on to write what follows."""
    buffers: list[weakref.ref] = []
    empty = np.empty

    def recorded(*arguments):
        array = empty(*arguments)
        buffers.append(weakref.ref(array))
        return array

    monkeypatch.setattr(np, "empty", recorded)
    comm = WORLD.Dup()
    messages = MpiMessages(comm)
    sent = np.zeros(100_000, np.uint8)
    head = pickle.dumps((b"", [len(sent)]), protocol=5)
    requests = [comm.Isend([head, MPI.BYTE], RANK, HEAD)]
    end = time.monotonic() + 40
    while not buffers:
        assert list(messages.read()) == []
        assert time.monotonic() < end
    (buffer,) = buffers
    messages.forget(RANK)
    messages.flush()
    gc.collect()
    assert buffer() is not None
    requests.append(comm.Isend([sent, MPI.BYTE], RANK, BUFFERS))
    while buffer() is not None:
        messages.flush()
        assert time.monotonic() < end
    MPI.Request.Waitall(requests)
    comm.Free()


def test_who_does_not_answer_is_named(talk, monkeypatch) -> None:
    talk.rpc.handle("nothing", lambda request: None)
    monkeypatch.setattr(talk.rpc, "stall_seconds", 0.3)
    reply = talk.rpc.call(OTHERS[0], "nothing")
    with pytest.raises(errors.StallError, match=rf"rank {OTHERS[0]} to answer 'nothing'"):
        reply.wait()
    talk.finish()
