"""`tf.compat.v1.distribute.experimental`."""

from mpistrat.compat.v1.strategy import CentralStorageStrategy as CentralStorageStrategy
from mpistrat.compat.v1.strategy import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from mpistrat.compat.v1.strategy import ParameterServerStrategy as ParameterServerStrategy
