"""The queue itself."""

import threading

import pytest

from mpistrat.parameter_server.coordinator.closures import Closure, ClosureQueue
from mpistrat.parameter_server.coordinator.remote_value import RemoteValue


def put(queue: ClosureQueue, *names: str) -> None:
    for name in names:
        queue.put(Closure(name, b"", [], RemoteValue(queue.changed, lambda data: data)))


def names(closures: list[Closure]) -> list[str]:
    return [closure.name for closure in closures]


def test_first_in_first_out_also_what_is_put_back() -> None:
    queue = ClosureQueue()
    put(queue, *"abcde")
    taken = queue.take(3)
    assert names(taken) == ["a", "b", "c"]
    queue.end([(taken[0], b"", None)])
    queue.put_back(taken[1:])
    assert names(queue.take(9)) == ["b", "c", "d", "e"]


def test_a_full_queue_waits() -> None:
    queue = ClosureQueue(most=2)
    put(queue, "a", "b")
    thread = threading.Thread(target=put, args=(queue, "c"))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    assert len(queue) == 2
    assert names(queue.take(1)) == ["a"]
    thread.join(20)
    assert names(queue.take(5)) == ["b", "c"]


def test_a_queue_of_many_bytes_waits() -> None:
    def put_bytes(name: str, count: int) -> None:
        queue.put(Closure(name, bytes(count), [], RemoteValue(queue.changed, lambda data: data)))

    queue = ClosureQueue(most_bytes=100)
    put_bytes("a", 30)
    put_bytes("larger than all may be", 1000)
    thread = threading.Thread(target=put_bytes, args=("c", 1))
    thread.start()
    a, larger = queue.take(5)
    queue.end([(a, b"", None)])
    queue.put_back([larger])
    thread.join(0.1)
    assert thread.is_alive()
    queue.end([(closure, b"", None) for closure in queue.take(1)])
    thread.join(20)
    assert names(queue.take(5)) == ["c"]


def test_what_is_over() -> None:
    queue = ClosureQueue()
    put(queue, *"abcde")
    a, b, c, d, e = queue.take(5)
    assert [closure.id for closure in (a, b, c, d, e)] == [1, 2, 3, 4, 5]
    queue.end([(b, b"", None), (c, b"", None)])
    assert queue.over(3) == ([], 1)
    assert queue.over() == ([2, 3], 1)
    queue.end([(a, b"", None)])
    assert queue.over() == ([1], 4)
    d.repeated = True
    queue.end([(d, b"", None), (e, None, ValueError("e"))])
    assert queue.over() == ([5], 6)


def test_what_is_put_back_after_an_error_is_cancelled_and_over() -> None:
    queue = ClosureQueue()
    put(queue, "a", "b", "c")
    a, b = queue.take(2)
    queue.end([(a, None, ValueError("a"))])
    queue.put_back([b])
    with pytest.raises(ValueError, match="a"):
        queue.wait()
    assert queue.over() == ([1, 2, 3], 4)
    assert queue.done()


def test_what_nobody_has_waited_for() -> None:
    queue = ClosureQueue()
    put(queue, *"abcde")
    a, _, _ = queue.take(3)
    error = ValueError("a")
    queue.end([(a, None, error)])
    assert queue.close(RuntimeError("over")) == (2, 2, error)
    with pytest.raises(ValueError, match="a"):
        queue.wait()
    assert queue.close(RuntimeError("over")) == (0, 0, None)
