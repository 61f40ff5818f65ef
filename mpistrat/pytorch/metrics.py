"""The one warning of a metric of torchmetrics that is computed of one rank's examples alone.

torchmetrics adds up over the ranks of torch's default group; without one, each rank computes a value of its own, and
says nothing. It is not loaded here.
"""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
import weakref
from typing import Any

from mpistrat.context import AnyStrategy, get_strategy
from mpistrat.liveness.call_site import outside
from mpistrat.machine.imports import when_loaded

_METRIC = "torchmetrics.metric"  # the module that defines Metric
_strategies: weakref.WeakValueDictionary[int, AnyStrategy] = weakref.WeakValueDictionary()
_numbers = itertools.count()  # of strategies, in the order in which they were made
_has_warned = False


def warn_of_metrics_of(strategy: AnyStrategy) -> None:
    """Have metrics warn while `strategy`, of several ranks, is alive and there is no default group."""
    _strategies[next(_numbers)] = strategy
    _see_metrics()


@functools.cache
def _see_metrics() -> None:
    when_loaded(_METRIC, _replace_sync)


def _replace_sync() -> None:
    """Have `Metric.sync`, which each `compute` calls, look first."""
    metric: Any = sys.modules[_METRIC].Metric
    original = metric.sync

    @functools.wraps(original)
    def sync(
        self: Any,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        if not _has_warned and should_sync:
            available = distributed_available or self.distributed_available_fn
            if not (callable(available) and available()):
                _warn(type(self).__name__)
        original(self, dist_sync_fn, process_group, should_sync, distributed_available)

    metric.sync = sync


def _warn(metric: str) -> None:
    """Once, on rank 0 of the strategy that is in force, else of the one that was made last."""
    global _has_warned
    alive = sorted(_strategies.items())
    if not alive:
        return
    _has_warned = True
    current: Any = get_strategy()
    strategy: Any = current if current in _strategies.values() else alive[-1][1]
    communicator = strategy.extended.communicator
    if communicator.rank == 0:
        frame = outside(sys._getframe())
        warnings.warn_explicit(
            f"{metric}.compute() of torchmetrics combines nothing over the {communicator.size} ranks, for torch has no "
            "default group: each rank gets the value of the examples that it has seen. Make the strategy with "
            "torch_distributed=True, or combine the metric's states yourself, as strategy.reduce('SUM', "
            "metric.metric_state, axis=None) does those that are sums, and strategy.gather(…, axis=0) lists",
            UserWarning,
            frame.f_code.co_filename,
            frame.f_lineno,
        )
