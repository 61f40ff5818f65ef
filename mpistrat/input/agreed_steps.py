"""The steps of an epoch on one rank, of which all ranks make the same number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpistrat import arrays, nest
from mpistrat.communicators import Communicator, reducing
from mpistrat.input.batches import spec_of
from mpistrat.input.readers import EMPTY, MISSING, Reader, ReplicaPieces
from mpistrat.machine.notices import ranks_in_words

# In the place of a number of steps: of a rank that has failed, and of one that knows of no failure to come.
_FAILED = _NEVER = 1 << 30


class AgreedSteps(Iterator[ReplicaPieces]):
    """What `source` gives, step by step, as long as any rank has data (`partial`), or all ranks have.

    Ranks that may have different numbers of steps ask each other at the first, and then when no rank is known to have
    another, unless all know how many theirs are. Every rank must go through it, inside `raising_together`.

    Attributes:
        template: a batch of no examples like those of other ranks, when this rank has none.
    """

    def __init__(
        self,
        reader: Reader,
        source: Iterator[ReplicaPieces],
        communicator: Communicator,
        partial: bool,
        start: int,
        num_local_replicas: int,
    ) -> None:
        self._reader, self._source, self._communicator = reader, source, communicator
        self._partial = partial
        self._num_local_replicas = num_local_replicas
        self._position: Any = None  # where the last step has left the reader
        self._steps_done = start
        self._steps_left: int | None = None  # None: not known
        self._sure = 0  # steps that some rank has
        self._has_asked = False
        self.template: Any = None

    def __next__(self) -> ReplicaPieces:
        step = self._read() if self._reader.ends_together else self._agreed()
        if step is None:
            if self._reader.compares_ends:
                end = f"end of the dataset after {self._steps_done} steps, as many on all ranks"
                self._communicator.barrier(label=end)
            raise StopIteration
        self._steps_done += 1
        return step

    def _read(self) -> ReplicaPieces | None:
        step = next(self._source, None)
        if step is None:
            return None
        if step.examples is not None and self._reader.dropped is not None:
            self._reader.dropped.count(step, step.examples, self._communicator)
        for entry in step:
            if entry is MISSING and not (self._partial and _is_batched(step)):
                return None
        self._position = step.position
        return step

    def _agreed(self) -> ReplicaPieces | None:
        step, error = None, None
        try:
            step = self._read()
        except Exception as failed:
            error = failed
        if self._communicator.size == 1:
            if error is not None:
                raise error
            return step
        if self._steps_left is not None:
            error = error or self._wrong_length(step)
            if error is not None:
                self._communicator.raise_together(error)
            go_on = self._steps_left > 0
            self._steps_left -= 1
        elif self._sure and error is None:
            go_on = True
            self._sure -= 1
        else:
            go_on = self._ask(step, error)
            if not go_on:
                self._reader.end(self._communicator, step is not None)
        if not go_on:
            return None
        if step is None:
            step = ReplicaPieces([MISSING] * self._num_local_replicas)
            step.position = self._position
        return step

    def _wrong_length(self, step: ReplicaPieces | None) -> ValueError | None:
        length = self._reader.num_steps()
        if length is None or (step is None) == (self._steps_done >= length):
            return None
        gave = f"ended after {self._steps_done}" if step is None else "gave more"
        return ValueError(f"the length of this rank's dataset says {length} steps, but it {gave}")

    def _ask(self, step: ReplicaPieces | None, error: Exception | None) -> bool:
        communicator, partial = self._communicator, self._partial
        following, fails = 0, False
        if step is not None and (partial or self._reader.drop_last):
            following, fails = step.following, step.fails
        count = 0 if step is None else 1 + following
        # Ranks go by the largest: with `partial` by who surely has the most steps, otherwise by who has the fewest;
        # and by who fails first.
        steps = _FAILED if error is not None else count if partial else -count
        mine = [steps, -(count if fails else _NEVER)]
        if self._has_asked:
            verdict = np.array(mine, np.int32)
            agreement = reducing("max", "end of the distributed dataset")
            communicator.all_reduce(verdict, agreement, cause=error)
            largest, failure = verdict.tolist()
        else:
            self._has_asked = True
            batch = None if step is None else next(filter(has_examples, step), None)
            spec = None if batch is None else spec_of(batch)
            first_steps = communicator.all_gather_object(
                (mine, self._reader.num_steps(), spec),
                label="first step of the distributed dataset: every rank must call next()",
            )
            largest, failure = (max(mine[i] for mine, _, _ in first_steps) for i in range(2))
            counts = [count for _, count, _ in first_steps if count is not None]
            if largest != _FAILED:
                self._check_all_have_some(first_steps)
                self._learn_from_others([spec for _, _, spec in first_steps])
                if self._reader.steps_agreed or (partial and len(counts) == communicator.size):
                    self._steps_left = max(counts) - self._steps_done - 1
        if largest == _FAILED:
            communicator.raise_any(error, "could not read its part of the dataset")
        sure = min(abs(largest), -failure)
        self._sure = max(0, sure - 1)
        return sure > 0

    def _check_all_have_some(self, first_steps: Sequence[Any]) -> None:
        if not self._partial and not self._steps_done:
            check_all_have_some([abs(steps) for (steps, _), _, _ in first_steps])

    def _learn_from_others(self, specs: list[Any]) -> None:
        """What the batches of this rank look like, if it has none. Raises: ValueError when the ranks' differ."""
        known = [spec for spec in specs if spec is not None]
        kinds = [nest.map_structure(_without_sizes, spec) for spec in known]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(
                "the ranks read batches of different structures or dtypes: "
                + "; ".join(
                    f"rank {rank}: {spec}" for rank, spec in enumerate(specs) if spec is not None
                )
            )
        if known:
            self.template = nest.map_structure(lambda spec: spec.empty(), known[0])


def check_all_have_some(steps: Sequence[int]) -> None:
    """Args: steps: that each rank has, at least. Raises: ValueError when some ranks have none, and others have some."""
    without = [rank for rank, count in enumerate(steps) if not count]
    if 0 < len(without) < len(steps):
        raise ValueError(
            f"{ranks_in_words(without)} of {len(steps)} {'has' if len(without) == 1 else 'have'} no data for a step, "
            "and an epoch ends with the shortest rank: nothing would be trained. Give each rank data: cut it into "
            f"{len(steps)} shards or more, use smaller batches, or start fewer ranks ({len(steps) - len(without)})"
        )


def has_examples(entry: Any) -> bool:
    return entry is not MISSING and entry is not EMPTY


def _is_batched(step: ReplicaPieces) -> bool:
    """Whether its elements are batches, which can be of no examples, and not numbers, which cannot."""
    entry = next(filter(has_examples, step), None)
    return entry is None or not all(map(_is_number, nest.leaves(entry)))


def _is_number(leaf: Any) -> bool:
    return arrays.is_number(leaf) or (arrays.is_array(leaf) and leaf.ndim == 0)


def _without_sizes(spec: Any) -> Any:
    """Batches of different sizes are alike; so are examples that vary in size."""
    return replace(spec, shape=(None,) * len(spec.shape))
