"""Every public entry point as a careless user meets it: what is raised, and which words must be in the message."""

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mpistrat as ms
from mpistrat import cluster_resolver as resolvers
from mpistrat.compat import v1
from mpistrat.errors import InvalidArgumentError
from mpistrat.replicas.group import ReplicaGroup

SUM = ms.ReduceOp.SUM
PAIR = ms.MirroredStrategy(["cpu:0", "cpu:1"])
ONE_DEVICE = ms.OneDeviceStrategy("cpu:0")
CENTRAL = ms.CentralStorageStrategy(["cpu:0", "cpu:1"])
OPS = ms.ReductionToOneDevice()
UNSUPPORTED = object()


def variable(**kwargs: Any) -> Any:
    with PAIR.scope():
        return ms.Variable(np.zeros(2), name="w", **kwargs)


W = variable()
SUMMED = variable(aggregation=ms.VariableAggregation.SUM)
ON_READ = variable(synchronization=ms.VariableSynchronization.ON_READ)
LINEAR = torch.nn.Linear(1, 1)


def replica() -> Any:
    return ms.get_replica_context().replica_id_in_sync_group


VALUE = PAIR.run(lambda: np.ones(3) * replica())


def on_replicas(function: Callable[[], Any]) -> Any:
    """What each replica makes of its own number."""
    return PAIR.run(function)


def sized(size: int) -> np.ndarray:
    return np.ones(size + replica())


def slices(size: int = 1, index: int = 0, rows: Any = None) -> ms.IndexedSlices:
    return ms.IndexedSlices(np.ones(size) if rows is None else rows, [index])


def in_scope(call: Callable[[], Any], strategy: ms.Strategy = PAIR) -> Callable[[], Any]:
    def inside() -> Any:
        with strategy.scope():
            return call()

    return inside


def in_run(call: Callable[[ms.ReplicaContext], Any]) -> Callable[[], Any]:
    return lambda: PAIR.run(lambda: call(ms.get_replica_context()))


def left_run() -> ms.ReplicaContext:
    return PAIR.run(ms.get_replica_context).values[0]


# (call, expected exception, words that must be in its message)
Case = tuple[Callable[[], Any], type[BaseException], str]

