"""Of `run_elastic` what needs no MPI; tests/launch kills ranks."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.fault_tolerance.elastic import Elastic, replicas_of


@pytest.mark.parametrize(
    ("total", "ranks", "expected"),
    [(4, 4, [1, 1, 1, 1]), (4, 3, [2, 1, 1]), (8, 3, [3, 3, 2]), (4, 1, [4])],
)
def test_replicas_are_taken_over(total: int, ranks: int, expected: list[int]) -> None:
    assert replicas_of(total, ranks) == expected


@pytest.mark.parametrize("name", ["min_replicas", "steps_per_copy"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_numbers_that_are_none(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive integer"):
        ms.fault_tolerance.run_elastic(lambda elastic: None, **{name: value})  # type: ignore[arg-type]


def test_one_rank_trains_as_ever() -> None:
    def train(elastic: ms.fault_tolerance.Elastic) -> int:
        strategy = elastic.strategy(deterministic=True)
        with strategy.scope():
            total = ms.Variable(np.zeros(()))
        assert elastic.restore(ms.checkpoint.Checkpoint(total=total)) == 0
        while elastic.step < 3:
            strategy.run(lambda: total.assign_add(1.0))
            elastic.commit()
        assert elastic.explain() == "no state was committed"
        return int(total.numpy())

    assert ms.fault_tolerance.run_elastic(train) == 3


def test_too_few_from_the_start() -> None:
    with pytest.raises(ms.errors.TooFewReplicasError, match="min_replicas=2"):
        ms.fault_tolerance.run_elastic(lambda elastic: elastic.strategy(), min_replicas=2)


class TwoSurvivors:
    """Their first 503 commits take a second each, all others two."""

    comm = SimpleNamespace(size=2)
    communicator = SimpleNamespace(barrier=lambda label: None)

    def __init__(self) -> None:
        self.exchanges = 0
        self.now = 0.0

    def exchange(self, states: dict[int, bytes]) -> None:
        self.exchanges += 1
        self.now += 1.0 if self.exchanges <= 503 else 2.0


def test_times_of_commits_take_no_more_memory_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last 1000 are kept: half of those took a second, and so the median is between the two."""
    survivors: Any = TwoSurvivors()
    monkeypatch.setattr(time, "perf_counter", lambda: survivors.now)
    elastic = Elastic(None, survivors, 1, 1)
    with ms.OneDeviceStrategy("cpu:0").scope():
        elastic.restore(ms.checkpoint.Checkpoint(total=ms.Variable(np.zeros(()))))
    for _ in range(1002):
        elastic.commit()
    assert elastic.explain().startswith("1003 states were committed")
    assert elastic.explain().endswith(" in 1.5e+03 ms")
