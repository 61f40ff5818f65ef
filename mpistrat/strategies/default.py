"""The strategy that is in force where there is none."""

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
    """The property `name`, which no strategy has defined."""

    def refuse(extended: ReplicatedExtended) -> NoReturn:
        raise error(f"{name}: no strategy is in force{advice}")

    return property(refuse)


_ENTER = "; enter a strategy's scope() first"


class _DefaultExtended(ReplicatedExtended):
    """Says nothing of devices and programs: no strategy has chosen them."""

    worker_devices = _undefined("worker_devices", RuntimeError, _ENTER)
    parameter_devices = _undefined("parameter_devices", RuntimeError, _ENTER)
    experimental_between_graph = _undefined("experimental_between_graph", NotImplementedError)
    experimental_should_init = _undefined("experimental_should_init", NotImplementedError)


class _DefaultStrategy(Strategy):
    """One replica on the CPU; everything is the identity."""

    is_default = True

    def __init__(self) -> None:
        if "mode" in vars(below_all):
            raise RuntimeError("there is one default strategy; get it with get_strategy()")
        extended = _DefaultExtended(self, one_replica(self, "cpu:0"))
        context = DefaultReplicaContext(self, 0)
        extended.replicas.contexts = [context]
        super().__init__(extended)
        below_all.mode = Mode(self, context)

    def scope(self) -> Any:
        """Changes nothing; RuntimeError inside another strategy's scope."""
        if has_strategy():
            raise RuntimeError("the default strategy's scope must not be entered inside another's")
        return contextlib.nullcontext(self)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """`dataset` itself."""
        return dataset

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """What `dataset_fn(InputContext())` makes."""
        return dataset_fn(InputContext())


_being_made = threading.RLock()


def default_mode() -> Mode:
    """What is in force where a program enters no strategy. Called by: `context`, when it is first asked for it."""
    with _being_made:
        if "mode" not in vars(below_all):
            _DefaultStrategy()
        return below_all.mode
