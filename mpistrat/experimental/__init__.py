"""The names of `tf.distribute.experimental`."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat import coordinator as coordinator
    from mpistrat.experimental import partitioners as partitioners
    from mpistrat.experimental.tpu_strategy import TPUStrategy as TPUStrategy
    from mpistrat.fault_tolerance import PreemptionCheckpointHandler as PreemptionCheckpointHandler
    from mpistrat.fault_tolerance import PreemptionWatcher as PreemptionWatcher
    from mpistrat.fault_tolerance import TerminationConfig as TerminationConfig
    from mpistrat.input.input_context import ValueContext as ValueContext
    from mpistrat.options import CollectiveCommunication as CollectiveCommunication
    from mpistrat.options import CollectiveHints as CollectiveHints
    from mpistrat.options import CommunicationImplementation as CommunicationImplementation
    from mpistrat.options import CommunicationOptions as CommunicationOptions
    from mpistrat.parameter_server.strategies.coordinated_strategy import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from mpistrat.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
    from mpistrat.strategies.multi_worker_mirrored import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from mpistrat.values import DistributedValues as DistributedValues
else:
    __getattr__, __dir__, __all__ = load_on_first_use(__name__)
