"""Datasets and values with a part on each worker; the workers are threads."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mpistrat.coordinator import PerWorkerValues, experimental_get_current_worker_index
from mpistrat.errors import ClosureInputError, OutOfRangeError, UnavailableError
from mpistrat.input import ArraySpec
from mpistrat.parameter_server.coordinator.per_worker import UnbuiltDataset
from support.parameter_servers.coordinated_threads import Threads, eventually

Start = Callable[..., Threads]


ITERATORS: weakref.WeakSet[Any] = weakref.WeakSet()


class TwoElements:
    """Two elements; ITERATORS are the iterators that somebody still has."""

    def __iter__(self) -> Iterator[int]:
        made = (number for number in (1, 2))
        ITERATORS.add(made)
        return made


def take_all(iterator: Any) -> list[Any]:
    return list(iterator)


def test_each_worker_has_its_own_iterator(start: Start) -> None:
    threads = start(2)
    dataset = threads.coordinator.create_per_worker_dataset(
        lambda: [10 * experimental_get_current_worker_index() + i for i in range(3)]
    )
    iterator = iter(dataset)
    seen = []
    for _ in range(40):
        value = threads.coordinator.schedule(next, args=(iterator, None))
        seen.append(value.get())
    assert sorted(number for number in seen if number is not None) in (
        [0, 1, 2],
        [0, 1, 2, 10, 11, 12],
        [10, 11, 12],
    )
    again = threads.coordinator.schedule(take_all, args=(iter(dataset),)).get()
    assert again in ([0, 1, 2], [10, 11, 12])


def test_the_end_is_an_out_of_range_error(start: Start) -> None:
    coordinator = start(1).coordinator
    iterator = iter(coordinator.create_per_worker_dataset([1]))
    assert coordinator.schedule(next, args=(iterator,)).get() == 1
    for call in (next, lambda own: own.get_next()):
        with pytest.raises(OutOfRangeError):
            coordinator.schedule(call, args=(iterator,)).get()
        with pytest.raises(OutOfRangeError):
            coordinator.join()
    assert (
        coordinator.schedule(
            lambda own: own.get_next_as_optional().has_value(),
            (iterator,),
        ).get()
        is False
    )
    assert coordinator.schedule(take_all, args=(iterator,)).get() == []


def test_iterators_may_be_captured_too(start: Start) -> None:
    coordinator = start(1).coordinator
    iterator = iter(coordinator.create_per_worker_dataset(range(3)))
    assert coordinator.fetch([coordinator.schedule(lambda: next(iterator)) for _ in range(3)]) == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize("wrong", [5, None, object()])
def test_what_is_no_dataset(start: Start, wrong: Any) -> None:
    coordinator = start(1).coordinator
    with pytest.raises(ValueError, match="takes a dataset function or a dataset"):
        coordinator.create_per_worker_dataset(wrong)
    with pytest.raises(ValueError, match="must return a dataset"):
        coordinator.create_per_worker_dataset(lambda: wrong)
    assert coordinator.done()  # no error of anything scheduled


def test_a_dataset_function_that_fails_says_so_at_once(start: Start) -> None:
    coordinator = start(1).coordinator

    def broken() -> Any:
        raise FileNotFoundError("no such file")

    with pytest.raises(FileNotFoundError, match="no such file"):
        coordinator.create_per_worker_dataset(broken)
    coordinator.join()


class Known(list[int]):
    """Lists themselves are always copied."""


def test_a_dataset_function_that_fails_on_another_worker(start: Start) -> None:
    """The one that tried it could make it; the other cannot, and the closure's error tells why."""
    threads = start(2)
    first = Known()
    threads.things.by_name["first"] = first

    def only_once() -> list[int]:
        if first:
            raise FileNotFoundError("not on this node")
        first.append(experimental_get_current_worker_index())
        return [1]

    iterator = iter(threads.coordinator.create_per_worker_dataset(only_once))
    threads.kill(first[0])
    with pytest.raises(ClosureInputError, match="FileNotFoundError: not on this node") as caught:
        threads.coordinator.schedule(next, args=(iterator,)).get()
    assert isinstance(caught.value.original, FileNotFoundError)


def test_what_cannot_be_pickled_in_a_dataset_function(start: Start) -> None:
    lock = threading.Lock()
    with pytest.raises(
        TypeError, match=r"the dataset function → its variable 'lock', of type _thread.lock"
    ):
        start(1).coordinator.create_per_worker_dataset(lambda: [lock])


