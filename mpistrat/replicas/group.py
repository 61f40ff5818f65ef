"""The replicas of a strategy: this rank's devices, and the number of replicas of each rank."""

from __future__ import annotations

import dataclasses

from mpistrat.communicators import Communicator
from mpistrat.topology import Topology


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaGroup:
    """The replicas that a strategy combines, numbered from rank to rank.

    Attributes:
        communicator: the communicator of all ranks that have these replicas.
        worker_devices: this rank's devices, one replica each.
        replicas_of_ranks: number of replicas of each rank, in rank order.
        fixed_threads: number of intra-op threads of every rank, if results must not depend on how replicas are spread
            over ranks; else None.
        topology: the ranks that run the program. With parameter servers, `communicator` has fewer ranks.
    Raises: TypeError if `communicator` is no Communicator.
    """

    communicator: Communicator
    worker_devices: tuple[str, ...]
    replicas_of_ranks: tuple[int, ...]
    fixed_threads: int | None = None
    topology: Topology = Topology.single()  # noqa: RUF009 - it is frozen

    def __post_init__(self) -> None:
        if not isinstance(self.communicator, Communicator):
            raise TypeError(f"communicator must be a Communicator, got {self.communicator!r:.60}")

    @property
    def num_local_replicas(self) -> int:
        return len(self.worker_devices)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas on all ranks."""
        return sum(self.replicas_of_ranks)

    @property
    def first_replica_id(self) -> int:
        """The number of this rank's first replica, counted over all ranks."""
        return sum(self.replicas_of_ranks[: self.communicator.rank])

    @property
    def deterministic(self) -> bool:
        """Whether results do not depend on how replicas are spread over ranks."""
        return self.fixed_threads is not None
