"""The names of `tf.compat.v1.distribute.experimental`."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.compat.v1.strategy import (
        CentralStorageStrategy,
        MultiWorkerMirroredStrategy,
        ParameterServerStrategy,
    )
    from mpistrat.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
    from mpistrat.options import CommunicationImplementation as CollectiveCommunication
else:
    __getattr__, __dir__ = load_on_first_use(__name__)

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
]