CONSTRUCTORS: dict[str, Case] = {
    "abstract strategy": (lambda: ms.Strategy(5), TypeError, "got 5; MultiWorkerMirroredStrategy"),
    "devices: one name": (lambda: ms.MirroredStrategy("cpu:0"), ValueError, "list; 'cpu:0'"),
    "devices: number": (lambda: ms.MirroredStrategy(5), ValueError, "list; got 5"),
    "devices: list of numbers": (lambda: ms.MirroredStrategy([5]), ValueError, "'cuda:1'; got 5"),
    "devices: unknown": (lambda: ms.MirroredStrategy(["tpu:0"]), ValueError, "'cpu:0'; 'tpu:0'"),
    "devices: not there": (
        lambda: ms.MirroredStrategy(["cuda:99"]),
        ValueError,
        "'cuda:99' does not exist; GPUs",
    ),
    "devices: twice": (
        lambda: ms.MirroredStrategy(["cpu:0", "cpu:0"]),
        AssertionError,
        "distinct; ['cpu:0', 'cpu:0']",
    ),
    "devices: of other nodes": (
        lambda: ms.MirroredStrategy([f"/job:worker/task:{i}/device:CPU:0" for i in (0, 1)]),
        ValueError,
        "this rank's own; start more ranks",
    ),
    "cross_device_ops": (
        lambda: ms.MirroredStrategy(["cpu:0"], "nccl"),
        ValueError,
        "CrossDeviceOps; got 'nccl'",
    ),
    "gradients": (
        lambda: ms.MirroredStrategy(gradients="average"),
        ValueError,
        "'sum'; 'mean'; compute_average_loss; got 'average'",
    ),
    "gradients: array": (
        lambda: ms.MirroredStrategy(gradients=np.ones(2)),
        ValueError,
        "'sum'; 'mean'; got array",
    ),
    "communication_options": (
        lambda: ms.MirroredStrategy(communication_options={}),
        ValueError,
        "CommunicationOptions; got {}",
    ),
    "comm": (lambda: ms.MirroredStrategy(comm=5), TypeError, "mpi4py intracommunicator; got 5"),
    "multi-worker comm": (
        lambda: ms.MultiWorkerMirroredStrategy(comm="world"),
        TypeError,
        "mpi4py intracommunicator; got 'world'",
    ),
    "cluster_resolver": (
        lambda: ms.MultiWorkerMirroredStrategy("slurm"),
        ValueError,
        "ClusterResolver; got 'slurm'",
    ),
    "multi-worker devices": (
        lambda: ms.MultiWorkerMirroredStrategy(devices="cpu:0"),
        ValueError,
        "list; got 'cpu:0'",
    ),
    "multi-worker options": (
        lambda: ms.MultiWorkerMirroredStrategy(None, 5),
        ValueError,
        "CommunicationOptions; got 5",
    ),
    "no device": (lambda: ms.OneDeviceStrategy(None), ValueError, "'cpu:0'; got None"),
    "negative device": (lambda: ms.OneDeviceStrategy("cpu:-1"), ValueError, "got 'cpu:-1'"),
    "compute devices": (lambda: ms.CentralStorageStrategy("cpu:0"), ValueError, "list; 'cpu:0'"),
    "parameter device": (
        lambda: ms.CentralStorageStrategy(["cpu:0"], "disk"),
        ValueError,
        "'cpu:0'; got 'disk'",
    ),
    "copy": (lambda: copy.copy(PAIR), RuntimeError, "cannot be copied; pass the object"),
    "topology": (lambda: ms.Topology(0, 2, (0,)), ValueError, "1 ranks; size=2"),
    "extended": (lambda: ReplicaGroup(5, ("cpu:0",), (1,)), TypeError, "Communicator; got 5"),
    "replica context": (
        lambda: ms.ReplicaContext(PAIR, "0"),
        ValueError,
        "replica_id_in_sync_group; integer; got '0'",
    ),
    "v1 strategy": (lambda: v1.MirroredStrategy("cpu:0"), ValueError, "list; got 'cpu:0'"),
    "simple resolver": (
        lambda: resolvers.SimpleClusterResolver({}),
        TypeError,
        "ClusterSpec; got {}",
    ),
    "union of nothing": (lambda: resolvers.UnionResolver(), ValueError, "at least one"),
    "union of others": (lambda: resolvers.UnionResolver(5), TypeError, "ClusterResolver; 5"),
    "cluster spec": (lambda: resolvers.ClusterSpec(5), TypeError, "dict; got 5"),
}

RUN: dict[str, Case] = {
    "fn": (lambda: PAIR.run(5), TypeError, "run takes a function; got 5; args=(…,)"),
    "args": (lambda: PAIR.run(abs, 5), ValueError, "list or a tuple; got int; (x,)"),
    "args: string": (lambda: PAIR.run(abs, "x"), ValueError, "list or a tuple; got str"),
    "kwargs": (lambda: PAIR.run(abs, (1,), [1]), ValueError, "dictionary; got list"),
    "options": (lambda: PAIR.run(abs, (1,), options=5), TypeError, "RunOptions; got 5"),
    "too few components": (
        lambda: PAIR.run(abs, (ms.PerReplica([1]),)),
        ValueError,
        "PerReplica of 1 components; another strategy",
    ),
    "inside run": (in_run(lambda c: PAIR.run(abs, (1,))), RuntimeError, "inside run; merge_call"),
    "in another scope": (
        in_scope(lambda: ONE_DEVICE.run(abs, (1,))),
        RuntimeError,
        "OneDeviceStrategy; MirroredStrategy; mixed",
    ),
    "scope inside run": (in_run(lambda c: PAIR.scope().__enter__()), RuntimeError, "merge_call"),
    "scope in another": (
        in_scope(lambda: ONE_DEVICE.scope().__enter__()),
        RuntimeError,
        "mixed; leave the other scope",
    ),
    "set strategy": (lambda: ms.experimental_set_strategy(5), TypeError, "Strategy; got 5"),
    "set a class": (
        lambda: ms.experimental_set_strategy(ms.MirroredStrategy),
        TypeError,
        "Strategy; got <class",
    ),
    "set in a scope": (
        in_scope(lambda: ms.experimental_set_strategy(PAIR)),
        RuntimeError,
        "outside; MirroredStrategy(2 replicas) is in force",
    ),
    "values function": (
        lambda: PAIR.experimental_distribute_values_from_function(5),
        TypeError,
        "takes a function; got 5",
    ),
    "values inside run": (
        in_run(lambda c: PAIR.experimental_distribute_values_from_function(abs)),
        RuntimeError,
        "inside run; merge_call",
    ),
    "mirror": (lambda: PAIR.mirror(5), TypeError, "module; got 5"),
    "mirror inside run": (in_run(lambda c: PAIR.mirror(LINEAR)), RuntimeError, "inside run"),
}

