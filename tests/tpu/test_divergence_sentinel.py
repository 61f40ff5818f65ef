"""A sentinel compares what is on XLA devices, in the middle of a step that is being recorded, too."""

from __future__ import annotations

import pytest
import torch

import mpistrat as ms
from mpistrat import xla
from support.xla.trained_models import Training

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:each of the .* ranks reads all batches"),
]


def test_a_parameter_that_one_rank_changes_is_noticed() -> None:
    training = Training(ms.TPUStrategy(gradients="sum"), "momentum")
    strategy = training.strategy
    rank, ranks = strategy.extended.communicator.rank, strategy.num_replicas_in_sync
    sentinel = ms.fault_tolerance.DivergenceSentinel(strategy, every=2)
    training.run()
    sentinel.check()
    if rank == ranks - 1:
        with torch.no_grad():
            training.model[0].weight[0, 2] += 1.0  # type: ignore[index,union-attr]
    if ranks == 1:
        training.run()
        sentinel.check()
        return
    with pytest.raises(
        ms.errors.DivergenceError, match=r"Sequential.0.weight is not the same"
    ) as e:
        training.run()
    assert "in call 6 of backward(); all was equal at a check after 4 calls" in str(e.value)
    assert f"rank {ranks - 1}: 1 of 32 elements, most at [0, 2]" in str(e.value)
    strategy.mirror(training.model)
    training.run()
    sentinel.check()


def test_a_comparison_makes_no_other_graphs() -> None:
    compiled = []
    for every in (1000, 1):
        training = Training(ms.TPUStrategy(gradients="sum"), "momentum")
        ms.fault_tolerance.DivergenceSentinel(training.strategy, every)
        before = xla.start().graphs.num_compilations()
        training.run()
        compiled.append(xla.start().graphs.num_compilations() - before)
    assert compiled[1] == 0
