"""The programming model of `tf.distribute.Strategy` for PyTorch, NumPy and CuPy programs that MPI starts."""

from typing import TYPE_CHECKING, Any

from mpistrat.context import below_all, make_default_for
from mpistrat.liveness.ending import rank_end
from mpistrat.liveness.observer import observation
from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat import (
        checkpoint,
        cluster_resolver,
        compat,
        coordinator,
        errors,
        experimental,
        fault_tolerance,
        input,
        tpu,
        wire_formats,
    )
    from mpistrat.context import has_strategy, in_cross_replica_context
    from mpistrat.cross_device_ops import (
        CrossDeviceOps,
        HierarchicalCopyAllReduce,
        MpiAllReduce,
        NcclAllReduce,
        ReductionToOneDevice,
    )
    from mpistrat.indexed_slices import IndexedSlices
    from mpistrat.input.distributed_dataset import DistributedDataset, DistributedIterator
    from mpistrat.input.input_context import InputContext, ValueContext
    from mpistrat.options import (
        AutoShardPolicy,
        CommunicationImplementation,
        CommunicationOptions,
        InputOptions,
        InputReplicationMode,
        RunOptions,
    )
    from mpistrat.parameter_server.strategies.coordinated_strategy import ParameterServerStrategy
    from mpistrat.parameter_server.strategies.server_task import Server
    from mpistrat.pytorch.conversion import convert_sync_batchnorm
    from mpistrat.reduce_op import ReduceOp, VariableAggregation, VariableSynchronization
    from mpistrat.replicas.losses import compute_average_loss, scale_regularization_loss
    from mpistrat.replicas.replica_context import ReplicaContext, get_replica_context
    from mpistrat.replicas.strategy_extended import StrategyExtended
    from mpistrat.strategies import (
        CentralStorageStrategy,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
    )
    from mpistrat.strategy import Strategy, experimental_set_strategy, get_strategy
    from mpistrat.topology import Topology
    from mpistrat.values import DistributedValues, Mirrored, PerReplica
    from mpistrat.variables.sharded import ShardedVariable
    from mpistrat.variables.variable import Variable
    from mpistrat.xla.strategy import TPUStrategy
else:
    __getattr__, __dir__ = load_on_first_use(__name__, make_default_for)

__version__ = "0.2.0"

__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MpiAllReduce",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "ShardedVariable",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "Topology",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
    "checkpoint",
    "cluster_resolver",
    "compat",
    "compute_average_loss",
    "convert_sync_batchnorm",
    "coordinator",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "fault_tolerance",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "input",
    "scale_regularization_loss",
    "tpu",
    "wire_formats",
]


def _default_mode() -> Any:
    from mpistrat.strategies.default import default_mode

    return default_mode()


below_all.make = _default_mode
rank_end.begin()
observation.wait_until_observed()