REDUCE: dict[str, Case] = {
    "op": (lambda: PAIR.reduce("most", VALUE, None), ValueError, "SUM, MEAN, MAX; got 'most'"),
    "op: number": (lambda: PAIR.reduce(5, VALUE, None), ValueError, "ReduceOp; SUM, MEAN; got 5"),
    "op: aggregation": (
        lambda: PAIR.reduce(ms.VariableAggregation.SUM, VALUE, None),
        ValueError,
        "ReduceOp; got <VariableAggregation",
    ),
    "aggregation as op": (
        lambda: ms.ReduceOp.from_variable_aggregation(ms.VariableAggregation.NONE),
        ValueError,
        "VariableAggregation.NONE; SUM and MEAN",
    ),
    "no axis": (lambda: PAIR.reduce("sum", VALUE), TypeError, "axis"),
    "axis": (lambda: PAIR.reduce("sum", VALUE, 3), ValueError, "axis 3; out of range; (3,)"),
    "axis: string": (lambda: PAIR.reduce("sum", VALUE, "0"), ValueError, "integer; got '0'"),
    "axis: float": (lambda: PAIR.reduce("sum", VALUE, 1.5), ValueError, "integer; got 1.5"),
    "plain": (lambda: PAIR.reduce("sum", 5, None), ValueError, "per replica; run; got 5"),
    "objects": (
        lambda: PAIR.reduce("sum", on_replicas(object), None),
        TypeError,
        "an array or a number; got object",
    ),
    "string over an axis": (lambda: PAIR.reduce("sum", "abc", 0), TypeError, "number; 'abc'"),
    "shapes": (
        lambda: PAIR.reduce("sum", on_replicas(lambda: sized(1)), None),
        InvalidArgumentError,
        "same shape; replica 0: float64[1]; replica 1: float64[2]",
    ),
    "libraries": (
        lambda: PAIR.reduce("sum", ms.PerReplica([np.ones(2), torch.ones(2)]), None),
        InvalidArgumentError,
        "replica 0: float64[2]; replica 1: torch.float32[2]",
    ),
    "kinds": (
        lambda: PAIR.reduce("sum", ms.PerReplica([np.ones(1), slices()]), None),
        InvalidArgumentError,
        "same kind; replica 0: ndarray; replica 1: IndexedSlices",
    ),
    "booleans": (
        lambda: PAIR.reduce("sum", on_replicas(lambda: np.ones(1, bool)), None),
        InvalidArgumentError,
        "booleans; cast to an integer",
    ),
    "strings": (
        lambda: PAIR.reduce("sum", on_replicas(lambda: np.array(["a"])), None),
        InvalidArgumentError,
        "cannot reduce <U1[1]; only numbers",
    ),
    "too few components": (
        lambda: PAIR.reduce("mean", ms.PerReplica([np.ones(2)]), None),
        ValueError,
        "2 replicas per rank; 1 components; another strategy",
    ),
    "too many components": (
        lambda: PAIR.reduce("sum", ms.PerReplica([np.ones(2)] * 3), 0),
        ValueError,
        "2 replicas per rank; 3 components",
    ),
    "inside run": (
        in_run(lambda c: PAIR.reduce("sum", 1, None)),
        RuntimeError,
        "inside run (replica 0); merge_call",
    ),
    "another strategy's": (
        in_scope(lambda: ONE_DEVICE.reduce("sum", 1, None)),
        RuntimeError,
        "mixed; leave the other strategy's scope",
    ),
    "gather: axis": (lambda: PAIR.gather(VALUE, 5), ValueError, "axis 5; out of range; [3]"),
    "gather: no axis": (lambda: PAIR.gather(VALUE, None), ValueError, "integer; got None"),
    "gather: objects": (lambda: PAIR.gather(on_replicas(object), 0), TypeError, "got object"),
    "gather: scalars": (
        lambda: PAIR.gather(on_replicas(lambda: np.float32(1)), 0),
        ValueError,
        "scalars; value[None]",
    ),
    "gather: shapes": (
        lambda: PAIR.gather(on_replicas(lambda: sized(1)[None]), 0),
        InvalidArgumentError,
        "axis 0; replica 0: float64[1, 1]; replica 1: float64[1, 2]",
    ),
    "gather: dtypes": (
        lambda: PAIR.gather(ms.PerReplica([np.ones(1), np.ones(1, "f4")]), 0),
        InvalidArgumentError,
        "one dtype; float64[1]; float32[1]",
    ),
    "gather: slices": (lambda: PAIR.gather(slices(), 0), NotImplementedError, "reduce"),
    "gather: inside run": (in_run(lambda c: PAIR.gather(VALUE, 0)), RuntimeError, "merge_call"),
    "PerReplica as an array": (
        lambda: np.asarray(VALUE),
        ValueError,
        "no single value; strategy.reduce",
    ),
    "PerReplica of nothing": (lambda: ms.PerReplica([]), ValueError, "at least one component"),
}

