"""Saves each rank's residuals: the values that a wire format leaves out of a message and adds to the next one.

A restart without them would lose these parts of the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpistrat.checkpoint.object_states import check_array
from mpistrat.checkpoint.replica_states import state_of_some_rank
from mpistrat.checkpoint.schema import COUNT, Schema

if TYPE_CHECKING:
    from mpistrat.strategy import Strategy


class Residuals:
    """The state of a strategy's wire format in a checkpoint: residuals, and the buckets in which gradients are sent.

    On the same number of ranks, each rank goes on with its own residuals. On another number, rank 0 also adds the
    residuals of ranks that are gone, if residuals are of whole buffers. If a rank had residuals of a slice, or if other
    parameters are mirrored, all residuals begin at zero, and a warning says so.
    """

    may_be_absent = True  # jobs without a wire format save none
    # They are as large as the gradients: too large to be sent to other ranks after each step.
    stays_with_rank = True

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def rank_state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals; an empty dict if the strategy has mirrored no module."""
        mirroring = self._strategy.extended.modules.made
        return {} if mirroring is None else mirroring.reducer.held_back()

    def rank_state_schema(self, state: Mapping[str, Any]) -> Schema:
        """Return the schema of a rank's state."""
        if not state:
            return {}
        parameters = state.get("parameters")
        slot = range(len(parameters) if isinstance(parameters, list) else 0)
        return {
            "ranks": COUNT,
            "parameters": [str],
            "held_back": [{"slots": [slot], "residual": check_array}],
            "most": COUNT,
            "overlap": {"last": tuple, "expected": (tuple, None)},
        }

    def load_rank_state_dicts(self, states: Mapping[int, Any]) -> None:
        """Go on with this rank's saved residuals; rank 0 also adds the residuals of ranks that are gone.

        This does nothing if the strategy has mirrored no module, or had mirrored none when the checkpoint was saved.

        Called by: every rank.
        """
        extended = self._strategy.extended
        mirroring = extended.modules.made
        communicator = extended.communicator
        rank = communicator.rank
        size = communicator.size
        some = state_of_some_rank(states, rank)
        if mirroring is None or not some:
            return
        savers = [saver for saver in states if saver == rank or (rank == 0 and saver >= size)]
        mirroring.reducer.hold_back(some, [states[saver] for saver in savers])
