"""The arguments of dataset functions and value functions: the replicas that the function works for."""

from __future__ import annotations

import dataclasses

from mpistrat.options import is_integer


@dataclasses.dataclass(frozen=True)
class InputContext:
    """Tells a dataset function its input pipeline's number, and the number of replicas.

    An input pipeline is one call of the dataset function: one for each rank, or, with PER_REPLICA, for each replica.

    Args:
        num_input_pipelines: number of pipelines on all ranks.
        input_pipeline_id: number of this pipeline, 0 <= id < num_input_pipelines.
        num_replicas_in_sync: number of replicas on all ranks.
    Raises: ValueError if an argument is out of range, TypeError if it is no integer.

    Example:
        >>> context = ms.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
        >>> context.get_per_replica_batch_size(64)
        16
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_integer(field.name, getattr(self, field.name))
        if not 0 <= self.input_pipeline_id < self.num_input_pipelines:
            raise ValueError(
                f"input_pipeline_id must be at least 0 and less than num_input_pipelines, "
                f"{self.num_input_pipelines}; got {self.input_pipeline_id}"
            )
        if self.num_replicas_in_sync < 1:
            raise ValueError(
                f"num_replicas_in_sync must be positive, got {self.num_replicas_in_sync}"
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of examples that one replica gets of a global batch.

        Raises: ValueError if `global_batch_size` does not divide by the number of replicas.
        """
        _check_integer("global_batch_size", global_batch_size)
        if global_batch_size % self.num_replicas_in_sync != 0:
            raise ValueError(
                f"the global batch size {global_batch_size} does not divide by the number of replicas, "
                f"{self.num_replicas_in_sync}"
            )
        return global_batch_size // self.num_replicas_in_sync


def _check_integer(name: str, value: object) -> None:
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, got {value!r:.60}")


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """Tells a value function the number of the replica that it makes a value for.

    Attributes:
        replica_id_in_sync_group: number of the replica, 0 <= id < num_replicas_in_sync.
        num_replicas_in_sync: number of replicas on all ranks.

    Example:
        >>> strategy = ms.OneDeviceStrategy("cpu")
        >>> strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
        0
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            f"mpistrat.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f" total replicas in sync: {self.num_replicas_in_sync})"
        )