EXTENDED: dict[str, Case] = {
    "destinations: list": (
        lambda: PAIR.extended.reduce_to("sum", VALUE, []),
        AssertionError,
        "destinations; got a list",
    ),
    "destinations": (
        lambda: PAIR.extended.reduce_to("sum", VALUE, 5),
        ValueError,
        "distributed value; name of a device; got 5",
    ),
    "unknown device": (
        lambda: PAIR.extended.reduce_to("sum", VALUE, "disk:0"),
        ValueError,
        "'cpu:0'; got 'disk:0'",
    ),
    "op": (
        lambda: PAIR.extended.reduce_to(ms.VariableAggregation.SUM, VALUE, "cpu:0"),
        AssertionError,
        "ReduceOp; got VariableAggregation.SUM",
    ),
    "options": (
        lambda: PAIR.extended.reduce_to("sum", VALUE, "cpu:0", 5),
        TypeError,
        "CommunicationOptions; got 5",
    ),
    "inside run": (
        in_run(lambda c: PAIR.extended.reduce_to("sum", VALUE, "cpu:0")),
        RuntimeError,
        "reduce_to; inside run",
    ),
    "pairs": (
        lambda: PAIR.extended.batch_reduce_to("sum", [VALUE]),
        ValueError,
        "(value, destinations) tuples; got [PerReplica",
    ),
    "pairs: number": (lambda: PAIR.extended.batch_reduce_to("sum", 5), ValueError, "got 5"),
    "broadcast nowhere": (
        lambda: PAIR.extended.broadcast_to(np.ones(1), None),
        AssertionError,
        "destinations; a device",
    ),
    "broadcast an object": (
        lambda: PAIR.extended.broadcast_to(UNSUPPORTED, VALUE),
        TypeError,
        "an array or a number; got object",
    ),
    "update": (
        lambda: PAIR.extended.update(5, abs),
        AssertionError,
        "variable made in the scope; got 5",
    ),
    "update: fn": (lambda: PAIR.extended.update(W, 5), TypeError, "takes a function; got 5"),
    "update: args": (lambda: PAIR.extended.update(W, abs, 5), ValueError, "tuple; got int"),
    "update_non_slot": (
        lambda: PAIR.extended.update_non_slot("cpu:0", 5),
        TypeError,
        "takes a function; got 5",
    ),
    "colocate outside a scope": (
        lambda: PAIR.extended.colocate_vars_with(W).__enter__(),
        RuntimeError,
        "inside this strategy's scope",
    ),
    "colocate": (
        in_scope(lambda: PAIR.extended.colocate_vars_with(5).__enter__()),
        ValueError,
        "variable made in this strategy's scope; got 5",
    ),
    "read_var": (lambda: PAIR.extended.read_var(5), TypeError, "variable; got 5"),
}

