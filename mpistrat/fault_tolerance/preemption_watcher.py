"""A name of tf.distribute's that programs may use; nothing is watched."""

from __future__ import annotations

from mpistrat.liveness.ending.rank_end import rank_end
from mpistrat.machine.notices import warn_on_first_rank


class PreemptionWatcher:
    """Watches nothing, on any platform, and says so: what TensorFlow's own tells comes from its runtime.

    Use PreemptionCheckpointHandler, which learns of the end, and saves.

    Attributes:
        preemption_message: None.
    """

    def __init__(self) -> None:
        self.preemption_message: str | None = None
        warn_on_first_rank(
            rank_end().rank,
            "PreemptionWatcher watches nothing; use PreemptionCheckpointHandler, which learns of "
            "signals and of the time limit",
        )

    def block_until_worker_exit(self) -> None:
        """Returns at once."""
