"""What a user of ClusterCoordinator sees; the workers are threads."""

import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mpistrat as ms
from mpistrat.coordinator import (
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValue,
    experimental_get_current_worker_index,
)
from mpistrat.errors import CancelledError, UnavailableError
from support.parameter_servers.coordinated_threads import Threads, eventually

Start = Callable[..., Threads]


class Waiting:
    """A function that says that it was begun, and ends when its gate is opened."""

    def __init__(self, threads: Threads, name: str) -> None:
        self.begun, self.gate, self.name = threading.Event(), threading.Event(), name
        threads.things.by_name[name] = self

    def __call__(self) -> str:
        self.begun.set()
        assert self.gate.wait(30)
        return self.name


def fail(text: str = "no") -> None:
    raise KeyError(text)


def fail_after(waiting: Waiting) -> None:
    waiting()
    fail()


def test_results_and_structures(start: Start) -> None:
    coordinator = start().coordinator
    number = np.int32(1)
    value = coordinator.schedule(lambda x: {"a": x, "b": (x + 1, [x + 2])}, args=(number,))
    assert isinstance(value, RemoteValue)
    assert coordinator.fetch({"got": value, "as it is": 7}) == {
        "got": {"a": 1, "b": (2, [3])},
        "as it is": 7,
    }
    assert coordinator.schedule(lambda x, y: x * y, args=[2], kwargs={"y": 5}).get() == 10
    assert coordinator.schedule(lambda: None).get() is None
    assert value.get() is value.get()


def test_results_are_numpy_when_fetched(start: Start) -> None:
    value = start().coordinator.schedule(lambda: [torch.ones(3, requires_grad=True) * 2])
    assert isinstance(value.get()[0], torch.Tensor)
    (fetched,) = value.fetch()
    assert type(fetched) is np.ndarray
    assert fetched.tolist() == [2, 2, 2]


def test_what_is_captured_is_what_it_was_when_scheduled(start: Start) -> None:
    threads = start(1)
    first = Waiting(threads, "first")
    threads.coordinator.schedule(first)
    seen = [1]
    number = 5
    value = threads.coordinator.schedule(lambda: (seen, number))
    seen.append(2)
    number = 6
    again = threads.coordinator.schedule(lambda: (seen, number))
    first.gate.set()
    assert value.get() == ([1], 5)
    assert again.get() == ([1, 2], 6)


def test_closures_do_not_share_what_they_captured(start: Start) -> None:
    coordinator = start(1).coordinator
    seen: list[int] = []

    def note() -> int:
        seen.append(1)
        return len(seen)

    values = [coordinator.schedule(note) for _ in range(3)]
    assert coordinator.fetch(values) == [1, 1, 1]
    assert seen == []


def test_references_are_the_same_objects(start: Start) -> None:
    threads = start()
    shared = threads.things.by_name["shared"] = object()
    value = threads.coordinator.schedule(
        lambda argument: (argument is shared, [shared]), args=(shared,)
    )
    assert value.get() == (True, [shared])


def test_there_is_one_for_a_strategy(start: Start) -> None:
    threads = start()
    assert ClusterCoordinator(threads.strategy) is threads.coordinator
    assert threads.coordinator.strategy is threads.strategy
    with pytest.raises(ValueError, match="takes a ParameterServerStrategy"):
        ClusterCoordinator(ms.get_strategy())


@pytest.mark.parametrize("fn", [None, 5, "f"])
def test_what_is_no_function(start: Start, fn: Any) -> None:
    with pytest.raises(TypeError, match="takes a function"):
        start().coordinator.schedule(fn)


@pytest.mark.parametrize("where", ["args", "nested", "kwargs"])
def test_remote_values_are_no_arguments(start: Start, where: str) -> None:
    coordinator = start().coordinator
    value = coordinator.schedule(lambda: 1)
    arguments: dict[str, Any] = {
        "args": {"args": (value,)},
        "nested": {"args": ([{"a": value}],)},
        "kwargs": {"kwargs": {"x": value}},
    }[where]
    with pytest.raises(ValueError, match="RemoteValue cannot be an argument"):
        coordinator.schedule(lambda x: x, **arguments)
    with pytest.raises(TypeError, match=r"variable 'value', of type .*RemoteValue .*fetch\(\) it"):
        coordinator.schedule(lambda: value)


def test_what_cannot_be_pickled_is_named_at_once(start: Start) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def step(self) -> None:
            pass

    coordinator = start().coordinator
    trainer = Trainer()
    with pytest.raises(TypeError, match=r"step → the object it is bound to → its attribute 'lock'"):
        coordinator.schedule(trainer.step)
    with pytest.raises(TypeError, match=r"lambda> → its variable 'trainer' → its attribute 'lock'"):
        coordinator.schedule(lambda: trainer)
    with pytest.raises(TypeError, match=r"argument 1 of .* → its element 2, of type generator"):
        coordinator.schedule(lambda x, y: x, args=(1, [0, 0, (i for i in ())]))
    assert coordinator.done()
    assert coordinator.schedule(lambda: 3).get() == 3