def test_next_is_for_workers(start: Start) -> None:
    iterator = iter(start(1).coordinator.create_per_worker_dataset([1]))
    for call in (lambda: next(iterator), iterator.get_next, iterator.get_next_as_optional):
        with pytest.raises(NotImplementedError, match=r"ClusterCoordinator\.schedule"):
            call()


def test_element_spec_takes_no_element(start: Start) -> None:
    def elements() -> Iterator[Any]:
        yield {"x": np.zeros((2, 3), "float32"), "y": 1}
        yield 2

    coordinator = start(1).coordinator
    dataset = coordinator.create_per_worker_dataset(elements)
    assert dataset.element_spec == {"x": ArraySpec((2, 3), "float32"), "y": ArraySpec((), "int64")}
    iterator = iter(dataset)
    assert iterator.element_spec is dataset.element_spec
    assert len(coordinator.schedule(take_all, args=(iterator,)).get()) == 2


@pytest.mark.parametrize("taken", [1, 3])
@pytest.mark.parametrize("elements", [lambda: [1, 2, 3], lambda: iter([1, 2, 3])])
def test_element_spec_of_what_goes_on_takes_no_element(
    start: Start, elements: Callable[[], Any], taken: int
) -> None:
    coordinator = start(1).coordinator
    dataset = coordinator.create_per_worker_dataset(elements)
    iterator = iter(dataset)
    for _ in range(taken):
        coordinator.schedule(next, args=(iterator,)).get()
    if taken < 3 or isinstance(elements(), list):
        assert dataset.element_spec == iterator.element_spec == ArraySpec((), "int64")
    assert coordinator.schedule(take_all, args=(iterator,)).get() == [2, 3][taken - 1 :]


def test_a_strategys_dataset_is_for_the_coordinator(start: Start) -> None:
    unbuilt = UnbuiltDataset([7])
    for use in (lambda: iter(unbuilt), lambda: unbuilt.cardinality, lambda: unbuilt.element_spec):
        with pytest.raises(ValueError, match="create_per_worker_dataset"):
            use()
    coordinator = start(1).coordinator
    functions = lambda: unbuilt, lambda: UnbuiltDataset(lambda: [7])  # as in TensorFlow's guide
    for source in (unbuilt, *functions):
        iterator = iter(coordinator.create_per_worker_dataset(source))
        assert coordinator.schedule(next, args=(iterator,)).get() == 7
    with pytest.raises(ValueError, match="must return a dataset"):
        coordinator.create_per_worker_dataset(lambda: UnbuiltDataset(lambda: 7))


def test_values_per_worker(start: Start) -> None:
    threads = start(2)
    coordinator = threads.coordinator
    with pytest.raises(AssertionError, match="takes a RemoteValue"):
        PerWorkerValues([1])  # type: ignore[list-item]
    values = [coordinator.schedule(lambda i=i: f"of worker {i}") for i in range(2)]
    per_worker = PerWorkerValues(values)
    for _ in range(20):
        worker, got = coordinator.schedule(
            lambda value: (experimental_get_current_worker_index(), value), args=(per_worker,)
        ).get()
        assert got == f"of worker {worker}"
    with pytest.raises(ValueError, match="has 1 values, and there are 2 workers"):
        coordinator.schedule(lambda value: value, args=(PerWorkerValues(values[:1]),))


def test_workers_forget_what_nobody_has_any_more(start: Start) -> None:
    threads = start(1)
    coordinator = threads.coordinator
    dataset = coordinator.create_per_worker_dataset(TwoElements())
    for _ in range(5):
        assert coordinator.schedule(next, args=(iter(dataset),)).get() == 1

    def forgotten() -> bool:
        coordinator.schedule(lambda: None).get()
        gc.collect()
        return not ITERATORS

    eventually(forgotten)
    assert coordinator.schedule(take_all, args=(iter(dataset),)).get() == [1, 2]


def test_what_has_not_ended_at_the_end_fails(start: Start) -> None:
    threads = start(1)
    gate = threads.things.by_name["gate"] = threading.Event()
    values = [threads.coordinator.schedule(lambda: gate.wait(30)) for _ in range(3)]
    threads.coordinator.end()
    for value in values:
        with pytest.raises(UnavailableError, match="shut down"):
            value.get()
    gate.set()
    with pytest.raises(UnavailableError, match="shut down"):
        threads.coordinator.join()
    with pytest.raises(UnavailableError, match="shut down"):
        threads.coordinator.schedule(lambda: 1)
