"""A notice at the first step: how many ranks work together, and how they share a batch."""

from __future__ import annotations

from collections import Counter

from mpistrat.liveness.ending import early_signals
from mpistrat.machine.notices import tell
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.replicas.input_plan import StepExamples
from mpistrat.topology import ranks_and_nodes


class FirstStepNotice:
    """Prints the notice on rank 0, once for each strategy of several ranks: ranks, nodes, and parts of a batch."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        communicator = group.communicator
        self._is_told = communicator.size == 1 or communicator.rank != 0

    def at_step(self, examples: StepExamples | None, batch_size: int | None = None) -> None:
        """Print the notice, if this is the strategy's first step. Not collective.

        SIGUSR1 and SIGUSR2 were kept until now, for a handler that the program may make. From now on they end a program
        without a handler.

        Called by: `next` of a distributed dataset, and the first reduction of gradients.
        Args:
            examples: numbers of examples of the step (`StepExamples`); None if not known.
            batch_size: number of examples in a global batch, also if the dataset could not load some of them. None: the
                number in `examples`.
        """
        if early_signals.kept:
            early_signals.release()
        if self._is_told:
            return
        self._is_told = True
        text = ranks_and_nodes(self._group.topology)
        batch = 0
        if examples is not None:
            batch = batch_size or int(examples[-1])
        if batch:
            replicas = self._group.num_replicas_in_sync
            most = -(-batch // replicas)  # as `input.splitting.slice_bounds` cuts it
            sizes: Counter[int] = Counter()
            for replica in range(replicas):
                left = max(0, batch - most * replica)
                sizes[min(most, left)] += 1
            parts = []
            for size, number in sizes.items():
                part = f"{size}"
                if number > 1:
                    part = f"{number} x {size}"
                parts.append(part)
            text += f"; a global batch of {batch} is {' + '.join(parts)}"
        tell(text, "INFO")
