"""The steps of an epoch on one rank, of which all ranks make the same number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import arrays, nest
from mpistrat.communicators import reducing
from mpistrat.input.batches import spec_of, without_examples
from mpistrat.input.element_spec import ArraySpec
from mpistrat.input.prefetch import Prefetcher
from mpistrat.input.readers import Reader, check_all_have_some, knowing_what_follows
from mpistrat.input.splitting import EMPTY, MISSING, ReplicaPieces
from mpistrat.options import InputOptions

if TYPE_CHECKING:
    from mpistrat.replicas.strategy_extended import StrategyExtended

# In the place of a number of steps: of a rank that has failed, and of one that knows of no failure to come.
_FAILED = _NEVER = 1 << 30
# With fewer, a thread is woken for each step when the reading is the slower: 30 us instead of 10.
_STEPS_READ_AHEAD = 4


@dataclass
class IteratorProgress:
    """How far an iterator has come: what a state is made of.

    The dataset keeps it in place of the iterator. If each kept the other alive, an iteration that is left early would
    leave a DataLoader's worker processes to the garbage collector. It ends their queues before it waits for them: 5 s.
    """

    epoch: int
    steps: int = 0  # that were handed out
    position: Any = None  # where the last of them has left the reader
    unread: dict[str, Any] | None = None  # the state before a step was read that nobody has yet
    ended: bool = False

    def begin(self, epoch: int, steps: int) -> None:
        self.epoch, self.steps = epoch, steps
        self.position = self.unread = None
        self.ended = False


class AgreedSteps(Iterator[ReplicaPieces]):
    """The steps of an epoch after those of `progress`, as long as any rank has data (`partial`), or all ranks have.

    Ranks ask nobody where `Reader.ends_together` says that they make equally many steps. Other ranks ask each other at
    the first step, and again when no rank is known to have a further one, unless all know how many steps they have.
    Every rank must go through it, inside `raising_together`. A replica without data gets a batch of no examples.
    """

    def __init__(
        self,
        reader: Reader,
        extended: StrategyExtended,
        options: InputOptions,
        partial: bool,
        progress: IteratorProgress,
    ) -> None:
        self._reader, self._communicator = reader, extended.communicator
        self._num_local_replicas = extended.num_local_replicas
        self._partial = partial
        self._asks_nobody = reader.ends_together or self._communicator.size == 1
        self._source: Iterator[ReplicaPieces] = reader.steps(progress.epoch, progress.steps)
        if reader.reads_ahead:
            if not self._asks_nobody:
                self._source = knowing_what_follows(self._source)
            depth = max(options.experimental_per_replica_buffer_size, _STEPS_READ_AHEAD)
            self._source = Prefetcher(self._source, depth)
        self._position: Any = None  # where the last step has left the reader
        self._steps_done = progress.steps
        self._steps_left: int | None = None  # None: not known
        self._sure = 0  # steps that some rank has
        self._has_asked = False
        self._template: Any = None  # a batch, for batches of no examples
        self._structure: str | None = None

    def __next__(self) -> ReplicaPieces:
        step = self._read() if self._asks_nobody else self._agreed()
        if step is None:
            if self._reader.compares_ends:
                end = f"end of the dataset after {self._steps_done} steps, as many on all ranks"
                self._communicator.barrier(label=end)
            raise StopIteration
        step[:] = map(self._filled, step)
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

    def _filled(self, entry: Any) -> Any:
        """The batch of a step's entry; one of no examples where it has none.

        Raises: ValueError where the batches before it had another structure.
        """
        if _has_examples(entry):
            self._template = entry
        else:
            if self._template is None:
                self._template = self._reader.template()
            if self._template is None:
                raise ValueError(
                    "the dataset has no example that could tell what a batch looks like"
                )
            entry = without_examples(self._template)
        structure = nest.take_apart(entry)[1]
        if self._structure not in (None, structure):
            raise ValueError(
                f"the dataset changes its structure: step {self._steps_done} is {structure}, those before it were "
                f"{self._structure}"
            )
        self._structure = structure
        return entry

    def _agreed(self) -> ReplicaPieces | None:
        step, error = None, None
        try:
            step = self._read()
        except Exception as failed:
            error = failed
        if not self._goes_on(step, error):
            return None
        if step is None:
            step = ReplicaPieces([MISSING] * self._num_local_replicas)
            step.position = self._position
        return step

    def _goes_on(self, step: ReplicaPieces | None, error: Exception | None) -> bool:
        """Whether all ranks make this step. Raises: on all ranks, where one of them has an error."""
        if self._steps_left is not None:
            error = error or self._wrong_length(step)
            if error is not None:
                self._communicator.raise_together(error)
            self._steps_left -= 1
            return self._steps_left >= 0
        if self._sure and error is None:
            self._sure -= 1
            return True
        goes_on = self._ask(step, error)
        if not goes_on:
            self._reader.end(self._communicator, step is not None)
        return goes_on

    def _wrong_length(self, step: ReplicaPieces | None) -> ValueError | None:
        length = self._reader.num_steps()
        if length is None or (step is None) == (self._steps_done >= length):
            return None
        gave = f"ended after {self._steps_done}" if step is None else "gave more"
        return ValueError(f"the length of this rank's dataset says {length} steps, but it {gave}")

    def _ask(self, step: ReplicaPieces | None, error: Exception | None) -> bool:
        words = self._words(step, error)
        if self._has_asked:
            verdict = np.array(words, np.int32)
            agreement = reducing("max", "end of the distributed dataset")
            self._communicator.all_reduce(verdict, agreement, cause=error)
            largest, failure = verdict.tolist()
        else:
            self._has_asked = True
            largest, failure = self._ask_first(words, step)
        if largest == _FAILED:
            self._communicator.raise_any(error, "could not read its part of the dataset")
        sure = min(abs(largest), -failure)
        self._sure = max(0, sure - 1)
        return sure > 0

    def _words(self, step: ReplicaPieces | None, error: Exception | None) -> list[int]:
        """Two numbers: the steps that this rank surely has, and minus the first step that fails.

        For both the ranks take the largest number of all. With `partial` the ranks make as many steps as the rank with
        the most. Otherwise they make as many as the rank with the fewest: then the number of steps is negative.
        """
        if error is not None:
            return [_FAILED, -_NEVER]
        if step is None:
            return [0, -_NEVER]
        count, fails = 1, False
        if self._partial or self._reader.drop_last:
            count, fails = 1 + step.following, step.fails
        return [count if self._partial else -count, -(count if fails else _NEVER)]

    def _ask_first(self, words: list[int], step: ReplicaPieces | None) -> tuple[int, int]:
        """The largest words. Learns how many steps there are, and how batches look. Collective."""
        batch = next(filter(_has_examples, step or ()), None)
        answers = self._communicator.all_gather_object(
            (words, self._reader.num_steps(), None if batch is None else spec_of(batch)),
            label="first step of the distributed dataset: every rank must call next()",
        )
        words_by_rank, lengths, specs = zip(*answers, strict=True)
        steps, failures = zip(*words_by_rank, strict=True)
        if _FAILED not in steps:
            if not self._partial and not self._steps_done:
                check_all_have_some([*map(abs, steps)])
            self._learn_template(specs)
            if self._reader.steps_agreed or (self._partial and None not in lengths):
                self._steps_left = max(lengths) - self._steps_done - 1
        return max(steps), max(failures)

    def _learn_template(self, specs: Sequence[Any]) -> None:
        """How a batch of this rank looks, if it has none. Raises: ValueError when the ranks' differ."""
        known = {rank: spec for rank, spec in enumerate(specs) if spec is not None}
        kinds = [nest.map_structure(_without_sizes, spec) for spec in known.values()]
        if kinds != kinds[:1] * len(kinds):
            by_rank = "; ".join(f"rank {rank}: {spec}" for rank, spec in known.items())
            raise ValueError(f"the ranks read batches of different structures or dtypes: {by_rank}")
        for spec in [*known.values()][:1]:
            self._template = nest.map_structure(ArraySpec.empty, spec)


def _has_examples(entry: Any) -> bool:
    return entry is not MISSING and entry is not EMPTY


def _is_batched(step: ReplicaPieces) -> bool:
    """Whether its elements are batches, which can be of no examples, and not numbers, which cannot."""
    entry = next(filter(_has_examples, step), None)
    return not all(map(_is_number, nest.flatten(entry)))


def _is_number(leaf: Any) -> bool:
    return arrays.is_number(leaf) or getattr(leaf, "ndim", None) == 0


def _without_sizes(spec: Any) -> Any:
    """Batches of different sizes are alike; so are examples that vary in size."""
    return replace(spec, shape=(None,) * len(spec.shape))
