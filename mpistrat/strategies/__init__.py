"""The strategies whose replicas keep variables themselves, one file each, and their parts."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.strategies.central_storage import CentralStorageStrategy
    from mpistrat.strategies.mirrored import MirroredStrategy
    from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
    from mpistrat.strategies.one_device import OneDeviceStrategy
else:
    __getattr__, __dir__ = load_on_first_use(__name__)

__all__ = [
    "CentralStorageStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
]
