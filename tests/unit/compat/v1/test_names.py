"""The names of `tf.compat.v1.distribute`, and methods under their old names."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.compat import v1

# As the page https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/compat/v1/distribute lists them.
OF_TENSORFLOW = {
    *("cluster_resolver", "experimental", "CrossDeviceOps", "HierarchicalCopyAllReduce"),
    *("InputContext", "InputReplicationMode", "MirroredStrategy", "NcclAllReduce"),
    *("OneDeviceStrategy", "ReduceOp", "ReductionToOneDevice", "ReplicaContext", "Server"),
    *("Strategy", "StrategyExtended", "experimental_set_strategy", "get_loss_reduction"),
    *("get_replica_context", "get_strategy", "has_strategy", "in_cross_replica_context"),
}
OF_THEIR_OWN = {
    *("MirroredStrategy", "OneDeviceStrategy", "Strategy"),
    *("experimental", "get_loss_reduction", "get_strategy"),
}


@pytest.mark.parametrize("name", sorted(OF_TENSORFLOW))
def test_names_are_there_and_most_are_the_same_things(name):
    same = getattr(v1, name) is getattr(ms, name, None)
    assert same == (name not in OF_THEIR_OWN)


STRATEGIES = {
    "default": ms.get_strategy,
    "default of v1": v1.get_strategy,
    "one device": lambda: ms.OneDeviceStrategy("cpu"),
    "mirrored": lambda: ms.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored of v1": lambda: v1.MirroredStrategy(["cpu:0", "cpu:1"]),
    "multi worker": ms.MultiWorkerMirroredStrategy,
    "central storage": ms.experimental.CentralStorageStrategy,
    "parameter servers of v1": v1.ParameterServerStrategy,
}


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_the_old_name_of_distribute_datasets_from_function(make):
    strategy = make()

    def dataset_fn(context):
        size = context.get_per_replica_batch_size(4)
        return [np.arange(size) + 10 * i for i in range(2)]

    def steps(distribute):
        batches = [strategy.experimental_local_results(batch) for batch in distribute(dataset_fn)]
        return [[part.tolist() for part in parts] for parts in batches]

    new = steps(strategy.distribute_datasets_from_function)
    assert len(new) == 2 / strategy.num_replicas_in_sync
    assert steps(strategy.experimental_distribute_datasets_from_function) == new


def test_the_old_name_takes_options():
    options = ms.InputOptions(experimental_replication_mode=ms.InputReplicationMode.PER_REPLICA)
    strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
    contexts = []

    def dataset_fn(context):
        contexts.append(context.input_pipeline_id)
        return [np.zeros(1)]

    assert len([*strategy.experimental_distribute_datasets_from_function(dataset_fn, options)]) == 1
    assert contexts == [0, 1]
