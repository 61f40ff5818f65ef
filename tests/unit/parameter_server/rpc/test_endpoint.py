"""What a rpc does with what has come: errors of handlers, and handlers that come late."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mpistrat.parameter_server.rpc.channel import LOST, read_message
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint

NOTICE, ANSWER = 0, 2


def rpc_with(coming: list[list[tuple[int, Any]]]) -> RpcEndpoint:
    """It gets these batches, which it takes from the list, and then empty ones."""
    channel: Any = SimpleNamespace(
        rank=0,
        size=3,
        lost=set(),
        sent=[],
        receive=lambda seconds: coming.pop(0) if coming else [],
        send=lambda to, message: channel.sent.append((to, message)),
    )
    return RpcEndpoint(channel)


def fail(source: int, body: Any = None) -> None:
    raise ArithmeticError(f"of {source}")


def test_what_comes_behind_an_error_is_handled() -> None:
    bad = [(1, (NOTICE, "bad", 0)), (2, (NOTICE, "bad", 0))]
    rpc = rpc_with([[*bad, (1, (ANSWER, 1, "yes"))]])
    rpc.handle("bad", fail)
    reply = rpc.call(1, "question")
    with pytest.raises(ArithmeticError, match="of 1"):
        rpc.run_until(lambda: False, 20)
    assert reply.come
    assert reply.wait() == "yes"


def test_a_message_that_cannot_be_unpickled() -> None:
    bad = read_message(b"nonsense")
    rpc = rpc_with([[(2, bad), (1, (ANSWER, 1, "yes"))]])
    reply = rpc.call(1, "question")
    with pytest.raises(RuntimeError, match="what rank 2 has sent cannot be unpickled: Unpickling"):
        rpc.run_until(lambda: False, 20)
    assert reply.wait() == "yes"


def test_all_hear_of_a_loss() -> None:
    rpc = rpc_with([[(1, LOST)]])
    heard: list[int] = []
    rpc.on_lost(fail)
    rpc.on_lost(heard.append)
    with pytest.raises(ArithmeticError):
        rpc.run_until(lambda: False, 20)
    assert heard == [1]


def test_others_that_wait_hear_at_once_when_a_handler_fails(monkeypatch: Any) -> None:
    """Who waits behind the thread that reads is woken though that raises."""
    monkeypatch.setattr("mpistrat.parameter_server.rpc.endpoint.SECONDS_BEHIND_ANOTHER", 60)
    reading, read = threading.Event(), threading.Event()
    rpc = rpc_with([])

    def receive(seconds: float | None) -> list[tuple[int, Any]]:
        reading.set()
        assert read.wait(20)
        return [(1, (NOTICE, "bad", 0)), (1, (ANSWER, 1, "yes"))]

    rpc.channel.receive = receive  # type: ignore[method-assign]
    rpc.handle("bad", fail)
    reply = rpc.call(1, "question")
    looked = threading.Event()

    def come() -> bool:
        looked.set()
        return reply.come

    def attend_and_fail() -> None:
        with pytest.raises(ArithmeticError):
            rpc.run_until(lambda: False, 20)

    reader = threading.Thread(target=attend_and_fail)
    reader.start()
    assert reading.wait(20)
    waiting = threading.Thread(target=rpc.run_until, args=(come, 50), daemon=True)
    waiting.start()
    assert looked.wait(20)
    read.set()
    reader.join(20)
    waiting.join(20)
    assert not waiting.is_alive()


def test_what_came_before_its_handler_is_handled_before_what_comes_after() -> None:
    coming: list[list[tuple[int, Any]]] = [[(1, (NOTICE, "late", number))] for number in range(2)]
    rpc = rpc_with(coming)
    assert rpc.run_until(lambda: not coming, 20)
    order: list[int] = []
    rpc.handle("late", lambda source, body: order.append(body))
    assert order == [0, 1]


def test_no_message_is_lost_between_a_look_for_its_handler_and_its_keeping() -> None:
    """Another thread registers the handler right after the reader has found none."""
    got: list[int] = []
    handled = threading.Event()
    calls: list[int] = []

    def register() -> None:
        rpc.handle("late", lambda source, body: got.append(body))
        handled.set()

    class Method(str):
        """Hashed to look for its handler, and again to keep the message."""

        def __hash__(self) -> int:
            calls.append(1)
            if len(calls) == 2:
                registering.start()
                handled.wait(0.5)  # with one lock around both, it comes after
            return super().__hash__()

    coming: list[list[tuple[int, Any]]] = [[(1, (NOTICE, Method("late"), 7))]]
    rpc = rpc_with(coming)
    registering = threading.Thread(target=register)
    assert rpc.run_until(lambda: not coming, 20)
    registering.join(20)
    assert got == [7]
