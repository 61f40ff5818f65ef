"""The default strategy: it is in force where the program has entered no strategy."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, NoReturn

from mpistrat.context import Mode, below_all, has_strategy
from mpistrat.input import InputContext
from mpistrat.replicas.replica_context import ReplicaContext
from mpistrat.strategies.replicated import ReplicatedExtended
from mpistrat.strategies.strategy_parts import one_replica
from mpistrat.strategy import Strategy


class DefaultReplicaContext(ReplicaContext):
    """The replica context outside every strategy: one replica, number 0."""


def _undefined(name: str, error: type[Exception], advice: str = "") -> Any:
    """Return a property `name` that raises `error` when it is read. The error's text ends with `advice`."""

    def refuse(extended: ReplicatedExtended) -> NoReturn:
        raise error(f"{name}: no strategy is in force{advice}")

    return property(refuse)


_ENTER = "; enter a strategy's scope() first"


class _DefaultExtended(ReplicatedExtended):
    """The default strategy's `extended`. Properties that depend on a chosen strategy raise errors."""

    worker_devices = _undefined("worker_devices", RuntimeError, _ENTER)
    parameter_devices = _undefined("parameter_devices", RuntimeError, _ENTER)
    experimental_between_graph = _undefined("experimental_between_graph", NotImplementedError)
    experimental_should_init = _undefined("experimental_should_init", NotImplementedError)


class _DefaultStrategy(Strategy):
    """The strategy of a program that has entered none: one replica, so that every collective returns its operand."""

    is_default = True

    def __init__(self) -> None:
        if "mode" in vars(below_all):
            raise RuntimeError("there is one default strategy; get it with get_strategy()")
        extended = _DefaultExtended(self, one_replica(self, "cpu:0"))
        context = DefaultReplicaContext(self, 0)
        extended.replicas.set_contexts([context])
        super().__init__(extended)
        below_all.mode = Mode(self, extended.replicas, context)

    def scope(self) -> Any:
        """Return a context that changes nothing. Raises: RuntimeError inside another strategy's scope."""
        if has_strategy():
            raise RuntimeError("the default strategy's scope must not be entered inside another's")
        return contextlib.nullcontext(self)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Return `dataset` itself."""
        return dataset

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """Return the result of `dataset_fn(InputContext())`."""
        return dataset_fn(InputContext())


_being_made = threading.RLock()


def default_mode() -> Mode:
    """Return the mode of a program outside every strategy: the default strategy and its only replica's context.

    The first call makes the default strategy. Called by: `context`, when the mode is first needed, on any thread.
    """
    with _being_made:
        if "mode" not in vars(below_all):
            _DefaultStrategy()
        return below_all.mode
