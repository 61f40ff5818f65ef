"""The strategy of tf.contrib.distribute: the last rank has the variables, the others are workers."""

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.compat import contrib, v1
from support.parameter_servers.remote_jobs import strategy_on_servers, workers_of
from support.rank_errors import errors_of_ranks

pytestmark = pytest.mark.mpi(min_size=2)
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
WORKERS = SIZE - 1
CLUSTER = {"worker": [f"h{i}:1" for i in range(WORKERS)], "ps": ["p:1"]}
TASK = {"task_type": "ps", "task_id": 0}
if RANK < WORKERS:
    TASK = {"task_type": "worker", "task_id": RANK}


@pytest.mark.parametrize(
    "make",
    [
        lambda: contrib.ParameterServerStrategy(0, CLUSTER, *TASK.values()),
        lambda: v1.ParameterServerStrategy(cluster_spec=CLUSTER, **TASK),
    ],
    ids=["contrib", "v1"],
)
def test_workers_share_variables(make):
    with strategy_on_servers(make) as strategy:
        if strategy is None:
            assert RANK == WORKERS
            return
        assert strategy.cluster_resolver.task_type == "worker"
        assert strategy.cluster_resolver.task_id == RANK
        with strategy.scope():
            total = ms.Variable(0.0)
        strategy.run(lambda: total.assign_add(1.0))
        workers_of(strategy).Barrier()
        assert float(total) == WORKERS


def test_batches_are_of_one_replica_and_dealt_out():
    batches = [np.full(12, i) for i in range(2 * WORKERS + 1)]
    with strategy_on_servers(
        lambda: contrib.ParameterServerStrategy(0, CLUSTER, *TASK.values())
    ) as strategy:
        if strategy is None:
            return
        own = [batch.tolist() for batch in strategy.make_dataset_iterator(batches)]
        assert own == [batch.tolist() for batch in batches[RANK::WORKERS]]
        # Of global batches, as everywhere: this worker's part of each.
        parts = [len(batch) for batch in strategy.experimental_distribute_dataset(batches)]
        assert parts == [12 // WORKERS] * len(batches)


def test_gpus_that_a_worker_lacks_are_an_error_on_all():
    """A server may lack them."""
    errors = errors_of_ranks(lambda: contrib.ParameterServerStrategy(99, CLUSTER, *TASK.values()))
    assert len(errors) == SIZE
    assert all("device 'cuda:0' does not exist" in text for _, text, _ in errors)
    assert f"rank {WORKERS} cannot" not in "".join(text for _, text, _ in errors)


def test_a_task_that_one_rank_lacks_is_an_error_on_all():
    task = TASK if RANK else {**TASK, "task_id": None}
    errors = errors_of_ranks(lambda: contrib.ParameterServerStrategy(0, CLUSTER, *task.values()))
    assert {kind for kind, _, _ in errors} == {"ValueError"}
    assert all(text.startswith("rank 0: ") and "give both" in text for _, text, _ in errors)
    assert all("rank 0: cluster_spec names task_type=" in text for _, text, _ in errors)
