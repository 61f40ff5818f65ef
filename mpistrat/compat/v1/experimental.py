"""The names of `tf.compat.v1.distribute.experimental`."""

from typing import TYPE_CHECKING

from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat.compat.v1.strategy import CentralStorageStrategy as CentralStorageStrategy
    from mpistrat.compat.v1.strategy import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from mpistrat.compat.v1.strategy import ParameterServerStrategy as ParameterServerStrategy
    from mpistrat.options import CollectiveCommunication as CollectiveCommunication
    from mpistrat.options import CollectiveHints as CollectiveHints
    from mpistrat.options import CommunicationImplementation as CommunicationImplementation
    from mpistrat.options import CommunicationOptions as CommunicationOptions
else:
    __getattr__, __dir__, __all__ = load_on_first_use(__name__)
