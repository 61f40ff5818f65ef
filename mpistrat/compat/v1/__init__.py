"""`tf.compat.v1.distribute`: the strategies with methods that later versions of TensorFlow dropped."""

from typing import TYPE_CHECKING

from mpistrat.context import make_default_for
from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat import cluster_resolver
    from mpistrat.compat.v1 import experimental
    from mpistrat.compat.v1.strategy import (
        MirroredStrategy,
        OneDeviceStrategy,
        ParameterServerStrategy,
        StrategyV1,
        get_loss_reduction,
        get_strategy,
    )
    from mpistrat.compat.v1.strategy import StrategyV1 as Strategy
    from mpistrat.context import has_strategy, in_cross_replica_context
    from mpistrat.cross_device_ops import (
        CrossDeviceOps,
        HierarchicalCopyAllReduce,
        NcclAllReduce,
        ReductionToOneDevice,
    )
    from mpistrat.input import InputContext
    from mpistrat.options import InputReplicationMode
    from mpistrat.parameter_server.strategies.server_task import Server
    from mpistrat.reduce_op import ReduceOp
    from mpistrat.replicas.replica_context import ReplicaContext, get_replica_context
    from mpistrat.replicas.strategy_extended import StrategyExtended
    from mpistrat.strategy import experimental_set_strategy
else:
    __getattr__, __dir__ = load_on_first_use(__name__, make_default_for)

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "Server",
    "Strategy",
    "StrategyExtended",
    "StrategyV1",
    "cluster_resolver",
    "experimental",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
