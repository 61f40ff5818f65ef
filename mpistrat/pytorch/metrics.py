"""A warning, once per process, for metrics of torchmetrics that see only one rank's examples.

torchmetrics adds up over the ranks of torch's default process group. Without such a group, each rank computes its own
value without a warning. This file does not import torchmetrics.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from typing import Any

from mpistrat.context import AnyStrategy, get_strategy
from mpistrat.liveness.call_site import outside
from mpistrat.machine.imports import when_loaded

_METRIC = "torchmetrics.metric"  # the module of torchmetrics that defines Metric
# By id, in the order of their creation.
_strategies: weakref.WeakValueDictionary[int, AnyStrategy] = weakref.WeakValueDictionary()
_has_warned = False


def warn_of_metrics_of(strategy: AnyStrategy) -> None:
    """Have metrics of torchmetrics warn while `strategy` is alive and torch has no default process group.

    Works also if the program imports torchmetrics later. Called by: each new strategy of several ranks.
    """
    _strategies[id(strategy)] = strategy
    _see_metrics()


@functools.cache
def _see_metrics() -> None:
    when_loaded(_METRIC, _replace_sync)


def _replace_sync() -> None:
    """Have torchmetrics' `Metric.sync` warn first if it will combine nothing. Each `Metric.compute` calls `sync`."""
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
    """Warn once, on rank 0, that a metric combines nothing. Does nothing if no strategy is alive.

    The ranks are the ranks of the strategy in force, or, without one, of the latest strategy.
    Args: metric: the class name of the metric.
    """
    global _has_warned
    alive = list(_strategies.values())
    if not alive:
        return
    _has_warned = True
    current: Any = get_strategy()
    strategy: Any = current if current in alive else alive[-1]
    communicator = strategy.extended.communicator
    if communicator.rank == 0:
        frame = outside(sys._getframe())
        warnings.warn_explicit(
            f"{metric}.compute() of torchmetrics combines nothing over the {communicator.size} ranks: torch has no "
            "default group, so each rank gets the value of its own examples. Make the strategy with "
            "torch_distributed=True, or combine the metric's states: sums by strategy.reduce('SUM', "
            "metric.metric_state, axis=None), and lists by strategy.gather(…, axis=0)",
            UserWarning,
            frame.f_code.co_filename,
            frame.f_lineno,
        )
