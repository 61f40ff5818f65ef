"""`Cluster`: what a coordinator needs of its strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpistrat.parameter_server.coordinator.pickling import References

if TYPE_CHECKING:
    from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint


@dataclass
class Cluster:
    """On the chief, `strategy.extended.cluster`.

    Attributes:
        workers: their ranks, by worker index.
        over: gets ids of closures that will not be executed again, and the id before which none will.
        joined: called when all closures have ended, and none has failed.
        is_needed: whether nothing can be executed without a rank that has died.
        coordinator: the only `ClusterCoordinator` of the strategy, once there is one.
    """

    rpc: RpcEndpoint
    workers: Sequence[int]
    references: References
    over: Callable[[list[int], int], None]
    joined: Callable[[], None]
    is_needed: Callable[[int], bool] = lambda rank: False
    coordinator: Any = None
