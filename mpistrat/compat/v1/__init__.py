"""`tf.compat.v1.distribute`: the strategies with methods that later versions of TensorFlow dropped."""

from typing import TYPE_CHECKING

from mpistrat.context import make_default_for
from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat import cluster_resolver as cluster_resolver
    from mpistrat.compat.v1 import experimental as experimental
    from mpistrat.compat.v1.strategy import MirroredStrategy as MirroredStrategy
    from mpistrat.compat.v1.strategy import OneDeviceStrategy as OneDeviceStrategy
    from mpistrat.compat.v1.strategy import ParameterServerStrategy as ParameterServerStrategy
    from mpistrat.compat.v1.strategy import Strategy as Strategy
    from mpistrat.compat.v1.strategy import StrategyV1 as StrategyV1
    from mpistrat.compat.v1.strategy import get_loss_reduction as get_loss_reduction
    from mpistrat.compat.v1.strategy import get_strategy as get_strategy
    from mpistrat.context import has_strategy as has_strategy
    from mpistrat.context import in_cross_replica_context as in_cross_replica_context
    from mpistrat.cross_device_ops import CrossDeviceOps as CrossDeviceOps
    from mpistrat.cross_device_ops import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
    from mpistrat.cross_device_ops import NcclAllReduce as NcclAllReduce
    from mpistrat.cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
    from mpistrat.input import InputContext as InputContext
    from mpistrat.options import InputReplicationMode as InputReplicationMode
    from mpistrat.parameter_server.strategies.server_task import Server as Server
    from mpistrat.reduce_op import ReduceOp as ReduceOp
    from mpistrat.replicas.replica_context import ReplicaContext as ReplicaContext
    from mpistrat.replicas.replica_context import get_replica_context as get_replica_context
    from mpistrat.replicas.strategy_extended import StrategyExtended as StrategyExtended
    from mpistrat.strategy import experimental_set_strategy as experimental_set_strategy
else:
    __getattr__, __dir__, __all__ = load_on_first_use(__name__, make_default_for)
