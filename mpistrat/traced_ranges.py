"""What is on the timeline besides collectives, and in torch's profiler.

Methods are wrapped once, when the first strategy is built under MPISTRAT_TRACE: without it a program runs them as they
stand, and never looks whether it is traced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from mpistrat.cluster_resolver.mpi import start_mpi
from mpistrat.errors import TopologyError
from mpistrat.trace import of_process, profiler
from mpistrat.trace.timeline import Timeline

# Module, class, method, and the name of its range
_METHODS = (
    ("mpistrat.strategy", "Strategy", "reduce", "strategy.reduce"),
    ("mpistrat.strategy", "Strategy", "gather", "strategy.gather"),
    ("mpistrat.input.distributed_iterator", "DistributedIterator", "__next__", "next(iterator)"),
    (
        "mpistrat.input.distributed_dataset",
        "DistributedDataset",
        "state_dict",
        "dataset.state_dict",
    ),
)
_METHODS_WITH_TORCH = (
    ("mpistrat.pytorch.mirroring", "Mirroring", "_mirror_tensors", "mirror"),
    ("mpistrat.pytorch.gradients", "GradientReducer", "_reduce", "reduce gradients"),
)
_MOST_FUNCTIONS = 1024  # whose names are told once; what is forgotten is told again


def trace_ranges(timeline: Timeline | None, folder: str | None) -> None:
    """Put the methods above on `timeline`, or else on one in `folder`, from now on; once per process.

    Raises: TopologyError when `folder` cannot be written to.
    """
    if timeline is None:
        assert folder is not None
        timeline = _timeline_in(folder)
    _wrap_methods(timeline)


def _timeline_in(folder: str) -> Timeline:
    mpi = start_mpi()
    rank, size = (0, 1) if mpi is None else (mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size)
    try:
        return of_process.begin(folder, rank, size)
    except OSError as error:
        raise TopologyError(
            f"MPISTRAT_TRACE={folder!r}: rank {rank} cannot write its part of the trace there ({error}); name a folder "
            "that it can make and write to, or unset it"
        ) from None


@functools.cache
def _wrap_methods(timeline: Timeline) -> None:
    _wrap(timeline, _METHODS)
    from mpistrat.strategy import Strategy

    run, torch = Strategy.run, Strategy._torch

    @functools.lru_cache(_MOST_FUNCTIONS)
    def kind_of(name: str) -> int:
        return timeline.kind("strategy.run", "range", function=name)

    @functools.wraps(run)
    def traced_run(self: Strategy, fn: Any, *args: Any, **kwargs: Any) -> Any:
        kind = kind_of(getattr(fn, "__qualname__", type(fn).__name__))
        with _Range(timeline, kind, "strategy.run"):
            return run(self, fn, *args, **kwargs)

    @functools.wraps(torch)
    def traced_torch(self: Strategy) -> Any:
        _wrap_torch(timeline)
        return torch(self)

    Strategy.run = traced_run  # type: ignore[method-assign]
    Strategy._torch = traced_torch  # type: ignore[method-assign]
    if "torch" in sys.modules:
        _wrap_torch(timeline)


@functools.cache
def _wrap_torch(timeline: Timeline) -> None:
    """What can be wrapped once a program has loaded torch."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    from mpistrat.pytorch.gradients import GradientReducer

    _wrap(timeline, _METHODS_WITH_TORCH)
    contribution, backward = GradientReducer.contribution, timeline.kind("backward", "range")

    @contextlib.contextmanager
    def traced_contribution(self: GradientReducer) -> Iterator[None]:
        with _Range(timeline, backward, "backward"), contribution(self):
            yield

    GradientReducer.contribution = traced_contribution  # type: ignore[method-assign]
    steps = _OptimizerSteps(timeline)
    register_optimizer_step_pre_hook(steps.begin)
    register_optimizer_step_post_hook(steps.end)


def _wrap(timeline: Timeline, methods: Sequence[tuple[str, str, str, str]]) -> None:
    for module, class_name, method, name in methods:
        owner = getattr(importlib.import_module(module), class_name)
        setattr(owner, method, _ranged(timeline, getattr(owner, method), name))


def _ranged(timeline: Timeline, original: Any, name: str) -> Any:
    kind = timeline.kind(name, "range")

    @functools.wraps(original)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with _Range(timeline, kind, name):
            return original(*args, **kwargs)

    return ranged


class _Range:
    __slots__ = ("_kind", "_name", "_shown", "_started", "_timeline")

    def __init__(self, timeline: Timeline, kind: int, name: str) -> None:
        self._timeline, self._kind, self._name = timeline, kind, name

    def __enter__(self) -> None:
        self._shown = profiler.begin(self._name)
        self._started = self._timeline.now()

    def __exit__(self, *_: object) -> None:
        timeline = self._timeline
        timeline.add(self._kind, self._started, timeline.now())
        profiler.end(self._shown)


class _OptimizerSteps:
    """Torch's profiler shows them by itself."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._thread = threading.local()
        self._kind = functools.cache(lambda name: timeline.kind(f"{name}.step", "range"))

    def begin(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._thread.begun = self._timeline.now()

    def end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        kind = self._kind(type(optimizer).__name__)
        self._timeline.add(kind, self._thread.begun, self._timeline.now())
