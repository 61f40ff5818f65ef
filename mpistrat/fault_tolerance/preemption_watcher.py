"""A name of tf.distribute's that programs may use; nothing is watched."""

from __future__ import annotations

import warnings

from mpistrat.liveness.ending.rank_end import rank_end


class PreemptionWatcher:
    """Watches nothing, on any platform, and says so: what TensorFlow's own tells comes from its runtime.

    Use PreemptionCheckpointHandler, which learns of the end, and saves.

    Attributes:
        preemption_message: None.
    """

    def __init__(self) -> None:
        self.preemption_message: str | None = None
        if rank_end().rank == 0:
            warnings.warn(
                "PreemptionWatcher watches nothing; use PreemptionCheckpointHandler, which learns of "
                "signals and of the time limit",
                RuntimeWarning,
                stacklevel=2,
            )

    def block_until_worker_exit(self) -> None:
        """Returns at once."""
