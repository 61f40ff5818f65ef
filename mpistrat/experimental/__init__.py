"""The names that `tf.distribute.experimental` keeps."""

from mpistrat.experimental import partitioners
from mpistrat.fault_tolerance import (
    PreemptionCheckpointHandler,
    PreemptionWatcher,
    TerminationConfig,
)
from mpistrat.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
from mpistrat.parameter_server.strategy import ParameterServerStrategy
from mpistrat.strategies.central_storage import CentralStorageStrategy
from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpistrat.values import DistributedValues

__all__ = [
    "CentralStorageStrategy",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "DistributedValues",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TerminationConfig",
    "partitioners",
]


def __dir__() -> list[str]:
    return __all__