REPLICA: dict[str, Case] = {
    "left": (
        lambda: left_run().all_reduce("sum", np.ones(1)),
        RuntimeError,
        "context of replica 0; ask get_replica_context() again",
    ),
    "merge_call": (in_run(lambda c: c.merge_call(5)), TypeError, "takes a function; got 5"),
    "merge_call: args": (in_run(lambda c: c.merge_call(abs, 5)), ValueError, "tuple; got int"),
    "merge_call: kwargs": (
        in_run(lambda c: c.merge_call(abs, (), [1])),
        ValueError,
        "dictionary; got list",
    ),
    "merge_call in merge_call": (
        in_run(lambda c: c.merge_call(lambda s: c.merge_call(abs))),
        RuntimeError,
        "cross-replica context",
    ),
    "all_reduce: op": (
        in_run(lambda c: c.all_reduce("most", np.ones(1))),
        ValueError,
        "got 'most'",
    ),
    "all_reduce: object": (
        in_run(lambda c: c.all_reduce("sum", UNSUPPORTED)),
        TypeError,
        "an array or a number; got object",
    ),
    "all_reduce: boolean": (
        in_run(lambda c: c.all_reduce("sum", True)),
        InvalidArgumentError,
        "booleans; cast",
    ),
    "all_reduce: options": (
        in_run(lambda c: c.all_reduce("sum", np.ones(1), 5)),
        TypeError,
        "CommunicationOptions; got 5",
    ),
    "all_reduce: shapes": (
        in_run(lambda c: c.all_reduce("sum", sized(1))),
        InvalidArgumentError,
        "replica 0: float64[1]; replica 1: float64[2]",
    ),
    "all_reduce: structures": (
        in_run(lambda c: c.all_reduce("sum", [np.ones(1)] if replica() else np.ones(1))),
        InvalidArgumentError,
        "replica 0: SUM of *; replica 1: SUM of [*]",
    ),
    "all_reduce: ops": (
        in_run(lambda c: c.all_reduce("sum" if replica() else "mean", np.ones(1))),
        InvalidArgumentError,
        "replica 0: MEAN of *; replica 1: SUM of *",
    ),
    "all_reduce on one replica only": (
        in_run(lambda c: replica() and c.all_reduce("sum", np.ones(1))),
        RuntimeError,
        "equally often; replicas 0 and 1",
    ),
    "all_gather: axis": (
        in_run(lambda c: c.all_gather(np.ones(1), 3)),
        ValueError,
        "axis 3; out of range; [1]",
    ),
    "all_gather: no axis": (
        in_run(lambda c: c.all_gather(np.ones(1), None)),
        ValueError,
        "integer; got None",
    ),
    "all_gather: scalar": (in_run(lambda c: c.all_gather(1.0, 0)), ValueError, "value[None]"),
    "all_gather: object": (
        in_run(lambda c: c.all_gather(UNSUPPORTED, 0)),
        TypeError,
        "got object",
    ),
    "all_gather: slices": (
        in_run(lambda c: c.all_gather(slices(), 0)),
        NotImplementedError,
        "IndexedSlices; all_reduce",
    ),
}

