"""The v1 face: a mixin over the strategies, and the strategies with it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpistrat import context, strategies
from mpistrat.options import RunOptions
from mpistrat.reduce_op import ReduceOp
from mpistrat.strategy import Strategy


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
        """`run(fn)` on one step of `input_iterator`, or without arguments if there is none."""
        with self.scope():
            return self.run(fn, () if input_iterator is None else (next(input_iterator),))

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """The old name of `experimental_local_results`."""
        return self.experimental_local_results(value)

    def group(self, value: Any, name: str | None = None) -> None:
        """Returns when all components of `value` are computed: here they always are."""

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
        """Accepted for compatibility: who takes part is decided by MPI when the strategy is made."""

    def update_config_proto(self, config_proto: Any) -> Any:
        """A copy of `config_proto`, any object; sessions of their own keep replicas apart in TensorFlow."""
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


class _DefaultV1(StrategyV1):
    """The default strategy with the v1 methods; it shares everything with the one it stands for."""

    def __init__(self, default: Strategy) -> None:
        self._extended = default.extended


def get_strategy() -> Strategy:
    """The strategy in force; where there is none, the default one with the v1 methods."""
    current = context.get_strategy()
    return current if context.has_strategy() else _DefaultV1(current)


def get_loss_reduction() -> ReduceOp:
    """How losses of replicas are combined: they are summed."""
    return ReduceOp.SUM
