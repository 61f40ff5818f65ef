"""The comparison at a save: all bits of the arrays that should be equal on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from mpistrat import settings
from mpistrat.context import AnyStrategy
from mpistrat.errors import DivergenceError
from mpistrat.machine.notices import tell
from mpistrat.pytorch.watch.divergence_report import StateComparison
from mpistrat.pytorch.watch.mirrored_state import state_at_save

_ROUNDINGS = 64  # of an array in a step, as `Difference.roundings` has them
_with_rounding: weakref.WeakSet[AnyStrategy] = weakref.WeakSet()  # rank 0 has told of them


def divergence_at_save(strategy: AnyStrategy, saved: Mapping[str, Any]) -> DivergenceError | None:
    """Compare all bits of arrays. `Checkpoint.check_alike` compares numbers. Collective.

    Rank 0's setting MPISTRAT_ON_DRIFT decides whether the ranks compare. If there is an error, the watch looks for its
    cause. A program without torch has variables alone. Rank 0 tells once of differences that are no larger than
    rounding, as between two kinds of processors.
    Called by: `CheckpointManager.save`, on every rank.
    Returns: the error for larger differences, equal on all ranks; None if there are none, or nothing is compared.
    """
    extended = strategy.extended
    watch = extended.modules.parts.watch
    # Other ranks must decide alike, though a rank alone may have imported torch.
    if not extended.checkpoints.all_take_part or extended.modules.parts.replicas.records_steps:
        return None
    communicator = extended.communicator
    action = communicator.broadcast_object(settings.on_drift(), label="the setting for drift")
    if action == "off":
        return None
    with communicator.raising_together():
        comparison = StateComparison(communicator, state_at_save(strategy, saved))
    greatest = comparison.exchange()
    steps = strategy.runs
    if watch is not None:
        steps = extended.modules.made.reducer.steps
    when = f"at a save after {steps} steps"
    error = comparison.divergence(greatest, when, _ROUNDINGS * max(1, steps) ** 0.5)
    if error is not None and watch is not None:
        watch.find_cause()
    is_told = strategy in _with_rounding or communicator.rank > 0
    if error is None and comparison.names and not is_told:
        _with_rounding.add(strategy)
        tell(
            f"{comparison.names[0]} differs in the last bits between ranks, {when}, as between two kinds of "
            "processors. The checkpoint has rank 0's values. Do nothing, or take nodes of one kind"
        )
    return error