def test_a_result_that_cannot_be_pickled_is_named(start: Start) -> None:
    coordinator = start().coordinator
    value = coordinator.schedule(lambda: {"a": 1, "lock": threading.Lock()})
    with pytest.raises(TypeError, match=r"what .*<lambda> returned → its entry 'lock'"):
        value.get()
    with pytest.raises(TypeError, match="lock"):
        coordinator.join()


def test_an_error_is_raised_once_and_by_its_value_always(start: Start) -> None:
    coordinator = start().coordinator
    failed = coordinator.schedule(fail)
    for _ in range(2):
        with pytest.raises(KeyError, match="no"):
            failed.fetch()
    with pytest.raises(KeyError, match="no"):
        coordinator.join()
    coordinator.join()
    assert coordinator.done()
    with pytest.raises(KeyError):
        failed.get()
    assert coordinator.schedule(lambda: 1).get() == 1


@pytest.mark.parametrize("call", ["schedule", "join", "done"])
def test_who_raises_the_error(start: Start, call: str) -> None:
    coordinator = start().coordinator
    failed = coordinator.schedule(fail)
    with pytest.raises(KeyError):
        failed.get()
    arguments = [lambda: None] if call == "schedule" else []
    with pytest.raises(KeyError):
        getattr(coordinator, call)(*arguments)
    assert coordinator.done()


def test_the_first_error_is_the_one(start: Start) -> None:
    coordinator = start(1).coordinator
    failed = [coordinator.schedule(fail, args=(f"error {i}",)) for i in range(3)]
    with pytest.raises(KeyError, match="error 0"):
        coordinator.join()
    for i, value in enumerate(failed):
        with pytest.raises((KeyError, CancelledError), match=f"error {i}|cancelled.*error 0"):
            value.get()


def test_an_error_cancels_what_waits_and_waits_for_what_runs(start: Start) -> None:
    threads = start(2)
    coordinator = threads.coordinator
    slow, bad, behind = (Waiting(threads, name) for name in ("slow", "bad", "behind"))
    running = coordinator.schedule(slow)
    assert slow.begun.wait(20)
    failed = coordinator.schedule(fail_after, args=(bad,))
    assert bad.begun.wait(20)
    also = coordinator.schedule(behind)
    waiting = [coordinator.schedule(slow) for _ in range(5)]
    bad.gate.set()
    with pytest.raises(KeyError):
        failed.get()
    assert behind.begun.wait(20)
    joined: list[BaseException] = []

    def join() -> None:
        try:
            coordinator.join()
        except KeyError as error:
            joined.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()  # two are under way
    slow.gate.set()
    behind.gate.set()
    thread.join(20)
    assert len(joined) == 1
    assert coordinator.fetch([running, also]) == ["slow", "behind"]
    for value in waiting:
        with pytest.raises(CancelledError, match="KeyError"):
            value.get()
    coordinator.join()


def test_worker_index_is_known_in_closures_only(start: Start) -> None:
    threads = start(2)
    with pytest.raises(RuntimeError, match="outside a function"):
        experimental_get_current_worker_index()
    values = [
        threads.coordinator.schedule(lambda: experimental_get_current_worker_index())
        for _ in range(20)
    ]
    assert set(threads.coordinator.fetch(values)) <= {0, 1}


def test_the_coordinator_is_not_on_workers(start: Start) -> None:
    coordinator = start(1).coordinator

    class Trainer:
        def __init__(self) -> None:
            self.coordinator = coordinator

        def step(self) -> int:
            return 5

        def wrong(self) -> None:
            self.coordinator.join()

    assert coordinator.schedule(Trainer().step).get() == 5
    with pytest.raises(RuntimeError, match="join was asked for on a worker"):
        coordinator.schedule(Trainer().wrong).get()


@pytest.mark.parametrize("later", [False, True])
def test_every_free_worker_takes_the_next(start: Start, later: bool) -> None:
    """A slow one holds up none that wait behind it, though short ones were sent several at a time."""
    threads = start(2)
    coordinator = threads.coordinator
    for _ in range(200):
        coordinator.schedule(lambda: None)
    coordinator.join()
    slow = Waiting(threads, "slow")
    coordinator.schedule(slow)
    if later:
        assert slow.begun.wait(20)
    for _ in range(3):
        values = [coordinator.schedule(lambda: 1) for _ in range(150)]
        assert coordinator.fetch(values) == [1] * 150
    assert not coordinator.done()
    slow.gate.set()
    coordinator.join()


def test_order_with_one_worker(start: Start) -> None:
    threads = start(1)
    for _ in range(300):
        threads.coordinator.schedule(lambda: None)
    threads.coordinator.join()
    assert [closure for _, closure in threads.begun] == list(range(1, 301))


def test_short_ones_go_several_at_a_time(start: Start) -> None:
    threads = start(1)
    gate = Waiting(threads, "gate")
    threads.coordinator.schedule(lambda: None).get()
    first = threads.coordinator.schedule(gate)
    for _ in range(1000):
        threads.coordinator.schedule(lambda: None)
    gate.gate.set()
    first.get()
    threads.coordinator.join()
    assert threads.chief.notices.count("closures") < 500
    assert threads.job[1].notices.count("outcomes of closures") < 500


