"""Of `run_elastic` what needs no MPI; tests/launch kills ranks."""

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
    comm = SimpleNamespace(size=2)

    def exchange(self, states: dict[int, bytes]) -> None:
        pass


def test_times_of_commits_take_no_more_memory_for_ever() -> None:
    survivors: Any = TwoSurvivors()
    elastic = Elastic(None, survivors, 1, 1)
    with ms.OneDeviceStrategy("cpu:0").scope():
        elastic._checkpoint = ms.checkpoint.Checkpoint(total=ms.Variable(np.zeros(())))
    for _ in range(1003):
        elastic._keep()
    assert elastic.explain().startswith("1003 states were committed")
    assert len(elastic._seconds) == 1000
