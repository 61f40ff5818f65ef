"""What the strategies with parameter servers have beside what `Strategy` shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpistrat.context import AnyStrategy
from mpistrat.machine.devices import task_of
from mpistrat.replicas.strategy_extended import Parts, StrategyExtended

if TYPE_CHECKING:
    from mpistrat.parameter_server.client.variables_on_servers import VariablesOnServers
    from mpistrat.parameter_server.coordinator.cluster import Cluster
    from mpistrat.parameter_server.coordinator.pickling import References
    from mpistrat.parameter_server.job.job import ServerJob


class ServersExtended(StrategyExtended):
    """The replicas of one rank, with variables on servers.

    Args:
        is_worker: whether this rank is one of the workers that train by themselves.

    Attributes:
        job: the ranks.
        makes_variables: whether this rank's initial values are everybody's: the chief's, or worker 0's where there is
            no chief.
        variables: on the servers.
        torch_references: gives the names by which values of torch are pickled. Called by: `ObjectReferences`, where
            torch is imported.
        cluster: what a chief's coordinator needs; None on other ranks.
    """

    variables: VariablesOnServers
    cluster: Cluster | None = None

    def __init__(
        self,
        strategy: AnyStrategy,
        parts: Parts,
        job: ServerJob,
        is_worker: bool,
        torch_references: Callable[[], References],
    ) -> None:
        super().__init__(strategy, parts)
        self.torch_references = torch_references
        self.makes_variables = self.variables.owns_initial_values
        self.job, self._is_worker = job, is_worker

    @property
    def experimental_between_graph(self) -> bool:
        return True

    def check_destination(self, destinations: Any) -> None:
        """As TensorFlow does; a server's device is as good as this worker's."""
        if not self._is_worker or not isinstance(destinations, str):
            return
        task, own = task_of(destinations), (self.job.roles.task_type, self.job.roles.task_id)
        if task is not None and task[0] == own[0] and task != own:
            raise ValueError(
                f"cannot reduce to another worker: {destinations!r}; this is {self.job.name_of(self.job.rpc.rank)}"
            )
