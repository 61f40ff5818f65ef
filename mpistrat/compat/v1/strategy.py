"""The strategies of `tf.compat.v1.distribute`: a mixin with the v1 methods, and a class of each strategy with it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpistrat import context, strategies
from mpistrat.communicators import RaisingOnAll
from mpistrat.compat.v1.datasets import Calls, NumpyDataset
from mpistrat.errors import OutOfRangeError
from mpistrat.input import DistributedIterator, InputContext
from mpistrat.input.distribution import distribute, distribute_from_function
from mpistrat.machine.notices import warn_of_no_effect
from mpistrat.options import InputOptions, InputReplicationMode, RunOptions
from mpistrat.parameter_server.strategies.v1_strategy import BetweenGraphStrategy
from mpistrat.reduce_op import ReduceOp
from mpistrat.strategy import Strategy as StrategyV2

_NO_SESSIONS = "there are no sessions to read it"


class StrategyV1(StrategyV2):
    """A mixin with the methods of `tf.compat.v1.distribute.Strategy` that `Strategy` does not have.

    Example:
        >>> strategy = ms.compat.v1.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> ids = strategy.experimental_run_v2(lambda: np.array(ms.get_replica_context().replica_id_in_sync_group))
        >>> strategy.unwrap(ids), strategy.reduce("SUM", ids)
        ((array(0), array(1)), array(1))

    Example:
        >>> strategy = ms.compat.v1.OneDeviceStrategy("cpu")
        >>> strategy.group(np.ones(2))  # all values are computed already
        >>> strategy.configure()  # without effect
        >>> config = strategy.update_config_proto({})  # a copy
        >>> with strategy.scope(), strategy.colocate_vars_with(ms.Variable(0.0)):
        ...     slot = ms.Variable(1.0)
    """

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None
    ) -> Any:
        """Like `Strategy.reduce`, but `axis` is optional."""
        return super().reduce(reduce_op, value, axis)

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call `run` with the same arguments: its old name."""
        return self.run(fn, args, kwargs, options)

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> Any:
        """Call `run(fn)` in the strategy's scope, with the next element of `input_iterator` as the argument of `fn`.

        Args:
            input_iterator: any iterator; with None, `fn` is called without arguments.
        Returns: the result of `run`.
        Raises:
            OutOfRangeError: the iterator has ended.

        Example:
            >>> strategy = ms.compat.v1.OneDeviceStrategy("cpu")
            >>> iterator = strategy.make_dataset_iterator([np.ones(4), np.ones(4)])
            >>> strategy.experimental_run(np.sum, iterator).tolist()
            4.0
        """
        args: tuple[Any, ...] = ()
        if input_iterator is not None:
            try:
                args = (next(input_iterator),)
            except StopIteration:
                raise OutOfRangeError("the iterator has ended") from None
        with self.scope():
            return self.run(fn, args)

    def make_dataset_iterator(self, dataset: Any) -> DistributedIterator:
        """Return an iterator of `experimental_distribute_dataset(dataset)`. Called by: every rank."""
        return iter(distribute(dataset, self.extended, InputOptions()))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> DistributedIterator:
        """Return an iterator over steps with a batch for each replica. The end is a step without a batch for a replica.

        Called by: every rank.
        Args:
            input_fn: takes an InputContext, and returns a dataset of batches for single replicas, or a function. Each
                call of that function returns the batch of the next replica; at the end it raises OutOfRangeError.
            replication_mode: PER_WORKER is the only possible mode.
        Raises: ValueError for another mode, or, on all ranks, if `input_fn` returns neither a dataset nor a function.

        Example:
            >>> strategy = ms.compat.v1.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> iterator = strategy.make_input_fn_iterator(lambda context: [np.zeros(4), np.ones(4)])
            >>> next(iterator).values  # a batch for each replica
            (array([0., 0., 0., 0.]), array([1., 1., 1., 1.]))
        """
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                f"make_input_fn_iterator takes InputReplicationMode.PER_WORKER, got {replication_mode!r:.60}"
            )
        communicator = self.extended.communicator
        place = InputContext(*self.extended.input.pipelines, self.num_replicas_in_sync)

        with RaisingOnAll(communicator, "could not make its dataset"):
            made = input_fn(place)
            if not isinstance(made, Iterable):
                if not callable(made):
                    raise ValueError(
                        "input_fn must return a dataset (an iterable of batches), or a function that returns "
                        f"the next batch; got {made!r:.60}"
                    )
                made = Calls(made)
            dataset = distribute_from_function([made], self.extended, InputOptions(), partial=False)
        return iter(dataset)

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: Any = None
    ) -> NumpyDataset:
        """Return a dataset of the slices of `numpy_input`, a nest of arrays, along axis 0.

        The dataset is neither batched nor distributed: pass `BatchedDataset(dataset, batch_size)` to
        `experimental_distribute_dataset`. A list of arrays is stacked first.

        Context: cross-replica or top level.
        Args:
            numpy_input: a nest of arrays.
            session: has no effect, and a warning says so once.
        Raises: ValueError if the arrays do not have equal first dimensions.

        Example:
            >>> strategy = ms.compat.v1.OneDeviceStrategy("cpu")
            >>> examples = strategy.experimental_make_numpy_dataset({"x": np.arange(6)})
            >>> dataset = strategy.experimental_distribute_dataset(ms.input.BatchedDataset(examples, 3))
            >>> [batch["x"].tolist() for batch in dataset]
            [[0, 1, 2], [3, 4, 5]]
        """
        if session is not None:
            warn_of_no_effect(
                "session of experimental_make_numpy_dataset", _NO_SESSIONS, self._rank
            )
        context.require_cross_replica(self, "experimental_make_numpy_dataset")
        return NumpyDataset(numpy_input)

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Return the components of `value` on this rank: the old name of `experimental_local_results`."""
        return self.experimental_local_results(value)

    def group(self, value: Any, name: str | None = None) -> None:
        """Do nothing, and return None. TensorFlow returns an operation here; values are always computed already.

        Args:
            name: has no effect, and a warning says so once.
        """
        if name is not None:
            warn_of_no_effect("name of group", "there is no graph of named operations", self._rank)

    def colocate_vars_with(self, variable: Any) -> contextlib.AbstractContextManager[None]:
        """Return `extended.colocate_vars_with(variable)`, a scope for variables that are made beside `variable`."""
        return self.extended.colocate_vars_with(variable)

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Do nothing, and warn once if an argument is given: MPI decides who takes part, when the strategy is made."""
        if any(value is not None for value in (session_config, cluster_spec, task_type, task_id)):
            warn_of_no_effect(
                "configure",
                "MPI has decided who takes part when the strategy was made, and there are no sessions",
                self._rank,
            )

    @property
    def _rank(self) -> int:
        return self.extended.communicator.rank

    def update_config_proto(self, config_proto: Any) -> Any:
        """Return a deep copy of `config_proto` (any object), and warn once that nothing reads it.

        As in TensorFlow, the copy gets `isolate_session_state = True`, except with a strategy of one replica.
        """
        warn_of_no_effect("the copy that update_config_proto returns", _NO_SESSIONS, self._rank)
        updated = copy.deepcopy(config_proto)
        if self.extended.wraps_values:
            updated.isolate_session_state = True
        return updated