VARIABLES: dict[str, Case] = {
    "initial value": (in_scope(lambda: ms.Variable(UNSUPPORTED)), TypeError, "got object"),
    "initial value: None": (in_scope(lambda: ms.Variable(None)), ValueError, "value; got None"),
    "initial value: string": (in_scope(lambda: ms.Variable("abc")), TypeError, "got str: 'abc'"),
    "outside a scope": (lambda: ms.Variable(UNSUPPORTED), TypeError, "got object"),
    "nothing": (in_scope(lambda: ms.Variable()), TypeError, "initial_value"),
    "dtype": (in_scope(lambda: ms.Variable(1.0, dtype="float31")), TypeError, "float31; NumPy"),
    "torch's dtype": (
        in_scope(lambda: ms.Variable(np.ones(1), dtype=torch.float32)),
        TypeError,
        "torch.float32; not a dtype of NumPy",
    ),
    "NumPy's dtype": (
        in_scope(lambda: ms.Variable(torch.ones(1), dtype=np.float32)),
        TypeError,
        "float32; not a dtype of torch",
    ),
    "synchronization": (
        lambda: variable(synchronization="ON_READ"),
        ValueError,
        "VariableSynchronization; got 'ON_READ'",
    ),
    "synchronization: NONE": (
        lambda: variable(synchronization=ms.VariableSynchronization.NONE),
        ValueError,
        "NONE is not supported; ON_WRITE or ON_READ",
    ),
    "aggregation": (
        lambda: variable(aggregation=SUM),
        ValueError,
        "VariableAggregation; got <ReduceOp.SUM",
    ),
    "mean of integers": (
        in_scope(lambda: ms.Variable(1, aggregation=ms.VariableAggregation.MEAN)),
        ValueError,
        "MEAN; floating; int64",
    ),
    "name": (in_scope(lambda: ms.Variable(1.0, name=5)), TypeError, "name; string; got 5"),
    "trainable": (lambda: variable(trainable="yes"), TypeError, "True, False or None; got 'yes'"),
    "assign: shape": (
        lambda: W.assign(np.ones(3)),
        InvalidArgumentError,
        "'w' has shape [2]; operand [3]",
    ),
    "assign: dtype": (
        lambda: W.assign(np.ones(2, "i8")),
        InvalidArgumentError,
        "'w' has dtype float64; int64; convert",
    ),
    "assign: object": (lambda: W.assign(UNSUPPORTED), TypeError, "'w'; number; got object"),
    "assign: None": (lambda: W.assign_add(None), TypeError, "'w'; got NoneType"),
    "assign: per-replica value": (
        lambda: W.assign(VALUE),
        ValueError,
        "'w'; one value for all replicas; reduce it first",
    ),
    "assign: other strategy": (
        in_scope(lambda: W.assign(np.ones(2)), ONE_DEVICE),
        RuntimeError,
        "'w' belongs to MirroredStrategy; OneDeviceStrategy; mixed",
    ),
    "sum of a number": (
        in_run(lambda c: SUMMED.assign(1.0)),
        ValueError,
        "assign to 'w'; SUM of 2 replicas; 1.0; array",
    ),
    "no aggregation in central storage": (
        lambda: CENTRAL.run(central_variable().assign, (1.0,)),
        ValueError,
        "one copy; aggregation; SUM",
    ),
    "scatter": (lambda: W.scatter_add(5), TypeError, "'w'; IndexedSlices; got 5"),
    "scatter: index": (lambda: W.scatter_add(slices(index=7)), IndexError, "7; out of bounds"),
    "scatter: rows": (
        lambda: W.scatter_add(slices(rows=np.ones((1, 5)))),
        InvalidArgumentError,
        "'w'; rows of shape [1]; [1, 5]",
    ),
    "scatter: floats into integers": (
        lambda: ms.Variable(np.zeros(2, int)).scatter_add(slices()),
        InvalidArgumentError,
        "int64; float64",
    ),
    "scatter on read": (
        lambda: ON_READ.scatter_add(slices()),
        NotImplementedError,
        "ON_READ; scatter_add; use assign",
    ),
    "scatter_min of sums": (
        lambda: SUMMED.scatter_min(slices()),
        NotImplementedError,
        "scatter_min; SUM; use aggregation NONE",
    ),
    "read without aggregation": (
        lambda: ON_READ.read_value(),
        ValueError,
        "'w'; NONE; inside run",
    ),
    "load_state": (lambda: W.load_state(UNSUPPORTED), TypeError, "'w'; got object"),
    "slices: lengths": (
        lambda: ms.IndexedSlices(np.ones(2), np.ones(3, int)),
        ValueError,
        "one index per row; [3]; [2]",
    ),
    "slices: float indices": (
        lambda: ms.IndexedSlices(np.ones(2), np.ones(2)),
        TypeError,
        "integer indices; float64",
    ),
    "slices: object": (lambda: ms.IndexedSlices(UNSUPPORTED, [0]), TypeError, "got object"),
    "slices: dense_shape": (
        lambda: ms.IndexedSlices(np.ones((1, 2)), [0], (3,)),
        ValueError,
        "dense_shape; 2 dimensions; (3,)",
    ),
}


