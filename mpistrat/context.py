"""The strategy and the replica in force on each thread.

Every thread has a stack of modes; the last mode is in force. A mode has a strategy and its replicas, and inside `run`
also a replica context. A mode without a replica context is cross-replica: inside `scope()`, and inside the function of
a `merge_call`. Inside `replica()` the mode has a replica context, but the program may also call everything of the
cross-replica context. If a thread's stack is empty, the thread is at top level: the default strategy is in force, in
its replica context.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

_NOTHING = contextlib.nullcontext()


class AnyStrategy(Protocol):
    """The part of a `Strategy` that lower-level modules use; they cannot import `Strategy`."""

    @property
    def extended(self) -> Any: ...

    @property
    def is_default(self) -> bool: ...

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def workers_combined(self) -> int: ...

    runs: int


class AnyReplicaContext(Protocol):
    """The part of a `ReplicaContext` that lower-level modules use; they cannot import it."""

    local_index: int
    replicas: Any

    @property
    def strategy(self) -> Any: ...

    def own_component(self, value: Any) -> Any: ...

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any: ...


class Mode(NamedTuple):
    """An entry of a thread's stack: the strategy in force, and the replica that the thread runs.

    Attributes:
        strategy: the strategy in force.
        replicas: its `Replicas` on this rank: the steps, the modules and the collectives of its replicas.
        replica_context: the running replica's context; None in the cross-replica context.
        in_block: whether `Strategy.replica()` has made the entry; False for an entry of `run` or `scope()`.
    """

    strategy: AnyStrategy
    replicas: Any
    replica_context: AnyReplicaContext | None
    in_block: bool = False

    @property
    def in_run(self) -> bool:
        """Whether `run` has made the entry, so that the thread may not call methods of the cross-replica context."""
        return self.replica_context is not None and not self.in_block


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.modes: list[Mode] = []
        # Index among the rank's replicas of the component that `extended.update` is updating now; None outside it.
        self.updated_replica: int | None = None
        self.set_scope: Any = None  # the scope that `experimental_set_strategy` has entered


per_thread = _PerThread()


class _BelowAll:
    """Makes and keeps the mode of a thread with an empty stack: the default strategy in its replica context.

    Attributes:
        make: makes the mode, when it is used first; the package's `__init__` sets this function.
        mode: the same mode for all threads.
    """

    make: Callable[[], Mode]

    @functools.cached_property
    def mode(self) -> Mode:
        return self.make()


below_all = _BelowAll()
# Names of the package that may ask for the strategy in force inside torch.compile, where no strategy can be made.
_ASKING = {
    "compute_average_loss",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "in_cross_replica_context",
    "scale_regularization_loss",
    "Variable",
}


def make_default_for(name: str) -> None:
    """Make the default strategy now, if the public function or class `name` may ask for it inside `torch.compile`.

    Called by: the package `mpistrat`, when a program first uses one of the package's names.
    """
    if name in _ASKING:
        below_all.mode  # noqa: B018 - a cached property keeps it


def current_mode() -> Mode:
    modes = per_thread.modes
    if modes:
        return modes[-1]
    return below_all.mode


def get_strategy() -> Any:
    """Return the strategy in force on this thread; the default strategy if the program has entered none."""
    return current_mode().strategy


def has_strategy() -> bool:
    """Return whether a strategy other than the default strategy is in force on this thread.

    Example:
        >>> with ms.OneDeviceStrategy("cpu").scope():
        ...     ms.has_strategy()
        True
        >>> ms.has_strategy()
        False
    """
    modes = per_thread.modes
    return len(modes) > 0 and not modes[-1].strategy.is_default


def get_replica_context() -> Any:
    """Return the context of the replica that this thread runs; None in the cross-replica context."""
    return current_mode().replica_context


def in_cross_replica_context() -> bool:
    """Return whether this thread is inside `scope()` or the function of a `merge_call`, and not inside `run`.

    False at top level, because the default strategy is in its replica context there.

    Example:
        >>> strategy = ms.OneDeviceStrategy("cpu")
        >>> with strategy.scope():
        ...     ms.in_cross_replica_context(), strategy.run(ms.in_cross_replica_context)
        (True, False)
    """
    return current_mode().replica_context is None


class entered:  # noqa: N801 - used like a function: `with entered(mode):`
    """A context manager that puts one mode onto this thread's stack, and removes it at the end; yields nothing.

    Args:
        strategy: the strategy in force inside.
        replicas: its `Replicas` on this rank.
        replica_context: the context of the replica that the thread runs inside; None for the cross-replica context.
        in_block: whether it is entered for `Strategy.replica()`.
    """

    __slots__ = ("mode",)

    def __init__(
        self,
        strategy: AnyStrategy,
        replicas: Any,
        replica_context: AnyReplicaContext | None,
        in_block: bool = False,
    ) -> None:
        self.mode = Mode(strategy, replicas, replica_context, in_block)

    def __enter__(self) -> None:
        per_thread.modes.append(self.mode)

    def __exit__(self, *exc: object) -> None:
        per_thread.modes.pop()


def in_replica_block(strategy: AnyStrategy) -> bool:
    """Return whether this thread is inside `strategy.replica()`, and not in a `run` or a scope within it."""
    modes = per_thread.modes
    return len(modes) > 0 and modes[-1].in_block and modes[-1].strategy is strategy


def at_top_level() -> bool:
    """Return whether this thread is inside no `run` and no scope, or directly inside `replica()`.

    Called by: `scope()`, which records modules at its outermost entry and exit only.
    """
    return not per_thread.modes or per_thread.modes[-1].in_block


def cross_replica(strategy: AnyStrategy, call: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager around the work of a public method, such as `Strategy.mirror`, for all replicas.

    Inside, a thread that is in `strategy.replica()` is in the cross-replica context. In a scope and at top level,
    nothing changes.
    Args: call: the name of the public call, for errors.
    Raises: RuntimeError inside `run`, or inside another strategy's scope, run or `replica()`.
    """
    require_cross_replica(strategy, call)
    return outside_replica_block(strategy)


