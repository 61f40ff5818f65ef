"""The model of `tf.distribute.Strategy` for PyTorch, NumPy and CuPy programs that MPI starts."""

from mpistrat import cluster_resolver as cluster_resolver
from mpistrat import compat as compat
from mpistrat import errors as errors
from mpistrat import experimental as experimental
from mpistrat import input as input
from mpistrat.batch_norm import convert_sync_batchnorm as convert_sync_batchnorm
from mpistrat.context import get_replica_context as get_replica_context
from mpistrat.context import get_strategy as get_strategy
from mpistrat.context import has_strategy as has_strategy
from mpistrat.context import in_cross_replica_context as in_cross_replica_context
from mpistrat.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from mpistrat.cross_device_ops import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from mpistrat.cross_device_ops import MpiAllReduce as MpiAllReduce
from mpistrat.cross_device_ops import NcclAllReduce as NcclAllReduce
from mpistrat.cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
from mpistrat.indexed_slices import IndexedSlices as IndexedSlices
from mpistrat.input.distributed_dataset import DistributedDataset as DistributedDataset
from mpistrat.input.distributed_iterator import DistributedIterator as DistributedIterator
from mpistrat.input.input_context import InputContext as InputContext
from mpistrat.input.input_context import ValueContext as ValueContext
from mpistrat.losses import compute_average_loss as compute_average_loss
from mpistrat.losses import scale_regularization_loss as scale_regularization_loss
from mpistrat.options import AutoShardPolicy as AutoShardPolicy
from mpistrat.options import CommunicationImplementation as CommunicationImplementation
from mpistrat.options import CommunicationOptions as CommunicationOptions
from mpistrat.options import InputOptions as InputOptions
from mpistrat.options import InputReplicationMode as InputReplicationMode
from mpistrat.options import RunOptions as RunOptions
from mpistrat.reduce_op import ReduceOp as ReduceOp
from mpistrat.reduce_op import VariableAggregation as VariableAggregation
from mpistrat.reduce_op import VariableSynchronization as VariableSynchronization
from mpistrat.replica_context import ReplicaContext as ReplicaContext
from mpistrat.strategies import CentralStorageStrategy as CentralStorageStrategy
from mpistrat.strategies import MirroredStrategy as MirroredStrategy
from mpistrat.strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from mpistrat.strategies import OneDeviceStrategy as OneDeviceStrategy
from mpistrat.strategy import Strategy as Strategy
from mpistrat.strategy import experimental_set_strategy as experimental_set_strategy
from mpistrat.strategy_extended import StrategyExtended as StrategyExtended
from mpistrat.topology import Topology as Topology
from mpistrat.values import DistributedValues as DistributedValues
from mpistrat.values import Mirrored as Mirrored
from mpistrat.values import PerReplica as PerReplica
from mpistrat.variables import Variable as Variable

__version__ = "0.1.0.dev0"