Strategy = StrategyV1  # its name in tf.compat.v1.distribute


class OneDeviceStrategy(StrategyV1, strategies.OneDeviceStrategy):
    """`mpistrat.OneDeviceStrategy` with the v1 methods.

    Example:
        >>> strategy = ms.compat.v1.OneDeviceStrategy("cpu")
        >>> strategy.experimental_run_v2(lambda: "a step")
        'a step'
    """


class MirroredStrategy(StrategyV1, strategies.MirroredStrategy):
    """`mpistrat.MirroredStrategy` with the v1 methods.

    Example:
        >>> strategy = ms.compat.v1.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.reduce("SUM", strategy.experimental_run_v2(lambda: np.ones(1))).tolist()
        [2.0]
    """


class MultiWorkerMirroredStrategy(StrategyV1, strategies.MultiWorkerMirroredStrategy):
    """`mpistrat.MultiWorkerMirroredStrategy` with the v1 methods.

    Example:
        >>> strategy = ms.compat.v1.experimental.MultiWorkerMirroredStrategy(devices=["cpu"])
        >>> strategy.experimental_run_v2(lambda: "a step on each rank")
        'a step on each rank'
    """


class CentralStorageStrategy(StrategyV1, strategies.CentralStorageStrategy):
    """`mpistrat.CentralStorageStrategy` with the v1 methods.

    Example:
        >>> strategy = ms.compat.v1.experimental.CentralStorageStrategy()
        >>> strategy.experimental_run_v2(lambda: "a step")
        'a step'
    """


class ParameterServerStrategy(StrategyV1, BetweenGraphStrategy):
    __doc__ = BetweenGraphStrategy.__doc__


class _DefaultV1(StrategyV1):
    """The default strategy with the v1 methods; it shares all state with the default strategy."""

    def __init__(self, default: StrategyV2) -> None:
        super().__init__(default.extended)
        self._default = default

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Return `dataset` itself."""
        return self._default.experimental_distribute_dataset(dataset, options)

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """Return the dataset that `dataset_fn(InputContext())` makes."""
        return self._default.distribute_datasets_from_function(dataset_fn, options)

    def make_dataset_iterator(self, dataset: Any) -> DistributedIterator:
        return OneDeviceStrategy("cpu:0").make_dataset_iterator(dataset)

    def make_input_fn_iterator(self, *args: Any, **kwargs: Any) -> DistributedIterator:
        return OneDeviceStrategy("cpu:0").make_input_fn_iterator(*args, **kwargs)


def get_strategy() -> StrategyV2:
    """Return the strategy in force; if there is none, the default one with the v1 methods.

    Example:
        >>> with ms.compat.v1.OneDeviceStrategy("cpu").scope() as strategy:
        ...     ms.compat.v1.get_strategy() is strategy
        True
        >>> ms.compat.v1.get_strategy().experimental_run(lambda: 1)
        1
    """
    current = context.get_strategy()
    return current if context.has_strategy() else _DefaultV1(current)


def get_loss_reduction() -> ReduceOp:
    """Return how losses of replicas are combined: always `ReduceOp.SUM`.

    Example:
        >>> ms.compat.v1.get_loss_reduction()
        <ReduceOp.SUM: 'SUM'>
    """
    return ReduceOp.SUM
