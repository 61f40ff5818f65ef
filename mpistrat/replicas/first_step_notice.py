"""A notice at the first step: how many ranks work together, and how they share a batch."""

from __future__ import annotations

from collections import Counter

from mpistrat.liveness.ending import early_signals
from mpistrat.machine.notices import tell
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.replicas.input_plan import StepExamples


class FirstStepNotice:
    """Gives the notice on rank 0, once for each strategy of several ranks."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._is_told = group.communicator.size == 1 or group.communicator.rank != 0

    def at_step(self, examples: StepExamples | None, batch_size: int | None = None) -> None:
        """Begin a step. The first step gives the notice, and from then on signals end the program. Not collective.

        Called by: `next` of a distributed dataset, and the first reduction of gradients.
        Args:
            examples: numbers of examples of the step; None if not known.
            batch_size: number of examples that the global batch was to have, though some may not have come. None: the
                number that came.
        """
        if early_signals.kept:
            early_signals.release()
        if self._is_told:
            return
        self._is_told = True
        ranks, nodes = self._group.communicator.size, self._group.topology.num_nodes
        text = f"{ranks} ranks on {nodes} node{'s' * (nodes > 1)}"
        batch = 0 if examples is None else batch_size or int(examples[-1])
        if batch:
            replicas = self._group.num_replicas_in_sync
            most = -(-batch // replicas)  # as `input.splitting.slice_bounds` cuts it
            sizes = Counter(min(most, max(0, batch - most * i)) for i in range(replicas))
            parts = (f"{n} x {size}" if n > 1 else f"{size}" for size, n in sizes.items())
            text += f"; a global batch of {batch} is {' + '.join(parts)}"
        tell(text, "INFO")
