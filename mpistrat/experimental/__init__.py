"""The names that `tf.distribute.experimental` keeps."""

from mpistrat.experimental import partitioners as partitioners
from mpistrat.fault_tolerance import PreemptionCheckpointHandler as PreemptionCheckpointHandler
from mpistrat.fault_tolerance import PreemptionWatcher as PreemptionWatcher
from mpistrat.fault_tolerance import TerminationConfig as TerminationConfig
from mpistrat.options import CollectiveHints as CollectiveHints
from mpistrat.options import CommunicationImplementation as CommunicationImplementation
from mpistrat.options import CommunicationOptions as CommunicationOptions
from mpistrat.parameter_server.strategy import ParameterServerStrategy as ParameterServerStrategy
from mpistrat.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from mpistrat.strategies.multi_worker_mirrored import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from mpistrat.values import DistributedValues as DistributedValues
