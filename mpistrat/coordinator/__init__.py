"""The coordinator of a ParameterServerStrategy: functions that any worker executes, in no order of theirs."""

from mpistrat.parameter_server.coordinator.cluster_coordinator import (
    ClusterCoordinator as ClusterCoordinator,
)
from mpistrat.parameter_server.coordinator.current_worker import (
    experimental_get_current_worker_index as experimental_get_current_worker_index,
)
from mpistrat.parameter_server.coordinator.per_worker import PerWorkerValues as PerWorkerValues
from mpistrat.parameter_server.coordinator.remote_value import RemoteValue as RemoteValue

PerWorkerValue = PerWorkerValues
