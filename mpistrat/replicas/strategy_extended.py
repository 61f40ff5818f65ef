"""`StrategyExtended`: the methods of a strategy for algorithms that are aware of the distribution.

Programs use `Strategy`. Strategies differ in the parts of their `StrategyExtended`: replicas, variables, checkpoints,
input and torch modules.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpistrat.context import (
    AnyStrategy,
    check_call,
    entered,
    get_replica_context,
    get_strategy,
    has_strategy,
    per_thread,
    require_cross_replica,
)
from mpistrat.cross_device_ops.cross_device_ops import check_pairs
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp, VariableAggregation, VariableSynchronization
from mpistrat.replicas.checkpoint_role import CheckpointRole
from mpistrat.replicas.input_plan import InputPlan
from mpistrat.replicas.torch_modules import TorchModules
from mpistrat.values import DistributedValues, Mirrored, select_replica
from mpistrat.variables.store import VariableStore
from mpistrat.variables.variable import Variable
from mpistrat.variables.variable_arguments import checked_arguments


class Parts(NamedTuple):
    """The parts that make one strategy differ from another. Each strategy's `…_parts` module puts them together.

    Attributes:
        modules: mirrors torch modules and reduces their gradients; holds the strategy's `Replicas`.
        variables: makes variables and keeps their copies.
        input: the part of the input that this rank reads.
        checkpoints: whether this rank saves and restores, or follows another rank.
        between_graph: the value of `experimental_between_graph`.
        wraps_values: whether `experimental_distribute_values_from_function` returns a `PerReplica`. If False, it gives
            the only replica's value.
    """

    modules: TorchModules
    variables: VariableStore
    input: InputPlan
    checkpoints: CheckpointRole = CheckpointRole()
    between_graph: bool = False
    wraps_values: bool = True


class MultiStepContext:
    """The outputs of the step function of `experimental_run_steps_on_iterator`.

    Attributes:
        last_step_outputs: outputs of the last step, by name.
        non_tensor_outputs: other outputs, by name.
    """

    def __init__(self, initial_outputs: Mapping[str, Any] | None = None) -> None:
        self.last_step_outputs: dict[str, Any] = dict(initial_outputs or {})
        self.non_tensor_outputs: dict[str, Any] = {}

    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Keep `output` in `last_step_outputs[name]`; with a `reduce_op`, reduce it over all replicas first.

        Raises:
            AssertionError: inside `run` without a `reduce_op`.
        """
        context = get_replica_context()
        if context is not None:
            if reduce_op is None:
                raise AssertionError(
                    f"set_last_step_output({name!r}) inside run needs a reduce_op: 'sum' or 'mean'"
                )
            output = context.all_reduce(reduce_op, output)
        elif reduce_op is not None:
            output = get_strategy().reduce(reduce_op, output, axis=None)
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Keep `output` in `non_tensor_outputs[name]`, as it is."""
        self.non_tensor_outputs[name] = output


class StrategyExtended(abc.ABC):
    """Additional methods of a strategy (`strategy.extended`), for algorithms that are aware of the distribution.

    Attributes:
        communicator: the communicator of all ranks that have the strategy's replicas.
        worker_devices: this rank's devices, one replica each.
        num_local_replicas, num_replicas_in_sync: number of replicas of this rank, and of all ranks.
        replicas_of_ranks: number of replicas of each rank, in rank order.
        first_replica_id: the number of this rank's first replica, counted over all ranks.
        deterministic: whether results do not depend on how replicas are spread over ranks.
        topology: the ranks that run the program. With parameter servers, `communicator` has fewer ranks.
        replicas: runs functions on this rank's replicas.
        cross_replica_ops: combines values of all replicas.
        variables: makes variables and keeps their copies.
        checkpoints: whether this rank saves and restores, or follows another rank.
        input: the part of the input that this rank reads.
        modules: mirrors torch modules and reduces their gradients.
        wraps_values: whether `experimental_distribute_values_from_function` returns a `PerReplica`.
        given_steps: the steps that distributed datasets have given on this rank.
        experimental_require_static_shapes: whether shapes must not depend on values.

    Example:
        >>> extended = ms.OneDeviceStrategy("cpu").extended
        >>> extended.worker_devices, extended.parameter_devices, extended.should_checkpoint
        (('cpu:0',), ('cpu:0',), True)
        >>> extended.explain()
        'one rank: nothing moves'

    Example:
        >>> extended = ms.OneDeviceStrategy("cpu").extended
        >>> extended.experimental_between_graph, extended.experimental_should_init, extended.should_save_summary
        (False, True, True)
    """

    experimental_require_static_shapes = False

    def __init__(self, strategy: AnyStrategy, parts: Parts) -> None:
        self.strategy = strategy
        self.modules = parts.modules
        self.variables = parts.variables
        self.input = parts.input
        self.checkpoints = parts.checkpoints
        self._between_graph = parts.between_graph
        self.wraps_values = parts.wraps_values
        self.replicas = self.modules.parts.replicas
        self.cross_replica_ops = self.replicas.ops
        group = self.replicas.group
        self.communicator = group.communicator
        self.replicas_of_ranks = group.replicas_of_ranks
        self.num_local_replicas = group.num_local_replicas
        self.num_replicas_in_sync = group.num_replicas_in_sync
        self.given_steps = self.replicas.given_steps
        self.first_replica_id = group.first_replica_id
        self.deterministic = group.deterministic
        self.topology = group.topology

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each rank runs a program of its own."""
        return self._between_graph

    @abc.abstractmethod
    def check_destination(self, destinations: Any) -> None:
        """Check that values can be reduced to `destinations`, a device or a distributed value.

        Raises: ValueError if nothing can be reduced to `destinations`.
        """

    @property
    def experimental_should_init(self) -> bool:
        """Whether this rank makes the first values of variables."""
        return self.variables.owns_initial_values

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank is to write logs; True on one rank."""
        return self.variables.owns_initial_values and self.communicator.rank == 0

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank is to save checkpoints; True on one rank."""
        return self.checkpoints.saves and self.communicator.rank == 0

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """This rank's devices, one replica each."""
        return self.replicas.group.worker_devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the devices that hold variables."""
        return self.variables.devices

    def explain(self) -> str:
        """Return lines of text: how values are combined over ranks, and how much memory that takes. Not collective."""
        lines = [self.communicator.explain(), self.modules.explain()]
        if self.deterministic:
            lines.append(
                f"deterministic: {self.num_replicas_in_sync} replicas are added up in the order of their ids; "
                f"intra-op threads: {self.replicas.group.fixed_threads}"
            )
        lines.append(self.replicas.explain())
        return "\n".join(filter(None, lines))

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, a dict, that a deterministic job must keep to go on with the same bits. Not collective.

        Example:
            >>> extended = ms.OneDeviceStrategy("cpu").extended
            >>> state = extended.state_dict()
            >>> state
            {'deterministic': False, 'num_replicas_in_sync': 1, 'intra_op_threads': None}
            >>> extended.load_state_dict(state)
        """
        return {
            "deterministic": self.deterministic,
            "num_replicas_in_sync": self.num_replicas_in_sync,
            "intra_op_threads": self.replicas.group.fixed_threads,
        }

    def state_schema(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the form that a state must have, for `checkpoint.schema`. Not collective.

        Example:
            >>> ms.OneDeviceStrategy("cpu").extended.state_schema({})["deterministic"]
            <class 'bool'>
        """
        count = range(1, 1 << 31)
        return {
            "deterministic": bool,
            "num_replicas_in_sync": count,
            "intra_op_threads": (count, None),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a job that was deterministic goes on with the same bits. Changes nothing, and sends nothing.

        Args:
            state: a result of `state_dict`, from any number of ranks; equal on all ranks.
        Raises:
            ValueError: the saved job was deterministic, and this job has other settings.
        """
        current = self.state_dict()
        if state["deterministic"] and dict(state) != current:
            raise ValueError(
                f"the saved job was deterministic, with {dict(state)}; this one is {current}, and would go on with "
                "other bits. Start it with as many replicas in all (ranks times devices=), deterministic=True, and "
                f"OMP_NUM_THREADS={state['intra_op_threads']}; or leave this check out (of a "
                "Checkpoint: del checkpoint.objects['strategy'])"
            )

    def seconds_waited(self, last: int = 60) -> list[float]:
        """Return how long each rank has waited in collectives for other ranks. The slowest rank has waited least.

        Called by: every rank.
        Args:
            last: number of seconds to look back, at most 63.
        Returns: a list of seconds, in rank order, equal on all ranks. With `check="never"` nothing is measured.

        Example:
            >>> ms.OneDeviceStrategy("cpu").extended.seconds_waited(last=10)
            [0.0]
        """
        return self.communicator.all_gather_object(
            self.communicator.contract.seconds_waited(last), label="seconds_waited"
        )

    # Running

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `fn` on each replica of this rank and regroup the results. Communicates nothing.

        Returns: with one replica, the result of `fn`; else a structure of `PerReplica` values.

        Example:
            >>> extended = ms.OneDeviceStrategy("cpu").extended
            >>> extended.call_for_each_replica(lambda x: 2 * x, args=(3,))
            6
        """
        return self.replicas.call(fn, args, kwargs)

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: Iterator[Any],
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> MultiStepContext:
        """Call `fn(context, next(iterator))` `iterations` times, in the scope. Returns: the context.

        Called by: every rank.   Context: cross-replica or top level.
        Raises: StopIteration if `iterator` gives fewer than `iterations` steps.

        Example:
            >>> extended = ms.OneDeviceStrategy("cpu").extended
            >>> def step(context, batch):
            ...     context.set_last_step_output("sum", sum(batch))
            >>> extended.experimental_run_steps_on_iterator(step, iter([[1, 2], [3, 4]]), 2).last_step_outputs
            {'sum': 7}
        """
        require_cross_replica(self.strategy, "experimental_run_steps_on_iterator")
        context = MultiStepContext(initial_loop_values)
        with entered(self.strategy, self.replicas, None):
            for _ in range(iterations):
                fn(context, next(iterator))
        return context

    # Variables

    def create_variable(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        shape: Sequence[int] | None = None,
    ) -> Variable:
        """Make a variable, for `mpistrat.Variable(...)` in the scope or inside `run`. Called by: every rank.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> with strategy.scope():
            ...     v = strategy.extended.create_variable(1.0, name="v")
            >>> strategy.extended.variable_created_in_scope(v)
            True
        """
        with self.communicator.raising_together():
            asked = checked_arguments(
                initial_value, trainable, name, dtype, synchronization, aggregation, shape
            )

        def create(strategy: AnyStrategy, initial: Any) -> Variable:
            return self.variables.create(asked._replace(initial_value=select_replica(0, initial)))

        context = _context_of_replica()
        if context is None:
            return create(self.strategy, initial_value)
        return context.merge_call(create, (initial_value,))

    def variable_created_in_scope(self, variable: Any) -> bool:
        """Whether `variable` was made in this strategy's scope."""
        return getattr(self.value_container(variable), "strategy", None) is self.strategy

    def value_container(self, value: Any) -> Any:
        """Return the distributed variable that the component `value` belongs to, or `value` itself if there is none.

        Example:
            >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> with strategy.scope():
            ...     v = ms.Variable(1.0)
            >>> strategy.extended.value_container(v.values[0]) is v
            True
        """
        return getattr(value, "_container", value)

    def read_var(self, variable: Any) -> Any:
        """Return the variable's value; for an ON_READ variable, all replicas' copies combined.

        Raises: TypeError if `variable` is no variable.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> with strategy.scope():
            ...     strategy.extended.read_var(ms.Variable(1.0))
            array(1., dtype=float32)
        """
        if not hasattr(variable, "read_value"):
            raise TypeError(f"read_var takes a variable, got {variable!r:.60}")
        return variable.read_value()

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """A context in which new variables are placed with `colocate_with_variable`, a variable of this strategy.

        Raises:
            RuntimeError: outside this strategy's scope.
            ValueError: the variable was not made in this strategy's scope.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> with strategy.scope():
            ...     weight = ms.Variable(1.0)
            ...     with strategy.extended.colocate_vars_with(weight):
            ...         bias = ms.Variable(0.0)
        """
        innermost = [mode.strategy for mode in per_thread.modes[-1:]]
        if self.strategy not in innermost:
            raise RuntimeError("colocate_vars_with must be called inside this strategy's scope()")
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                "colocate_vars_with needs a variable made in this strategy's scope, got "
                f"{colocate_with_variable!r:.60}"
            )
        with self.variables.colocated(colocate_with_variable):
            yield

    def update(
        self,
        variable: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(component, *args, **kwargs)` for every copy of `variable` on this rank.

        `fn` gets the copy's own component of each distributed value in `args` and `kwargs`.

        Context: cross-replica. Inside `run`, all replicas call it, and their arguments are put together first.
        Args:
            group: whether to return one value for all copies.
        Returns:
            the result for one copy, `Mirrored` of the results for several; with `group=False`, a tuple of the results.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> with strategy.scope():
            ...     v = ms.Variable(1.0)
            ...     _ = strategy.extended.update(v, lambda copy, x: copy.assign_add(x), args=(2.0,))
            >>> v.numpy()
            array(3., dtype=float32)
        """
        check_call("update", fn, args, kwargs)
        keywords = dict(kwargs or {})
        context = _context_of_replica()
        if context is not None:

            def merge(strategy: AnyStrategy, *merged: Any, **merged_keywords: Any) -> Any:
                return self.update(variable, fn, merged, merged_keywords, group)

            return context.merge_call(merge, tuple(args), keywords)
        require_cross_replica(self.strategy, "update")
        return self._on_each(self.variables.copies(variable), fn, tuple(args), keywords, group)

    def _on_each(
        self,
        components: Sequence[Any],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        group: bool,
    ) -> Any:
        results = []
        for i, component in enumerate(components):
            per_thread.updated_replica = i
            try:
                call_args, call_kwargs = select_replica(i, (args, kwargs))
                results.append(fn(component, *call_args, **call_kwargs))
            finally:
                per_thread.updated_replica = None
        if not group:
            return tuple(results)
        return results[0] if len(results) == 1 else Mirrored(results)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(*args, **kwargs)` once for each device in `colocate_with`. Context: cross-replica.

        Returns: the result for one device, `Mirrored` of the results for several; with `group=False`, a tuple of the
            results.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> devices = strategy.extended.non_slot_devices([])
            >>> with strategy.scope():
            ...     strategy.extended.update_non_slot(devices, lambda: "updated")
            'updated'
        """
        require_cross_replica(self.strategy, "update_non_slot")
        check_call("update_non_slot", fn, args, kwargs)
        devices = colocate_with if isinstance(colocate_with, (list, tuple)) else (colocate_with,)

        def without_device(device: Any, /, *own_args: Any, **own_kwargs: Any) -> Any:
            return fn(*own_args, **own_kwargs)

        return self._on_each(devices, without_device, tuple(args), dict(kwargs or {}), group)

    def non_slot_devices(self, variables: Sequence[Any]) -> Any:
        """Return the argument `colocate_with` for `update_non_slot`: devices, or one of `variables`.

        State that belongs to no single variable, such as an optimizer's counter of steps, has its place there.
        """
        return self.variables.non_slot_devices(variables)

    # Combining

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combine `value` over all replicas and put the result on `destinations`.

        Called by: every rank.   Context: cross-replica.
        Args:
            reduce_op: a `ReduceOp`, or its name in upper or lower case.
            value: a value with a component per replica. The mean of a mirrored value is the value itself.
            destinations: a device's name, or a distributed value or variable whose devices are meant.
            options: options of this collective.
        Returns:
            an array for one device, `Mirrored` for several.
        Raises:
            AssertionError: `destinations` is a list, or the sum of a mirrored value over several replicas is asked for.
            ValueError: nothing can be reduced to `destinations`.

        Example:
            >>> extended = ms.OneDeviceStrategy("cpu").extended
            >>> extended.check_destination("cpu:0")
            >>> extended.reduce_to("sum", np.ones(2), "cpu:0")
            array([1., 1.])
        """
        require_cross_replica(self.strategy, "reduce_to")
        with self.communicator.raising_together():
            if isinstance(destinations, (list, tuple)):
                raise AssertionError(
                    "destinations must be one distributed value or device, got a list: "
                    f"{destinations!r:.60}"
                )
            op = _parsed(reduce_op)
            self.check_destination(destinations)
        return self.cross_replica_ops.reduce_to(op, value, destinations, options)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce many (value, destinations) pairs in one collective. Called by: every rank.   Context: cross-replica.

        Returns: a result for each pair, in order, like `reduce_to`.

        Example:
            >>> extended = ms.OneDeviceStrategy("cpu").extended
            >>> extended.batch_reduce_to("mean", [(np.ones(2), "cpu:0"), (3.0, "cpu:0")])
            [array([1., 1.]), 3.0]
        """
        require_cross_replica(self.strategy, "batch_reduce_to")
        with self.communicator.raising_together():
            op = _parsed(reduce_op)
            check_pairs(value_destination_pairs)
            for _, destinations in value_destination_pairs:
                self.check_destination(destinations)
        pairs = list(value_destination_pairs)
        if self.variables.on_every_replica:
            # Put the result on every device, although one device was asked for.
            for i, (value, to) in enumerate(pairs):
                if isinstance(to, str) and isinstance(value, DistributedValues):
                    pairs[i] = (value, value)
        return self.cross_replica_ops.batch_reduce(op, pairs, options)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copy `tensor` to `destinations` on this rank; sends nothing to other ranks. Context: cross-replica.

        Returns: an array; a `Mirrored` of copies for several devices; a Python number as it is.
        Raises: AssertionError if `destinations` is None.

        Example:
            >>> ms.OneDeviceStrategy("cpu").extended.broadcast_to(np.arange(2), "cpu:0")
            array([0, 1])
        """
        require_cross_replica(self.strategy, "broadcast_to")
        if destinations is None:
            raise AssertionError("broadcast_to needs destinations: a device or a distributed value")
        if isinstance(tensor, (int, float)):
            return tensor
        return self.cross_replica_ops.broadcast(tensor, destinations)


def _context_of_replica() -> Any:
    """Return the context of the replica that this thread runs; None across replicas, and without a strategy."""
    return get_replica_context() if has_strategy() else None


def _parsed(reduce_op: Any) -> ReduceOp:
    if isinstance(reduce_op, VariableAggregation):
        raise AssertionError(f"reduce_op must be a ReduceOp, got {reduce_op}")
    return ReduceOp.parse(reduce_op)
