"""What an input function, or a function of values, is told about its place."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class InputContext:
    """Which input pipeline a dataset function is to make, and for how many replicas.

    Args:
        num_input_pipelines: pipelines over all ranks.
        input_pipeline_id: this one, 0 <= id < num_input_pipelines.
        num_replicas_in_sync: replicas over all ranks.
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
        """One replica's share of a global batch; ValueError unless it divides evenly."""
        _check_integer("global_batch_size", global_batch_size)
        if global_batch_size % self.num_replicas_in_sync != 0:
            raise ValueError(
                f"the global batch size {global_batch_size} does not divide by the number of replicas, "
                f"{self.num_replicas_in_sync}"
            )
        return global_batch_size // self.num_replicas_in_sync


def _check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r:.60}")


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """For which replica a value function makes a value."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            f"mpistrat.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f" total replicas in sync: {self.num_replicas_in_sync})"
        )
