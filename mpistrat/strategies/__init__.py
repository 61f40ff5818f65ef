"""The strategies whose replicas keep variables themselves, one file each, and their parts."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
    from mpistrat.strategies.mirrored import MirroredStrategy as MirroredStrategy
    from mpistrat.strategies.multi_worker_mirrored import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from mpistrat.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
else:
    __getattr__, __dir__, __all__ = load_on_first_use(__name__)
