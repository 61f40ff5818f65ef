"""The strategies whose replicas keep variables themselves, one file each, and the parts that they are made of."""

from mpistrat.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from mpistrat.strategies.mirrored import MirroredStrategy as MirroredStrategy
from mpistrat.strategies.multi_worker_mirrored import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from mpistrat.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
