"""`tf.compat.v1.distribute.experimental`."""

from mpistrat.compat.v1.strategy import (
    CentralStorageStrategy,
    MultiWorkerMirroredStrategy,
    ParameterServerStrategy,
)

__all__ = ["CentralStorageStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy"]


def __dir__() -> list[str]:
    return __all__
