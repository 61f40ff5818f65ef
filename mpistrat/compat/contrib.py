"""`tf.contrib.distribute`: the strategy with parameter servers, as it was there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpistrat.cluster_resolver.roles.task_roles import Cluster
from mpistrat.compat.v1 import strategy as v1
from mpistrat.compat.v1.datasets import BatchesOfWorker
from mpistrat.input import DistributedIterator
from mpistrat.input.distribution import distribute_from_function
from mpistrat.options import InputOptions

__all__ = ["ParameterServerStrategy"]


def __dir__() -> list[str]:
    return __all__


class ParameterServerStrategy(v1.ParameterServerStrategy):
    """`mpistrat.compat.v1.ParameterServerStrategy`, with the arguments that `tf.contrib.distribute` had.

    Called by: every rank of the job. On a server's rank the constructor serves, and leaves by SystemExit.
    Args:
        num_gpus_per_worker: the first so many GPUs that this rank sees, one replica each; 0 is one replica on the CPU.
        cluster_spec: the cluster: a dict such as {"worker": ["a", "b"], "ps": ["c"]}, or a ClusterSpec; None is that
            of TF_CONFIG. Where neither names one, a single rank keeps the variables itself.
        task_type, task_id: this rank's task; None is that of TF_CONFIG.
    Raises: ValueError, on all ranks: `cluster_spec` without `task_type` or `task_id`, and what is no cluster with
        servers and workers. TopologyError, on all ranks: the cluster has other tasks than the job has ranks.
    """

    def __init__(
        self,
        num_gpus_per_worker: int = 0,
        cluster_spec: Cluster = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        super().__init__(
            num_gpus_per_worker=num_gpus_per_worker,
            cluster_spec=cluster_spec,
            task_type=task_type,
            task_id=task_id,
        )

    def make_dataset_iterator(self, dataset: Any) -> DistributedIterator:
        """An iterator that gives each replica whole batches of `dataset`: batches are of ONE replica, not global.

        The replicas of all workers take them in turn. What does not fill a step of a worker's replicas is left out.
        `experimental_distribute_dataset` takes global batches, as everywhere.

        Called by: each worker, with a dataset that yields the same batches on all.
        """
        if not isinstance(dataset, Iterable):
            raise ValueError(f"a dataset must be an iterable of batches, got {dataset!r:.60}")
        batches = BatchesOfWorker(dataset, self.extended.input.share)
        options = InputOptions()
        return iter(distribute_from_function([batches], self.extended, options, partial=False))
