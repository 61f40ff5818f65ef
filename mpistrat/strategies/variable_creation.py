"""How a strategy makes variables, and how it changes them: a part of `StrategyExtended`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat import arrays
from mpistrat.communicators import Communicator
from mpistrat.context import (
    check_call,
    get_replica_context,
    has_strategy,
    in_cross_replica_context,
    per_thread,
    require_cross_replica,
)
from mpistrat.reduce_op import VariableAggregation, VariableSynchronization
from mpistrat.replicas.cross_replica_ops import CrossReplicaOps
from mpistrat.values import Mirrored, select_replica
from mpistrat.variables.arguments import VariableArguments, checked_arguments
from mpistrat.variables.variable import (
    DistributedVariable,
    MirroredVariable,
    PlainVariable,
    SyncOnReadVariable,
    Variable,
)

if TYPE_CHECKING:
    from mpistrat.strategy import Strategy


class StrategyVariables:
    """Variables of which each replica of each rank has a copy.

    A strategy that keeps them otherwise has its own `_new_variable`, and an `_update` that fits it.

    Attributes:
        strategy, communicator, worker_devices, num_local_replicas, cross_replica_ops: as of `StrategyExtended`.
        num_copies: of each variable on this rank.
        mirrored_variables: those that the program still has, by number in the order of their making.
    """

    def __init__(
        self,
        strategy: Strategy,
        communicator: Communicator,
        worker_devices: Sequence[str],
        cross_replica_ops: CrossReplicaOps,
    ) -> None:
        self.strategy = strategy
        self.communicator = communicator
        self.worker_devices = tuple(worker_devices)
        self.num_local_replicas = len(worker_devices)
        self.num_copies = self.num_local_replicas
        self.cross_replica_ops = cross_replica_ops
        self.mirrored_variables: weakref.WeakValueDictionary[int, MirroredVariable] = (
            weakref.WeakValueDictionary()
        )
        self._variables_made = 0

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
        """The work of `mpistrat.Variable(...)`, in the scope or inside run. Called by every rank."""
        with self.communicator.raising_together():
            asked = checked_arguments(
                initial_value, trainable, name, dtype, synchronization, aggregation, shape
            )

        def create(strategy: Strategy, initial: Any) -> Variable:
            return self._new_variable(asked._replace(initial_value=select_replica(0, initial)))

        context = get_replica_context() if has_strategy() else None
        if context is None:
            return create(self.strategy, initial_value)
        return context.merge_call(create, (initial_value,))

    def _new_variable(self, asked: VariableArguments) -> Variable:
        with self.communicator.raising_together():
            value = asked.initial_array()
            if asked.aggregation is VariableAggregation.MEAN and not arrays.is_floating(value):
                raise ValueError(
                    f"variable {asked.name!r}: aggregation MEAN needs a floating dtype, got "
                    f"{arrays.dtype_name(value)}"
                )
        name, synchronization, aggregation = asked.name, asked.synchronization, asked.aggregation
        made = f"initial value of {name!r} ({synchronization.name}, {aggregation.name})"
        value = self.cross_replica_ops.from_first_replica(value, made)
        components = [
            PlainVariable(
                value,
                asked.trainable,
                f"{name}/replica_{i}" if i else name,
                synchronization,
                aggregation,
            )
            for i in range(self.num_copies)
        ]
        if synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable(self.strategy, components, synchronization, aggregation)
        variable = MirroredVariable(self.strategy, components, synchronization, aggregation)
        self.mirrored_variables[self._variables_made] = variable
        self._variables_made += 1
        return variable

    def variable_created_in_scope(self, variable: Any) -> bool:
        """Whether `variable` was made in this strategy's scope."""
        return getattr(self.value_container(variable), "strategy", None) is self.strategy

    def value_container(self, value: Any) -> Any:
        """The distributed variable that the component `value` belongs to; else `value` itself."""
        return getattr(value, "_container", None) or value

    def read_var(self, variable: Any) -> Any:
        """`variable`'s value; for an ON_READ variable its copies combined."""
        if not hasattr(variable, "read_value"):
            raise TypeError(f"read_var takes a variable, got {variable!r:.60}")
        return variable.read_value()

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Inside, variables are placed with another of this strategy: they always are, so it only checks."""
        mode = per_thread.modes[-1] if per_thread.modes else None
        if mode is None or mode.strategy is not self.strategy:
            raise RuntimeError("colocate_vars_with must be called inside this strategy's scope()")
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                "colocate_vars_with needs a variable made in this strategy's scope, got "
                f"{colocate_with_variable!r:.60}"
            )
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

        Context: cross-replica; inside run, all replicas call it and their arguments are regrouped.
        Returns:
            `Mirrored` of the results, or their tuple with `group=False`.
        """
        check_call("update", fn, args, kwargs)
        keywords = dict(kwargs or {})
        if has_strategy() and not in_cross_replica_context():
            context = get_replica_context()
            assert context is not None

            def merge(strategy: Strategy, *merged: Any, **others: Any) -> Any:
                return self.update(variable, fn, merged, others, group)

            return context.merge_call(merge, tuple(args), keywords)
        require_cross_replica(self.strategy, "update")
        return self._group(self._update(variable, fn, tuple(args), keywords), group)

    def _update(
        self, variable: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        if not isinstance(variable, DistributedVariable):
            raise AssertionError(
                f"update needs a variable made in the scope of {self.strategy}, got {variable!r:.60}"
            )
        return self._on_each_component(variable.values, fn, args, kwargs)

    def _on_each_component(
        self,
        components: Sequence[Any],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        results = []
        for i, component in enumerate(components):
            per_thread.updated_replica = i
            try:
                own = (component, *select_replica(i, args))
                results.append(fn(*own, **select_replica(i, kwargs)))
            finally:
                per_thread.updated_replica = None
        return results

    def _group(self, results: list[Any], group: bool) -> Any:
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
        """Call `fn(*args, **kwargs)` once for each device in `colocate_with`. Context: cross-replica."""
        require_cross_replica(self.strategy, "update_non_slot")
        check_call("update_non_slot", fn, args, kwargs)
        devices = colocate_with if isinstance(colocate_with, (list, tuple)) else (colocate_with,)
        results = self._on_each_component(
            devices, lambda _, *a, **k: fn(*a, **k), tuple(args), dict(kwargs or {})
        )
        return self._group(results, group)

    def non_slot_devices(self, variables: Sequence[Any]) -> Any:
        """Where state that belongs to no single one of `variables` is kept."""
        return self.worker_devices
