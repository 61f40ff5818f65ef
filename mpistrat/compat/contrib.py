"""`tf.contrib.distribute`: its strategy with parameter servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpistrat.cluster_resolver.task_roles import Cluster
from mpistrat.compat.v1 import strategy as v1
from mpistrat.compat.v1.datasets import BatchesOfWorker
from mpistrat.input import DistributedIterator
from mpistrat.input.distribution import distribute_from_function
from mpistrat.options import InputOptions

__all__ = ["ParameterServerStrategy"]


def __dir__() -> list[str]:
    return __all__


class ParameterServerStrategy(v1.ParameterServerStrategy):
    """`mpistrat.compat.v1.ParameterServerStrategy` with the arguments that it has in `tf.contrib.distribute`.

    Called by: every rank of the job. On a server's rank the constructor serves variables, and leaves by SystemExit.
    Args:
        num_gpus_per_worker: number of GPUs for a worker, one replica on each; 0 is one replica on the CPU. A worker
            takes the first GPUs that its rank sees.
        cluster_spec: the cluster: a dict such as {"worker": ["a", "b"], "ps": ["c"]}, or a ClusterSpec. None takes the
            cluster from TF_CONFIG. Without either, a single rank keeps the variables itself.
        task_type, task_id: this rank's task; None takes it from TF_CONFIG.
    Raises:
        ValueError: on all ranks, for a `cluster_spec` without `task_type` or `task_id`, and for a cluster without
            servers or workers.
        TopologyError: on all ranks, if the number of tasks in the cluster is not the number of ranks.

    Example:
        >>> strategy = ms.compat.contrib.ParameterServerStrategy()
        >>> iterator = strategy.make_dataset_iterator([np.ones(4), np.ones(4)])
        >>> [len(batch) for batch in iterator]
        [4, 4]
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
        """Return an iterator that gives each replica whole batches of `dataset`, and splits none.

        The replicas of all workers take the batches in turn. The last batches are left out if they do not suffice for
        all replicas of a worker. `experimental_distribute_dataset`, in contrast, splits global batches.

        Called by: each worker, with a dataset that yields the same batches on all workers.
        Raises: ValueError if `dataset` is no iterable.
        """
        if not isinstance(dataset, Iterable):
            raise ValueError(f"a dataset must be an iterable of batches, got {dataset!r:.60}")
        batches = BatchesOfWorker(dataset, self.extended.input.share)
        options = InputOptions()
        return iter(distribute_from_function([batches], self.extended, options, partial=False))
