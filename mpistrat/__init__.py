"""The programming model of `tf.distribute.Strategy` for PyTorch, NumPy and CuPy programs that MPI starts."""

from typing import TYPE_CHECKING, Any

from mpistrat.context import below_all, make_default_for
from mpistrat.liveness.ending import rank_end
from mpistrat.liveness.observer import observation
from mpistrat.machine.first_use import load_on_first_use

if TYPE_CHECKING:
    from mpistrat import checkpoint as checkpoint
    from mpistrat import cluster_resolver as cluster_resolver
    from mpistrat import compat as compat
    from mpistrat import coordinator as coordinator
    from mpistrat import errors as errors
    from mpistrat import experimental as experimental
    from mpistrat import fault_tolerance as fault_tolerance
    from mpistrat import input as input
    from mpistrat import tpu as tpu
    from mpistrat import wire_formats as wire_formats
    from mpistrat.context import has_strategy as has_strategy
    from mpistrat.context import in_cross_replica_context as in_cross_replica_context
    from mpistrat.cross_device_ops import CrossDeviceOps as CrossDeviceOps
    from mpistrat.cross_device_ops import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
    from mpistrat.cross_device_ops import MpiAllReduce as MpiAllReduce
    from mpistrat.cross_device_ops import NcclAllReduce as NcclAllReduce
    from mpistrat.cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
    from mpistrat.indexed_slices import IndexedSlices as IndexedSlices
    from mpistrat.input.distributed_dataset import DistributedDataset as DistributedDataset
    from mpistrat.input.distributed_dataset import DistributedIterator as DistributedIterator
    from mpistrat.input.input_context import InputContext as InputContext
    from mpistrat.input.input_context import ValueContext as ValueContext
    from mpistrat.options import AutoShardPolicy as AutoShardPolicy
    from mpistrat.options import CommunicationImplementation as CommunicationImplementation
    from mpistrat.options import CommunicationOptions as CommunicationOptions
    from mpistrat.options import InputOptions as InputOptions
    from mpistrat.options import InputReplicationMode as InputReplicationMode
    from mpistrat.options import RunOptions as RunOptions
    from mpistrat.parameter_server.strategies.coordinated_strategy import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from mpistrat.parameter_server.strategies.server_task import Server as Server
    from mpistrat.pytorch.conversion import convert_sync_batchnorm as convert_sync_batchnorm
    from mpistrat.pytorch.conversion import may_differ as may_differ
    from mpistrat.pytorch.conversion import reduce_buffers as reduce_buffers
    from mpistrat.reduce_op import ReduceOp as ReduceOp
    from mpistrat.reduce_op import VariableAggregation as VariableAggregation
    from mpistrat.reduce_op import VariableSynchronization as VariableSynchronization
    from mpistrat.replicas.losses import compute_average_loss as compute_average_loss
    from mpistrat.replicas.losses import scale_regularization_loss as scale_regularization_loss
    from mpistrat.replicas.replica_context import ReplicaContext as ReplicaContext
    from mpistrat.replicas.replica_context import get_replica_context as get_replica_context
    from mpistrat.replicas.strategy_extended import StrategyExtended as StrategyExtended
    from mpistrat.strategies import CentralStorageStrategy as CentralStorageStrategy
    from mpistrat.strategies import MirroredStrategy as MirroredStrategy
    from mpistrat.strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from mpistrat.strategies import OneDeviceStrategy as OneDeviceStrategy
    from mpistrat.strategy import Strategy as Strategy
    from mpistrat.strategy import experimental_set_strategy as experimental_set_strategy
    from mpistrat.strategy import get_strategy as get_strategy
    from mpistrat.topology import Topology as Topology
    from mpistrat.values import DistributedValues as DistributedValues
    from mpistrat.values import Mirrored as Mirrored
    from mpistrat.values import PerReplica as PerReplica
    from mpistrat.variables.sharded import ShardedVariable as ShardedVariable
    from mpistrat.variables.variable import Variable as Variable
    from mpistrat.xla.strategy import TPUStrategy as TPUStrategy
else:
    __getattr__, __dir__, __all__ = load_on_first_use(__name__, make_default_for)
    __all__.append("__version__")

__version__ = "0.2.0"


def _default_mode() -> Any:
    from mpistrat.strategies.default import default_mode

    return default_mode()


below_all.make = _default_mode
rank_end.begin()
observation.wait_until_observed()
