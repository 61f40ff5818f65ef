"""The names that `tf.distribute.experimental` keeps."""

from mpistrat import coordinator
from mpistrat.cluster_resolver import TPUClusterResolver
from mpistrat.experimental import partitioners
from mpistrat.fault_tolerance import (
    PreemptionCheckpointHandler,
    PreemptionWatcher,
    TerminationConfig,
)
from mpistrat.input.input_context import ValueContext
from mpistrat.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
from mpistrat.parameter_server.strategies.coordinated_strategy import ParameterServerStrategy
from mpistrat.strategies.central_storage import CentralStorageStrategy
from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpistrat.values import DistributedValues
from mpistrat.xla import strategy
from mpistrat.xla.topology.device_assignment import DeviceAssignment

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "DistributedValues",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
]


def __dir__() -> list[str]:
    return __all__


class ExperimentalTPUStrategy(strategy.TPUStrategy):
    """`mpistrat.TPUStrategy`, with the arguments that `tf.distribute.experimental` has.

    Called by: every rank of the job.
    Args:
        tpu_cluster_resolver: the slice; None is the one that this host belongs to.
        device_assignment: which cores each replica has; None has each core be a replica.
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        super().__init__(tpu_cluster_resolver, device_assignment)


TPUStrategy = ExperimentalTPUStrategy
