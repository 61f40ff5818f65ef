"""The strategy of tf.contrib.distribute on one rank; tests/mpi/test_contrib.py has it with servers."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.cluster_resolver import SimpleClusterResolver
from mpistrat.compat import contrib, v1
from mpistrat.compat.v1.datasets import BatchesOfWorker
from mpistrat.replicas.input_plan import Share

CLUSTER = {"worker": ["a:1", "b:1"], "ps": ["c:1"]}


@pytest.mark.parametrize("cluster", [None, {}])
def test_local_training(cluster):
    strategy = contrib.ParameterServerStrategy(0, cluster)
    assert isinstance(strategy, v1.ParameterServerStrategy)
    assert strategy.num_replicas_in_sync == 1
    assert strategy.extended.worker_devices == ("cpu:0",)
    with strategy.scope():
        variable = ms.Variable(1.0)
    strategy.experimental_run_v2(lambda: variable.assign_add(2.0))
    assert float(variable) == 3.0


@pytest.mark.parametrize("kind", [contrib.ParameterServerStrategy, v1.ParameterServerStrategy])
@pytest.mark.parametrize("task", [{}, {"task_type": "worker"}, {"task_id": 0}])
def test_a_cluster_needs_a_task(kind, task):
    with pytest.raises(
        ValueError,
        match=r"cluster_spec names task_type=.* and task_id=.*, which is no task: give both",
    ):
        kind(cluster_spec=CLUSTER, **task)


WRONG = {
    "no servers": ({"cluster_spec": {"worker": ["a:1"]}}, "no parameter server"),
    "no cluster": ({"cluster_spec": 5}, "a cluster must be"),
    "a task of no cluster": ({}, "no parameter server"),
    "negative GPUs": ({"num_gpus_per_worker": -1}, "0 or more, got -1"),
    "no number": ({"num_gpus_per_worker": "2"}, "0 or more, got '2'"),
    "GPUs that are not there": ({"num_gpus_per_worker": 99}, "does not exist"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be(name):
    arguments, message = WRONG[name]
    gpus = "num_gpus_per_worker" in arguments
    task = {} if gpus else {"task_type": "worker", "task_id": 0}
    with pytest.raises(ValueError, match=message):
        contrib.ParameterServerStrategy(**arguments, **task)


def test_v1_takes_one_of_two():
    resolver = SimpleClusterResolver(
        ms.cluster_resolver.ClusterSpec(CLUSTER), task_type="worker", task_id=0
    )
    with pytest.raises(ValueError, match="leave out cluster_spec"):
        v1.ParameterServerStrategy(resolver, cluster_spec=CLUSTER, task_type="worker", task_id=0)
    with pytest.raises(ValueError, match="both name devices"):
        v1.ParameterServerStrategy(num_gpus_per_worker=0, devices=["cpu:0"])


def test_batches_are_of_one_replica():
    batches = [np.arange(3), np.arange(4), np.arange(5)]
    iterator = contrib.ParameterServerStrategy().make_dataset_iterator(batches)
    assert [len(batch) for batch in iterator] == [3, 4, 5]
    iterator.initialize()
    assert len(iterator.get_next()) == 3
    with pytest.raises(ValueError, match="iterable of batches"):
        contrib.ParameterServerStrategy().make_dataset_iterator(5)


def test_the_replicas_of_all_workers_take_batches_in_turn():
    shares = [Share(workers=2, worker=w, num_replicas=4, replicas=range(2)) for w in range(2)]
    dealt = [[*BatchesOfWorker(range(10), share)] for share in shares]
    assert dealt == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
