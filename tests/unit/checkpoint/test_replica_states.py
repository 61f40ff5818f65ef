"""Copies of ON_READ variables go on by the ids of replicas, however these were and are spread over ranks.

The ranks are played by communicators that know nothing but their rank.
"""

import pytest

import mpistrat as ms
from mpistrat.checkpoint.object_states import stateful
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.strategies.strategy_parts import mirrored
from mpistrat.strategy import Strategy

MEAN, NONE = ms.VariableAggregation.MEAN, ms.VariableAggregation.NONE


class Rank(LocalCommunicator):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class OfRank(Strategy):
    """What one rank has of a strategy whose ranks have these numbers of replicas."""

    def __init__(self, rank: int, replicas: list[int]) -> None:
        devices = tuple(f"cpu:{i}" for i in range(replicas[rank]))
        group = ReplicaGroup(Rank(rank, len(replicas)), devices, tuple(replicas))
        super().__init__(mirrored(self, group))

    def variable(self, value: float, aggregation: ms.VariableAggregation) -> ms.Variable:
        with self.scope():
            return ms.Variable(
                value,
                synchronization=ms.VariableSynchronization.ON_READ,
                aggregation=aggregation,
            )


def saved_by(replicas: list[int], aggregation: ms.VariableAggregation) -> dict:
    """The states of ranks, whose copies are the ids of their replicas."""
    states = {}
    for rank in range(len(replicas)):
        strategy = OfRank(rank, replicas)
        variable = strategy.variable(0.0, aggregation)
        for i, copy in enumerate(variable.values):
            copy.assign(float(strategy.extended.first_replica_id + i))
        states[rank] = stateful("it", variable).rank_state_dict()
    return states


def copies_after(states: dict, replicas: list[int], aggregation: ms.VariableAggregation) -> list:
    """All replicas' copies, in order; -1 was there before."""
    copies = []
    for rank in range(len(replicas)):
        variable = OfRank(rank, replicas).variable(-1.0, aggregation)
        stateful("it", variable).load_rank_state_dicts(states)
        copies += [float(copy.numpy()) for copy in variable.values]
    return copies


SPREADS = [([2, 1], [2, 1]), ([2, 1], [3]), ([3], [1, 2]), ([1, 2], [2, 1]), ([1, 1], [1, 1])]


@pytest.mark.parametrize(("before", "after"), SPREADS)
@pytest.mark.parametrize("aggregation", [MEAN, NONE])
def test_each_replica_has_its_copy(before, after, aggregation) -> None:
    assert copies_after(saved_by(before, aggregation), after, aggregation) == [*range(sum(after))]


@pytest.mark.parametrize(("before", "after"), [([3, 1], [1, 1]), ([1, 1], [2, 1])])
def test_other_numbers_of_replicas(before, after) -> None:
    """The combined value, which is loaded first, stays."""
    assert copies_after(saved_by(before, MEAN), after, MEAN) == [-1] * sum(after)
    message = f"each of {sum(before)} replicas saved its own copy, and this job has {sum(after)}"
    with pytest.raises(ValueError, match=message):
        copies_after(saved_by(before, NONE), after, NONE)


def test_a_copy_that_was_lost_with_its_rank() -> None:
    states = saved_by([1, 2], MEAN)
    del states[0]
    assert copies_after(states, [2, 1], MEAN) == [-1, 1, 2]
    states = saved_by([1, 2], NONE)
    del states[0]
    with pytest.raises(ValueError, match="saved its own copy, and 0's is lost"):
        copies_after(states, [2, 1], NONE)
