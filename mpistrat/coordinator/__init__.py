"""The coordinator of a ParameterServerStrategy: it schedules functions, and the next free worker executes each."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.parameter_server.coordinator.cluster_coordinator import (
        ClusterCoordinator as ClusterCoordinator,
    )
    from mpistrat.parameter_server.coordinator.per_worker import PerWorkerValue as PerWorkerValue
    from mpistrat.parameter_server.coordinator.per_worker import PerWorkerValues as PerWorkerValues
    from mpistrat.parameter_server.coordinator.remote_value import RemoteValue as RemoteValue
    from mpistrat.parameter_server.coordinator.worker import (
        experimental_get_current_worker_index as experimental_get_current_worker_index,
    )
else:
    __getattr__, __dir__, __all__ = load_on_first_use(__name__)