def central_variable() -> Any:
    with CENTRAL.scope():
        return ms.Variable(0.0)


OPTIONS: dict[str, Case] = {
    "bytes_per_pack": (lambda: ms.CommunicationOptions(-1), ValueError, ">= 0; got -1"),
    "bytes_per_pack: type": (lambda: ms.CommunicationOptions("1"), TypeError, "integer; got '1'"),
    "timeout": (lambda: ms.CommunicationOptions(0, "5"), TypeError, "number or None; got '5'"),
    "timeout: negative": (lambda: ms.CommunicationOptions(0, -1), ValueError, ">= 0; got -1"),
    "implementation": (
        lambda: ms.CommunicationOptions(implementation="gloo"),
        ValueError,
        "AUTO, RING, NCCL, HIERARCHICAL, MPI; got 'gloo'",
    ),
    "merge": (lambda: ms.CommunicationOptions().merge(5), TypeError, "CommunicationOptions; 5"),
    "replication mode": (
        lambda: ms.InputOptions(experimental_replication_mode="PER_REPLICA"),
        TypeError,
        "InputReplicationMode; got 'PER_REPLICA'",
    ),
    "buffer size": (
        lambda: ms.InputOptions(experimental_per_replica_buffer_size=0),
        ValueError,
        "positive integer; got 0",
    ),
    "uneven batch": (
        lambda: ms.InputContext(2, 0, 2).get_per_replica_batch_size(3),
        ValueError,
        "batch size 3; replicas, 2",
    ),
    "batch size": (
        lambda: ms.InputContext().get_per_replica_batch_size("3"),
        TypeError,
        "integer; got '3'",
    ),
    "pipeline": (lambda: ms.InputContext(2, 2, 2), ValueError, "input_pipeline_id; 2; got 2"),
    "pipelines": (lambda: ms.InputContext("2"), TypeError, "num_input_pipelines; got '2'"),
    "no replicas": (lambda: ms.InputContext(1, 0, 0), ValueError, "positive; got 0"),
    "dataset": (
        lambda: PAIR.experimental_distribute_dataset(5),
        ValueError,
        "iterable of batches; DataLoader; got 5",
    ),
    "dataset options": (
        lambda: PAIR.experimental_distribute_dataset([], 5),
        TypeError,
        "InputOptions; got 5",
    ),
    "dataset of numbers": (
        lambda: list(PAIR.experimental_distribute_dataset([1])),
        ValueError,
        "call batch first; Got 1",
    ),
    "dataset of uneven parts": (
        lambda: list(PAIR.experimental_distribute_dataset([(np.ones(2), np.ones(3))])),
        ValueError,
        "same first dimension; GLOBAL; [2, 3]",
    ),
    "dataset function": (
        lambda: PAIR.distribute_datasets_from_function([1]),
        TypeError,
        "takes a function; got [1]",
    ),
    "dataset function's result": (
        lambda: PAIR.distribute_datasets_from_function(lambda context: 5),
        ValueError,
        "iterable of batches; got 5",
    ),
    "loss outside run": (
        in_scope(lambda: ms.compute_average_loss(np.ones(2))),
        RuntimeError,
        "compute_average_loss; outside run",
    ),
    "loss": (in_run(lambda c: ms.compute_average_loss(UNSUPPORTED)), TypeError, "got object"),
    "reduced loss": (
        in_run(lambda c: ms.compute_average_loss(1.0)),
        ValueError,
        "dimension of examples; reduction='none'",
    ),
    "global batch size": (
        in_run(lambda c: ms.compute_average_loss(np.ones(2), global_batch_size=0)),
        ValueError,
        "positive; got 0",
    ),
    "global batch size: type": (
        in_run(lambda c: ms.compute_average_loss(np.ones(2), global_batch_size="8")),
        TypeError,
        "integer; got '8'",
    ),
    "sample weight": (
        in_run(lambda c: ms.compute_average_loss(np.ones(2), np.ones(3))),
        ValueError,
        "[3]; [2]",
    ),
    "empty batch": (
        in_run(lambda c: ms.compute_average_loss(np.ones(0))),
        ValueError,
        "empty; pass global_batch_size",
    ),
    "regularization outside run": (
        in_scope(lambda: ms.scale_regularization_loss(1.0)),
        RuntimeError,
        "scale_regularization_loss; outside run",
    ),
}

