"""The strategies, one file each."""

from mpistrat.strategies.between_graph import BetweenGraphStrategy as BetweenGraphStrategy
from mpistrat.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from mpistrat.strategies.mirrored import MirroredStrategy as MirroredStrategy
from mpistrat.strategies.multi_worker_mirrored import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from mpistrat.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from mpistrat.strategies.parameter_server import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from mpistrat.strategies.server import Server as Server
from mpistrat.strategies.tpu import TPUStrategy as TPUStrategy
