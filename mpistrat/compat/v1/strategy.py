"""The v1 face: a mixin over the strategies, and the strategies with it."""

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
from mpistrat.strategy import Strategy

_NO_SESSIONS = "there are no sessions, which would read it"


class StrategyV1(Strategy):
    """What `tf.compat.v1.distribute.Strategy` has beside the methods of today."""

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None
    ) -> Any:
        """`Strategy.reduce`, with `axis` optional."""
        return super().reduce(reduce_op, value, axis)

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """The old name of `run`."""
        return self.run(fn, args, kwargs, options)

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> Any:
        """`run(fn)` on one step of `input_iterator` (any iterator), or without arguments if there is none.

        Raises:
            OutOfRangeError: the iterator has ended.
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
        """An iterator of what `experimental_distribute_dataset(dataset)` gives. Called by: every rank."""
        return iter(distribute(dataset, self.extended, InputOptions()))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> DistributedIterator:
        """An iterator over batches per replica. A step that cannot fill every replica ends it.

        Called by: every rank.
        Args:
            input_fn: gives a dataset of batches, or a function that gives the next batch (OutOfRangeError: there is
                none), called for one replica after the other.
            replication_mode: PER_WORKER is the only one.
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
                        "input_fn must return a dataset, which is an iterable of batches, or a function that gives "
                        f"the next batch; got {made!r:.60}"
                    )
                made = Calls(made)
            dataset = distribute_from_function([made], self.extended, InputOptions(), partial=False)
        return iter(dataset)

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: Any = None
    ) -> NumpyDataset:
        """A dataset of the slices of `numpy_input`, a nest of arrays, along axis 0.

        It is neither batched nor distributed: give `BatchedDataset(it, batch_size)` to
        `experimental_distribute_dataset`. Lists of arrays are stacked first. Context: cross-replica or top level.
        Args:
            session: does nothing, and a warning says so once.
        """
        if session is not None:
            warn_of_no_effect(
                "session of experimental_make_numpy_dataset", _NO_SESSIONS, self._rank
            )
        context.require_cross_replica(self, "experimental_make_numpy_dataset")
        return NumpyDataset(numpy_input)

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """The old name of `experimental_local_results`."""
        return self.experimental_local_results(value)

    def group(self, value: Any, name: str | None = None) -> None:
        """Returns when all components of `value` are computed: here they always are. `name` does nothing."""
        if name is not None:
            warn_of_no_effect("name of group", "there is no graph of named operations", self._rank)

    def colocate_vars_with(self, variable: Any) -> contextlib.AbstractContextManager[None]:
        """`extended.colocate_vars_with`."""
        return self.extended.colocate_vars_with(variable)

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Does nothing, and a warning says so once: MPI decides who takes part, when the strategy is made."""
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
        """A copy of `config_proto`, any object, as TensorFlow changes it. Nothing reads that, and a warning says so."""
        warn_of_no_effect("the copy that update_config_proto returns", _NO_SESSIONS, self._rank)
        updated = copy.deepcopy(config_proto)
        if self.extended.wraps_values:
            updated.isolate_session_state = True
        return updated


class OneDeviceStrategy(StrategyV1, strategies.OneDeviceStrategy):
    """`mpistrat.OneDeviceStrategy` with the v1 methods."""


class MirroredStrategy(StrategyV1, strategies.MirroredStrategy):
    """`mpistrat.MirroredStrategy` with the v1 methods."""


class MultiWorkerMirroredStrategy(StrategyV1, strategies.MultiWorkerMirroredStrategy):
    """`mpistrat.MultiWorkerMirroredStrategy` with the v1 methods."""


class CentralStorageStrategy(StrategyV1, strategies.CentralStorageStrategy):
    """`mpistrat.CentralStorageStrategy` with the v1 methods."""


class ParameterServerStrategy(StrategyV1, BetweenGraphStrategy):
    __doc__ = BetweenGraphStrategy.__doc__


class _DefaultV1(StrategyV1):
    """The default strategy with the v1 methods; it shares everything with the one it stands for."""

    def __init__(self, default: Strategy) -> None:
        super().__init__(default.extended)
        self._default = default

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """`dataset` itself."""
        return self._default.experimental_distribute_dataset(dataset, options)

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """What `dataset_fn(InputContext())` makes."""
        return self._default.distribute_datasets_from_function(dataset_fn, options)

    def make_dataset_iterator(self, dataset: Any) -> DistributedIterator:
        return OneDeviceStrategy("cpu:0").make_dataset_iterator(dataset)

    def make_input_fn_iterator(self, *args: Any, **kwargs: Any) -> DistributedIterator:
        return OneDeviceStrategy("cpu:0").make_input_fn_iterator(*args, **kwargs)


def get_strategy() -> Strategy:
    """The strategy in force; where there is none, the default one with the v1 methods."""
    current = context.get_strategy()
    return current if context.has_strategy() else _DefaultV1(current)


def get_loss_reduction() -> ReduceOp:
    """How losses of replicas are combined: they are summed."""
    return ReduceOp.SUM