def test_servers_are_told_what_is_over(start: Start) -> None:
    """They hear of 64 closures at a time. Which closures end last is chance, so 64 more tell of the first 1000."""
    threads = start(2)
    for count in (1000, 64):
        for _ in range(count):
            threads.coordinator.schedule(lambda: None)
        threads.coordinator.join()
    eventually(lambda: bool(threads.over) and threads.over[-1][1] > 1000)
    over = [closure for closures, _ in threads.over for closure in closures]
    assert len(over) == len(set(over))
    assert set(over) >= set(range(1, 1001))
    befores = [before for _, before in threads.over]
    assert befores == sorted(befores)
    assert befores[-1] <= 1065


def test_a_closure_of_a_lost_worker_runs_elsewhere(start: Start) -> None:
    threads = start(2)
    coordinator = threads.coordinator
    slow = Waiting(threads, "slow")
    value = coordinator.schedule(slow)
    assert slow.begun.wait(20)
    ((loser, closure),) = threads.begun
    threads.kill(loser)
    eventually(lambda: len(threads.begun) == 2)
    assert threads.begun[1] == (1 - loser, closure)
    slow.gate.set()
    assert value.get() == "slow"
    assert coordinator.fetch([coordinator.schedule(lambda: 1) for _ in range(50)]) == [1] * 50
    coordinator.join()
    # Never named alone: what the lost one has sent may come late.
    assert closure not in [other for closures, _ in threads.over for other in closures]


def test_without_workers_everything_fails(start: Start) -> None:
    threads = start(2)
    coordinator = threads.coordinator
    slow = Waiting(threads, "slow")
    values = [coordinator.schedule(slow) for _ in range(5)]
    threads.kill(0)
    threads.kill(1)
    for value in values:
        with pytest.raises(UnavailableError, match="no worker is left"):
            value.get()
    with pytest.raises(UnavailableError, match="none comes back"):
        coordinator.join()
    coordinator.join()
    assert coordinator.done()
    with pytest.raises(UnavailableError, match="no worker is left"):
        coordinator.schedule(lambda: 1)


def test_an_error_of_the_chiefs_thread_is_raised(start: Start) -> None:
    threads = start(1)
    slow = Waiting(threads, "slow")
    threads.coordinator.schedule(slow)
    value = threads.coordinator.schedule(lambda: 1)
    assert slow.begun.wait(20)
    threads.chief.inbox.put((1, "unknown", b"\x80\x04N."))
    with pytest.raises(UnavailableError, match="cannot hear its workers any more: KeyError"):
        value.get()


def test_schedule_does_not_wait(start: Start) -> None:
    threads = start(1)
    slow = Waiting(threads, "slow")
    threads.coordinator.schedule(slow)
    begin = time.monotonic()
    for _ in range(100):
        threads.coordinator.schedule(lambda: None)
    assert time.monotonic() - begin < 10  # the gate stays closed for 30 s
    slow.gate.set()
    threads.coordinator.join()


def test_a_worker_that_cannot_read_while_it_executes_ends_the_job(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads meanwhile has nobody who would hear of its error."""
    ended: list[tuple[str, int]] = []
    job_end = SimpleNamespace(end_job=lambda text, code: ended.append((text, code)))
    module = SimpleNamespace(job_end=lambda: job_end)
    monkeypatch.setitem(sys.modules, "mpistrat.liveness.ending.job_end", module)  # it needs MPI
    threads = start(1)
    waiting = Waiting(threads, "waiting")
    value = threads.coordinator.schedule(waiting)
    assert waiting.begun.wait(20)
    threads.chief.notify(1, "closures", "nonsense")
    eventually(lambda: bool(ended))
    text, code = ended[0]
    assert text.startswith(
        "ending the job: worker 0 (rank 1) cannot take closures any more: ValueError"
    )
    assert code == 1
    waiting.gate.set()
    assert value.get() == "waiting"


def test_what_is_told_of_a_coordinator_and_its_values(start: Start) -> None:
    threads = start(1)
    coordinator = threads.coordinator
    slow = Waiting(threads, "slow")
    first = coordinator.schedule(slow)
    assert slow.begun.wait(20)
    second = coordinator.schedule(lambda: {"a": np.zeros((3, 4), "float32"), "b": 5})
    assert repr(first) == "<RemoteValue of Waiting: with worker 0>"
    assert repr(second).endswith(".<lambda>: waiting>")
    assert repr(coordinator) == "<ClusterCoordinator workers=1 waiting=1 under_way=1>"
    slow.gate.set()
    coordinator.join()
    assert repr(second).endswith(".<lambda>: ready, by worker 0>")
    second.get()
    assert "'a': ArraySpec(shape=(3, 4), dtype='float32'" in repr(second)
    assert "'b': 5" in repr(second)
    assert repr(PerWorkerValues([first])) == f"PerWorkerValues([{first!r}])"
    failed = coordinator.schedule(fail)
    with pytest.raises(KeyError):
        coordinator.join()
    assert repr(failed) == "<RemoteValue of fail: KeyError: 'no'>"
