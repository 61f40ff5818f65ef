"""The names of `tf.distribute.experimental`."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat import coordinator
    from mpistrat.experimental import partitioners
    from mpistrat.experimental.tpu_strategy import ExperimentalTPUStrategy as TPUStrategy
    from mpistrat.fault_tolerance import (
        PreemptionCheckpointHandler,
        PreemptionWatcher,
        TerminationConfig,
    )
    from mpistrat.input.input_context import ValueContext
    from mpistrat.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
    from mpistrat.options import CommunicationImplementation as CollectiveCommunication
    from mpistrat.parameter_server.strategies.coordinated_strategy import ParameterServerStrategy
    from mpistrat.strategies.central_storage import CentralStorageStrategy
    from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
    from mpistrat.values import DistributedValues
else:
    __getattr__, __dir__ = load_on_first_use(__name__)

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
