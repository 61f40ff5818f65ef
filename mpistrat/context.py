"""Who is in force on this thread: which strategy, and inside which replica.

Every thread has a stack of modes. A mode is a strategy with a replica context (inside `run`) or
without one (cross-replica: inside `scope()`, and inside the function of a `merge_call`). Inside
`replica()` it is a replica's, which may call what belongs to the cross-replica context, too. Below the
stack lies the default strategy in its replica context.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

_NOTHING = contextlib.nullcontext()


class AnyStrategy(Protocol):
    """What this module and those below `Strategy` need of one."""

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
    """What this module needs of a `ReplicaContext`."""

    local_index: int

    @property
    def strategy(self) -> Any: ...

    def own_component(self, value: Any) -> Any: ...

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any: ...


class Mode(NamedTuple):
    strategy: AnyStrategy
    replica_context: AnyReplicaContext | None  # None: cross-replica context
    in_block: bool = False  # inside `Strategy.replica()`, and not inside `run`

    @property
    def in_run(self) -> bool:
        """Whether a replica may not do here what all replicas do together."""
        return self.replica_context is not None and not self.in_block


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.modes: list[Mode] = []
        # Local replica whose component `extended.update` is updating right now.
        self.updated_replica: int | None = None


per_thread = _PerThread()


class _BelowAll:
    """What is in force below every thread's stack: the default strategy, from its first use on.

    Attributes:
        make: makes that strategy; the package has put it here.
    """

    make: Callable[[], Mode]

    @functools.cached_property
    def mode(self) -> Mode:
        return self.make()


below_all = _BelowAll()
# Names of the package that ask for the strategy in force, also inside torch.compile, which cannot make one.
_ASKING = {
    *("compute_average_loss", "get_loss_reduction", "get_replica_context", "get_strategy"),
    *("in_cross_replica_context", "scale_regularization_loss", "Variable"),
}


def make_default_for(name: str) -> None:
    """Make the default strategy, if what a program gets by `name` may ask for it."""
    if name in _ASKING:
        below_all.mode  # noqa: B018 - it is kept


def current_mode() -> Mode:
    modes = per_thread.modes
    return modes[-1] if modes else below_all.mode


def get_strategy() -> Any:
    """The strategy in force on this thread; the default strategy if there is none."""
    return current_mode().strategy


def has_strategy() -> bool:
    """Whether a strategy other than the default one is in force on this thread."""
    modes = per_thread.modes
    return len(modes) > 0 and not modes[-1].strategy.is_default


def get_replica_context() -> Any:
    """The context of the replica this thread runs; None in a cross-replica context."""
    return current_mode().replica_context


def in_cross_replica_context() -> bool:
    """Whether this thread is inside `scope()` or a merge function, and not inside `run`."""
    return current_mode().replica_context is None


class entered:  # noqa: N801 - used like a function: `with entered(mode):`
    """Puts one mode onto this thread's stack for the time of a `with` block."""

    __slots__ = ("mode",)

    def __init__(
        self,
        strategy: AnyStrategy,
        replica_context: AnyReplicaContext | None,
        in_block: bool = False,
    ) -> None:
        self.mode = Mode(strategy, replica_context, in_block)

    def __enter__(self) -> None:
        per_thread.modes.append(self.mode)

    def __exit__(self, *exc: object) -> None:
        per_thread.modes.pop()


def in_replica_block(strategy: AnyStrategy) -> bool:
    """Whether this thread is inside `strategy.replica()`, and not inside `run` or a scope within it."""
    modes = per_thread.modes
    return len(modes) > 0 and modes[-1].in_block and modes[-1].strategy is strategy


def at_top_level() -> bool:
    """Whether this thread is inside no `run` and no scope, but for what is around a `replica()` that it is in."""
    return not per_thread.modes or per_thread.modes[-1].in_block


def cross_replica(strategy: AnyStrategy, call: str) -> contextlib.AbstractContextManager[None]:
    """Inside, `strategy` acts as a whole. Raises: as `require_cross_replica`."""
    require_cross_replica(strategy, call)
    return outside_replica_block(strategy)


def outside_replica_block(strategy: AnyStrategy) -> contextlib.AbstractContextManager[None]:
    """Inside, this thread has left `strategy.replica()`, if it is in it: it is in the cross-replica context."""
    return entered(strategy, None) if in_replica_block(strategy) else _NOTHING


@contextlib.contextmanager
def leaving_what_is_entered() -> Iterator[None]:
    """What is entered inside, and not left, such as `Strategy.enter_replica()`, is left at the end."""
    modes = per_thread.modes
    per_thread.modes = list(modes)
    try:
        yield
    finally:
        per_thread.modes = modes


def require_cross_replica(strategy: AnyStrategy, call: str) -> None:
    """Raise RuntimeError unless `strategy` may act as a whole here, at top level, in its scope or its `replica()`."""
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
    """Raise RuntimeError inside another strategy's scope, run or `replica()`."""
    other = per_thread.modes[-1].strategy if per_thread.modes else strategy
    if other is not strategy:
        another = "another " if repr(other) == repr(strategy) else ""
        raise RuntimeError(
            f"{call} was called on {strategy} while {another}{other} is in force; strategies must not "
            "be mixed: leave the other strategy's scope, run or replica() first"
        )


def require_iteration(strategy: AnyStrategy) -> bool:
    """Raise unless a distributed dataset of `strategy` may be iterated here: ValueError inside its own run,
    RuntimeError inside another strategy's scope or run. Returns: as `in_replica_block`."""
    if not per_thread.modes:
        return False
    mode = per_thread.modes[-1]
    if mode.strategy is strategy and mode.in_run:
        raise ValueError(
            "a step of a distributed dataset has a part for each replica: call next() outside run, and give run "
            "what it returns"
        )
    require_cross_replica(strategy, "next(iterator)")
    return mode.in_block


def require_replica(context: AnyReplicaContext, call: str) -> None:
    """Raise RuntimeError unless this thread runs the replica that `context` belongs to."""
    mode = per_thread.modes[-1] if per_thread.modes else below_all.mode
    if mode.replica_context is not context:
        where = mode.replica_context or "the cross-replica context"
        raise RuntimeError(
            f"{call} was called on the context of {context} of {context.strategy}, but this thread is in {where} of "
            f"{mode.strategy}; a replica context is valid only inside the run that made it: ask get_replica_context() "
            "again"
        )


def current_local_replica() -> int | None:
    """Index among this rank's replicas of the one that runs, or is updated, here; None if none."""
    if per_thread.updated_replica is not None:
        return per_thread.updated_replica
    context = per_thread.modes[-1].replica_context if per_thread.modes else None
    return None if context is None else context.local_index


def check_call(call: str, fn: Any, args: Any, kwargs: Any) -> None:
    """Errors for what cannot be called: a function, a list or tuple, and a mapping or None are wanted."""
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
