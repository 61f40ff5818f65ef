"""`PreemptionWatcher`: a name of tf.distribute that programs may use. It watches nothing."""

from __future__ import annotations

from mpistrat.liveness.ending.rank_end import rank_end
from mpistrat.machine.notices import warn_on_first_rank


class PreemptionWatcher:
    """Watches nothing, and a warning on rank 0 says so: only TensorFlow's runtime has the messages to watch.

    Use PreemptionCheckpointHandler: it learns of signals and of the time limit, and saves a checkpoint.

    Attributes:
        preemption_message: None, always.

    Example:
        >>> watcher = ms.fault_tolerance.PreemptionWatcher()
        >>> watcher.block_until_worker_exit()  # returns at once
        >>> print(watcher.preemption_message)
        None
    """

    def __init__(self) -> None:
        self.preemption_message: str | None = None
        warn_on_first_rank(
            rank_end().rank,
            "PreemptionWatcher watches nothing. Use PreemptionCheckpointHandler: it learns of "
            "signals and of the time limit",
        )

    def block_until_worker_exit(self) -> None:
        """Return at once."""
