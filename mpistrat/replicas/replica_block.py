"""`with strategy.replica():` makes a program's own loop the work of one replica."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from mpistrat.context import entered, per_thread, require_unmixed
from mpistrat.trace import spans

if TYPE_CHECKING:
    from mpistrat.replicas.replica_context import ReplicaContext
    from mpistrat.replicas.strategy_extended import StrategyExtended


class ReplicaBlock(contextlib.AbstractContextManager["ReplicaContext"]):
    """A context in which this thread is the one replica of its rank.

    `Strategy.replica` returns it, and `with` yields the replica's context. A step ends at each `optimizer.step()`.
    Ranks wait for each other in `backward()`, and at `next` of a distributed dataset. Modules that are new when the
    block begins, or at `next`, are mirrored.

    Called by: every rank.
    Args: refusal: the reason why this strategy has no such block; "" if it has one.
    Raises:
        RuntimeError: in another strategy's scope, or inside `run`.
        RuntimeError: on all ranks, if the strategy refuses, or a rank has several replicas.
    """

    def __init__(self, extended: StrategyExtended, refusal: str) -> None:
        self._extended = extended
        strategy = extended.strategy
        most = max(extended.replicas_of_ranks)
        if not refusal and most > 1:
            rank = extended.replicas_of_ranks.index(most)
            refusal = (
                f"rank {rank} has {most} replicas, which take turns in run: start one rank per replica, or call "
                "strategy.run(step)"
            )
        if refusal:
            raise RuntimeError(
                f"{strategy}.replica() makes a program the work of one replica, and {refusal}"
            )
        require_unmixed(strategy, "replica()")
        if any(mode.in_run for mode in per_thread.modes):
            raise RuntimeError(
                "replica() was called inside run, which is a replica's work already: call it outside"
            )
        replicas = extended.replicas
        context = replicas.contexts[0]
        self._context = context
        self._entered = entered(strategy, replicas, context, in_block=True)

    def __enter__(self) -> ReplicaContext:
        self._is_outermost = not any(mode.in_block for mode in per_thread.modes)
        self._extended.modules.before_run()
        if self._is_outermost:
            self._extended.given_steps.blocks += 1
            spans.current.begin_steps()
        self._entered.__enter__()
        return self._context

    def __exit__(self, *exc: object) -> None:
        self._entered.__exit__(*exc)
        if self._is_outermost:
            spans.current.end_steps()
            self._extended.given_steps.blocks -= 1
            if exc[0] is None:  # a backward would have cleared the cuts
                self._extended.replicas.sharded.tell_of_uneven()
