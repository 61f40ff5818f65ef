"""Asking what a step looks like takes no step, and no random number, of any kind of dataset."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import mpistrat as ms
from mpistrat import InputOptions, InputReplicationMode

EXAMPLES = TensorDataset(torch.arange(16.0))


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(16.0))


def batches() -> list[np.ndarray]:
    return [np.arange(4.0 * i, 4 * i + 4) for i in range(4)]


SOURCES = {
    "list": batches,
    "generator": lambda: (batch for batch in batches()),
    "iterator": lambda: iter(batches()),
    "arrays": lambda: ms.input.BatchedDataset(np.arange(16.0), 4, shuffle=True),
    "loader": lambda: DataLoader(EXAMPLES, 4, shuffle=True),
    "loader of a stream": lambda: DataLoader(Stream(), 4),
    "iterator of a loader": lambda: iter(DataLoader(EXAMPLES, 4)),
}
MAKE: dict[str, Callable[[Any, Callable[[], Any]], Any]] = {
    "dataset": lambda strategy, source: strategy.experimental_distribute_dataset(source()),
    "function": lambda s, source: s.distribute_datasets_from_function(lambda _: source()),
    "function of replicas": lambda s, source: s.distribute_datasets_from_function(
        lambda _: source(),
        InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA),
    ),
}


def no_spec(dataset: Any, epoch: Callable[[Any], list[Any]]) -> list[Any]:
    return epoch(iter(dataset))


def of_the_dataset(dataset: Any, epoch: Callable[[Any], list[Any]]) -> list[Any]:
    assert dataset.element_spec == dataset.element_spec
    return epoch(iter(dataset))


def of_an_iterator(dataset: Any, epoch: Callable[[Any], list[Any]]) -> list[Any]:
    iterator = iter(dataset)
    assert iterator.element_spec == dataset.element_spec
    return epoch(iterator)


def on_the_way(dataset: Any, epoch: Callable[[Any], list[Any]]) -> list[Any]:
    iterator = iter(dataset)
    first = epoch(itertools.islice(iterator, 1))
    assert dataset.element_spec == iterator.element_spec
    return first + epoch(iterator)


@pytest.mark.filterwarnings("ignore:each of the:UserWarning")
@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("source", SOURCES)
def test_it_takes_nothing(source: str, make: str) -> None:
    strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])

    def read(use: Callable[..., list[Any]]) -> list[Any]:
        def epoch(steps: Any) -> list[Any]:
            return [
                [np.asarray(part).tolist() for part in strategy.experimental_local_results(leaf)]
                for step in steps
                for leaf in (step if isinstance(step, (list, tuple)) else [step])
            ]

        torch.manual_seed(1)
        np.random.seed(1)
        dataset = MAKE[make](strategy, SOURCES[source])
        epochs = [use(dataset, epoch), use(dataset, epoch) if source in ("list", "loader") else []]
        return [*epochs, torch.rand(1).item(), np.random.random()]

    expected = read(no_spec)
    assert expected[0]
    for use in (of_the_dataset, of_an_iterator, on_the_way):
        assert read(use) == expected