OPS_CASES: dict[str, Case] = {
    "op": (lambda: OPS.reduce("sum", VALUE, VALUE), ValueError, "ReduceOp.SUM; got 'sum'"),
    "destinations": (lambda: OPS.reduce(SUM, VALUE, 5), ValueError, "name of a device; got 5"),
    "device": (lambda: OPS.reduce(SUM, VALUE, "banana"), ValueError, "'cpu:0'; got 'banana'"),
    "object": (lambda: OPS.reduce(SUM, UNSUPPORTED, VALUE), TypeError, "got object"),
    "options": (lambda: OPS.reduce(SUM, VALUE, VALUE, 5), TypeError, "CommunicationOptions; 5"),
    "pairs": (lambda: OPS.batch_reduce(SUM, [VALUE]), ValueError, "tuples; got [PerReplica"),
    "gather": (lambda: OPS.gather(VALUE, VALUE, 7), ValueError, "axis 7; out of range; [3]"),
    "broadcast": (lambda: OPS.broadcast(UNSUPPORTED, VALUE), TypeError, "got object"),
    "half-made": (
        lambda: ms.CrossDeviceOps().reduce(SUM, VALUE, VALUE),
        NotImplementedError,
        "must implement reduce_implementation",
    ),
    "num_packs": (lambda: ms.NcclAllReduce(-1), ValueError, ">= 0; got -1"),
    "num_packs: type": (
        lambda: ms.HierarchicalCopyAllReduce("2"),
        TypeError,
        "integer; got '2'",
    ),
    "reduce_to_device": (lambda: ms.ReductionToOneDevice("disk"), ValueError, "got 'disk'"),
    "accumulation_fn": (
        lambda: ms.ReductionToOneDevice(accumulation_fn=5),
        TypeError,
        "function; got 5",
    ),
    "communicator": (
        lambda: ms.MpiAllReduce(5),
        TypeError,
        "strategy.extended.communicator; got 5",
    ),
}

TABLES = {
    "constructor": CONSTRUCTORS,
    "run": RUN,
    "reduce": REDUCE,
    "extended": EXTENDED,
    "replica": REPLICA,
    "variable": VARIABLES,
    "options": OPTIONS,
    "ops": OPS_CASES,
}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        pytest.param(*case, id=f"{table}: {name}")
        for table, cases in TABLES.items()
        for name, case in cases.items()
    ],
)
def test_it_says_what_is_wrong(
    call: Callable[[], Any], error: type[BaseException], words: str
) -> None:
    with pytest.raises(error) as raised:
        call()
    assert not isinstance(raised.value, AttributeError)
    message = str(raised.value)
    for word in words.split("; "):
        assert re.search(re.escape(word), message), f"{word!r} is not in: {message}"
    assert not ms.has_strategy(), "the context of the failed call is still in force"
