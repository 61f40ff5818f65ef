"""`tf.compat.v1.distribute`: the strategies with the methods that later versions dropped."""

from mpistrat.compat.v1 import experimental
from mpistrat.compat.v1.strategy import (
    MirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    StrategyV1,
    get_loss_reduction,
    get_strategy,
)
from mpistrat.context import has_strategy, in_cross_replica_context
from mpistrat.replicas.replica_context import get_replica_context
from mpistrat.strategy import experimental_set_strategy

Strategy = StrategyV1

__all__ = [
    "MirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "Strategy",
    "StrategyV1",
    "experimental",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


def __dir__() -> list[str]:
    return __all__
