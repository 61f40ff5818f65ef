"""`tf.compat.v1.distribute`: the strategies with the methods that later versions dropped."""

from mpistrat.compat.v1 import experimental as experimental
from mpistrat.compat.v1.strategy import MirroredStrategy as MirroredStrategy
from mpistrat.compat.v1.strategy import OneDeviceStrategy as OneDeviceStrategy
from mpistrat.compat.v1.strategy import ParameterServerStrategy as ParameterServerStrategy
from mpistrat.compat.v1.strategy import StrategyV1 as StrategyV1
from mpistrat.compat.v1.strategy import get_loss_reduction as get_loss_reduction
from mpistrat.compat.v1.strategy import get_strategy as get_strategy
from mpistrat.context import get_replica_context as get_replica_context
from mpistrat.context import has_strategy as has_strategy
from mpistrat.context import in_cross_replica_context as in_cross_replica_context
from mpistrat.strategy import experimental_set_strategy as experimental_set_strategy

Strategy = StrategyV1
