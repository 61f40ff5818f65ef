"""`tf.compat.v1.distribute.experimental`."""

from mpistrat.compat.v1.strategy import (
    CentralStorageStrategy,
    MultiWorkerMirroredStrategy,
    ParameterServerStrategy,
)
from mpistrat.options import CollectiveHints, CommunicationImplementation, CommunicationOptions

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
]


def __dir__() -> list[str]:
    return __all__
