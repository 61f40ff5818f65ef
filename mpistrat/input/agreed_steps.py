"""The steps that one rank makes in an epoch. All ranks make the same number of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpistrat import arrays, nest
from mpistrat.communicators import reducing
from mpistrat.input.batches import spec_of, without_examples
from mpistrat.input.prefetch import Prefetcher
from mpistrat.input.readers import Reader, check_all_have_some, knowing_what_follows
from mpistrat.input.splitting import EMPTY, MISSING, ReplicaPieces
from mpistrat.options import InputOptions
from mpistrat.replicas.strategy_extended import StrategyExtended

# In place of a number of steps, a rank sends `_FAILED` if it could not read, and `_NEVER` if it expects no failure.
_FAILED = _NEVER = 1 << 30
# If the thread reads fewer steps ahead, it must be woken for each step: 30 us per step instead of 10 us.
_STEPS_READ_AHEAD = 4


@dataclass
class IteratorProgress:
    """How far an iterator has come in its epoch. `DistributedDataset.state_dict` makes its state of this object.

    The dataset refers to this object instead of the iterator, so that the two are in no reference cycle. An iterator
    that the program leaves early is then freed at once, and ends the DataLoader's worker processes. In a cycle, only
    the garbage collector would free it. That takes 5 s, because the collector closes the processes' queues first.

    Attributes:
        epoch: number of the epoch, from 0.
        steps: number of the epoch's steps that the program has got.
        position: where the program's last step has left the reader (`Reader.position`); None before the first step.
        unread: the state (a dict) from before `DistributedIterator.peek` read a step; None without such a step, or
            once the program has got it.
        ended: whether the program has got all steps.
    """

    epoch: int
    steps: int = 0
    position: Any = None
    unread: dict[str, Any] | None = None
    ended: bool = False

    def begin(self, epoch: int, steps: int) -> None:
        """Begin `epoch` after its first `steps` steps."""
        self.epoch = epoch
        self.steps = steps
        self.position = self.unread = None
        self.ended = False


class AgreedSteps(Iterator[ReplicaPieces]):
    """An iterator over the steps of one epoch on this rank. It gives all ranks the same number of steps.

    If `Reader.ends_together` is true, no rank asks another. Otherwise the ranks ask each other at the first step,
    whether there are further steps. They ask again when the steps that are known to come are over, unless they know the
    epoch's number of steps.

    Called by: every rank, inside `Communicator.raising_together`, a context that hands this rank's error to all ranks.
    Args:
        partial: whether the epoch goes on as long as any rank has data; a replica without data then gets a batch of no
            examples. If False, the epoch ends as soon as one rank has no data.
        progress: the epoch, and the number of the epoch's steps to skip.
    """

    def __init__(
        self,
        reader: Reader,
        extended: StrategyExtended,
        options: InputOptions,
        partial: bool,
        progress: IteratorProgress,
    ) -> None:
        self._reader = reader
        self._communicator = extended.communicator
        self._num_local_replicas = extended.num_local_replicas
        self._partial = partial
        self._asks_nobody = reader.ends_together or self._communicator.size == 1
        self._source: Iterator[ReplicaPieces] = reader.steps(progress.epoch, progress.steps)
        if reader.reads_ahead:
            if not self._asks_nobody:
                self._source = knowing_what_follows(self._source)
            depth = max(options.experimental_per_replica_buffer_size, _STEPS_READ_AHEAD)
            self._source = Prefetcher(self._source, depth)
        self._position: Any = None  # the reader's position after the last step
        self._steps_done = progress.steps
        self._steps_left: int | None = None  # None: not known
        self._sure = 0  # steps that all ranks make before they ask again
        self._has_asked = False
        # A batch with the structure of this rank's batches, to make batches of no examples. Its number of examples.
        self._template: Any = None
        self._template_count: int | None = None

    def __next__(self) -> ReplicaPieces:
        step = self._read() if self._asks_nobody else self._agreed()
        if step is None:
            if self._reader.compares_ends:
                end = f"end of the dataset after {self._steps_done} steps, as many on all ranks"
                self._communicator.barrier(label=end)
            raise StopIteration
        for i, entry in enumerate(step):
            count = None if step.examples is None else step.examples[i]
            step[i] = self._filled(entry, count)
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

    def _filled(self, entry: Any, count: int | None) -> Any:
        """Return the batch of a step's entry; a batch of no examples if the entry is EMPTY or MISSING (no data).

        Args: count: number of examples of the entry; None if not known.
        Raises: ValueError if a batch of no examples cannot be made, for this entry or, surely, for a later one.
        """
        if not _has_examples(entry):
            return self._without_examples()
        if self._template is None:  # the first batch: a short one tells less about its lists
            self._template = entry
            self._template_count = count
            if self._reader.ends_short():
                self._without_examples()
        return entry

    def _without_examples(self) -> Any:
        """Return a batch of no examples, with the structure of this rank's first batch, or of an example.

        Raises: ValueError if the dataset has no example, or if its batches cannot be made batches of no examples.
        """
        if self._template is None:
            self._template = self._reader.template()
        if self._template is None:
            raise ValueError(
                "this rank needs a batch of no examples, but the dataset has no example to copy its structure from"
            )
        return without_examples(self._template, self._template_count)

    def _agreed(self) -> ReplicaPieces | None:
        step = None
        error = None
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
        """Whether all ranks make this step. Called by: every rank, for each step.

        Args:
            step: this rank's step; None if this rank's data has ended, or if there is an `error`.
            error: the exception that reading the step has raised, or None.
        Returns: False at the end of the epoch, on all ranks; the reader's `end` was called then.
        Raises: an error on all ranks, if a rank has one, or if a rank's dataset has a wrong `len`.
        """
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
        """Return two numbers that this rank sends, so that the ranks agree on further steps by the maximum of each.

        First number: the number of steps that this rank can surely make now: `step`, and, with `partial` or
        `drop_last`, the later steps that it has read. 0 without `step`; `_FAILED` after an error. With `partial`, all
        ranks make as many steps as the rank with the most. Without, the number is negated, because all ranks make as
        many steps as the rank with the fewest.

        Second number: minus the number of these steps, if this rank could not read the step after them; else `-_NEVER`.
        """
        if error is not None:
            return [_FAILED, -_NEVER]
        if step is None:
            return [0, -_NEVER]
        count = 1
        fails = False
        if self._partial or self._reader.drop_last:
            count = 1 + step.following
            fails = step.fails
        last = count if fails else _NEVER
        if self._partial:
            return [count, -last]
        return [-count, -last]

    def _ask_first(self, words: list[int], step: ReplicaPieces | None) -> tuple[int, int]:
        """Return the maxima of the ranks' `words` (the results of `_words`). Called by: every rank, for the first step.

        It also learns a batch of no examples, and the epoch's number of steps if the ranks know it.

        Raises: ValueError on all ranks, if some ranks have no data, and the epoch is not `partial`, or a batch of no
            examples cannot be made for them.
        """
        answers = self._communicator.all_gather_object(
            (words, self._reader.num_steps(), _outline_of(step or ())),
            label="first step of the distributed dataset: every rank must call next()",
        )
        words_by_rank, lengths, outlines = zip(*answers, strict=True)
        steps, failures = zip(*words_by_rank, strict=True)
        if _FAILED not in steps:
            if not self._partial and not self._steps_done:
                check_all_have_some(steps)
            if None in outlines:
                self._learn_template(outlines)
            if self._reader.steps_agreed or (self._partial and None not in lengths):
                self._steps_left = max(lengths) - self._steps_done - 1
        return max(steps), max(failures)

    def _learn_template(self, outlines: Sequence[Any]) -> None:
        """Learn a batch of no examples for the ranks without a batch.

        Args: outlines: the result of `_outline_of` of each rank, in rank order.
        Raises: ValueError if the batches differ in structure or dtype, or if no such batch can be made.
        """
        specs = {}
        for rank, outline in enumerate(outlines):
            if isinstance(outline, ValueError):
                raise outline
            if outline is not None:
                (self._template,) = outline
                specs[rank] = spec_of(self._template)
        kinds = [nest.map_structure(_without_sizes, spec) for spec in specs.values()]
        if kinds != kinds[:1] * len(kinds):
            by_rank = "; ".join(f"rank {rank}: {spec}" for rank, spec in specs.items())
            raise ValueError(
                f"the ranks read batches of different structures or dtypes ({by_rank}): give all ranks the same kind"
            )


def _outline_of(step: Sequence[Any]) -> Any:
    """Return a tuple of a batch of no examples, like the first batch in `step`.

    Returns: None if `step` has no batch; the ValueError if a batch of no examples cannot be made.
    """
    batch = _first_batch(step)
    if batch is MISSING:
        return None
    try:
        return (nest.map_structure(_on_host, without_examples(batch)),)
    except Exception as error:
        return ValueError(str(error))


def _on_host(leaf: Any) -> Any:
    if arrays.is_torch(leaf):
        return arrays.to_host(leaf)
    return leaf


def _has_examples(entry: Any) -> bool:
    return entry is not MISSING and entry is not EMPTY


def _first_batch(step: Sequence[Any]) -> Any:
    """Return the first entry of `step` that has examples; MISSING without such an entry."""
    for entry in step:
        if _has_examples(entry):
            return entry
    return MISSING


def _is_batched(step: ReplicaPieces) -> bool:
    """Whether the step has arrays with dimensions. Numbers alone cannot be made a batch of no examples."""
    for leaf in nest.flatten(_first_batch(step)):
        if not arrays.is_number(leaf) and getattr(leaf, "ndim", None) != 0:
            return True
    return False


def _without_sizes(spec: Any) -> Any:
    """Return `spec` with every size None, because batches and examples may vary in size."""
    return replace(spec, shape=(None,) * len(spec.shape))