def outside_replica_block(strategy: AnyStrategy) -> contextlib.AbstractContextManager[None]:
    """Return a context manager: inside, a thread that is in `strategy.replica()` is in the cross-replica context.

    Elsewhere it changes nothing. Called by: the methods of `Checkpoint`.
    """
    if in_replica_block(strategy):
        return entered(strategy, per_thread.modes[-1].replicas, None)
    return _NOTHING


@contextlib.contextmanager
def leaving_what_is_entered() -> Iterator[None]:
    """Return a context manager that restores this thread's stack of modes at its end, also after an error.

    So it leaves modes that the block has entered for ever, by `Strategy.enter_replica()`.
    Called by: `run_elastic`, around each attempt to train.
    """
    modes = per_thread.modes
    per_thread.modes = list(modes)
    try:
        yield
    finally:
        per_thread.modes = modes


def require_cross_replica(strategy: AnyStrategy, call: str) -> None:
    """Raise RuntimeError unless this thread is at top level, or in the scope or the `replica()` of `strategy`.

    Called by: the public methods that act on all replicas at once, such as `Strategy.reduce`.
    Args: call: the name of the public call, for the error.
    """
    if not per_thread.modes:
        return
    mode = per_thread.modes[-1]
    require_unmixed(strategy, call)
    if mode.in_run:
        raise RuntimeError(
            f"{call} was called inside run ({mode.replica_context}); it acts on all replicas at once. "
            "Call it outside run, or from run through get_replica_context().merge_call(fn)"
        )


def require_unmixed(strategy: AnyStrategy, call: str) -> None:
    """Raise RuntimeError if this thread is inside the scope, `run` or `replica()` of a strategy other than `strategy`.

    Args: call: the name of the public call, for the error.
    """
    other = per_thread.modes[-1].strategy if per_thread.modes else strategy
    if other is not strategy:
        another = "another " if repr(other) == repr(strategy) else ""
        raise RuntimeError(
            f"{call} was called on {strategy} while {another}{other} is in force; strategies must not "
            "be mixed: leave the other strategy's scope, run or replica() first"
        )


def require_iteration(strategy: AnyStrategy) -> bool:
    """Check that this thread may take the next step of a distributed dataset of `strategy`.

    Called by: the iterators of distributed datasets, before each step.
    Returns: whether this thread is inside `strategy.replica()`; the iterator then first ends the step before.
    Raises: ValueError inside the strategy's own `run`; RuntimeError inside another strategy's scope, `run` or
        `replica()`.
    """
    if not per_thread.modes:
        return False
    mode = per_thread.modes[-1]
    if mode.strategy is strategy and mode.in_run:
        raise ValueError(
            "a step of a distributed dataset has a part for each replica: call next() outside run, and give its "
            "result to run"
        )
    require_cross_replica(strategy, "next(iterator)")
    return mode.in_block


def require_replica(context: AnyReplicaContext, call: str) -> None:
    """Raise RuntimeError unless `context` is the context of the replica that this thread runs."""
    mode = per_thread.modes[-1] if per_thread.modes else below_all.mode
    if mode.replica_context is not context:
        where = mode.replica_context or "the cross-replica context"
        raise RuntimeError(
            f"{call} was called on the context of {context} of {context.strategy}, but this thread is in {where} of "
            f"{mode.strategy}; a replica context is valid only inside the run that made it: ask get_replica_context() "
            "again"
        )


def current_local_replica() -> int | None:
    """Return the index, from 0 among this rank's replicas, of the replica that this thread runs.

    Inside the function of `extended.update`, it is the index of the component that is updated.
    Returns: None in the cross-replica context and at top level. If one call of `run`'s function runs all of the rank's
        replicas (on the cores of a TPU), 0.
    """
    if per_thread.updated_replica is not None:
        return per_thread.updated_replica
    if not per_thread.modes:
        return None
    context = per_thread.modes[-1].replica_context
    if context is None:
        return None
    return context.local_index


def check_call(call: str, fn: Any, args: Any, kwargs: Any) -> None:
    """Check that `fn` can be called with the arguments that a program gave to a public method, such as `run`.

    Args: call: the name of the public method, for errors.
    Raises: TypeError if `fn` is not callable; ValueError if `args` is no list or tuple, or if `kwargs` is neither a
        mapping nor None.
    """
    if not callable(fn):
        raise TypeError(f"{call} takes a function, got {fn!r:.60}; pass its arguments as args=(…,)")
    if not isinstance(args, (list, tuple)):
        raise ValueError(
            f"{call} takes args as a list or a tuple, got {type(args).__name__}; for one argument write (x,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ValueError(
            f"{call} takes kwargs as a dictionary or None, got {type(kwargs).__name__}"
        )
