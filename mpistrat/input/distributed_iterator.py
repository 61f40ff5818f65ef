"""One epoch of a distributed dataset."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

from mpistrat import nest
from mpistrat.arrays import gradients_are_on
from mpistrat.context import require_iteration
from mpistrat.errors import OutOfRangeError
from mpistrat.input.agreed_steps import AgreedSteps, has_examples
from mpistrat.input.batches import without_examples
from mpistrat.input.device_copies import DeviceCopies
from mpistrat.input.splitting import ReplicaPieces
from mpistrat.input.step_source import IteratorProgress, StepSource
from mpistrat.pytorch.compilation import not_compiled
from mpistrat.trace import spans
from mpistrat.values import regroup


class Optional:
    """A step, or none. As `tf.experimental.Optional`."""

    def __init__(self, value: Any, has_value: bool) -> None:
        self._value, self._has_value = value, has_value

    def has_value(self) -> bool:
        return self._has_value

    def get_value(self) -> Any:
        """The value. Raises: ValueError when there is none."""
        if not self._has_value:
            raise ValueError("the distributed dataset has ended: there is no value")
        return self._value


class DistributedIterator(Iterator[Any]):
    """The steps of one epoch; made by `iter(distributed_dataset)`. Every rank must go through it.

    Attributes:
        after_steps: as of the dataset.
        divides: all of its steps are known to have as many examples, and these divide by the number of replicas.
    """

    def __init__(self, source: StepSource) -> None:
        self._source, self._extended = source, source.extended
        self.after_steps = source.after_steps
        fetches = source.options.experimental_fetch_to_device is not False
        self._copies = DeviceCopies(self._extended.input.devices if fetches else ())
        self._together = self._extended.communicator.raising_together()
        self.progress = IteratorProgress(source.epoch, source.start)
        # Workers that do not wait for each other have steps of their own, of which each is a part of a global batch.
        strategy = self._extended.strategy
        combined = strategy.num_replicas_in_sync * strategy.workers_combined
        self._combines_all = combined == self._extended.input.share.num_replicas
        self.divides = source.reader.drop_last and (source.reader.batch_size or 1) % combined == 0
        self._begin(source.epoch, source.start)

    @property
    def strategy(self) -> Any:
        """Whose replicas it gives batches to."""
        return self._extended.strategy

    def _begin(self, epoch: int, start: int) -> None:
        self.progress.begin(epoch, start)
        self._steps: AgreedSteps | None = None
        self._steps_read = start
        self._ahead: collections.deque[ReplicaPieces] = collections.deque()
        self._failure: Exception | None = None
        self._template: Any = None
        self._structure: str | None = None
        self._has_read_all = False

    def initialize(self) -> None:
        """Begin again, with a new epoch. (tf.compat.v1)"""
        done = self.progress
        self._source.epoch = max(self._source.epoch, done.epoch + 1)
        self._begin(done.epoch + 1 if done.steps else done.epoch, 0)

    @not_compiled
    def __next__(self) -> Any:
        """The next step, for all replicas of this rank. Raises: StopIteration after the last one.

        ValueError inside `run`; RuntimeError in another strategy's scope.
        """
        with spans.current.range("next(iterator)"):
            strategy = self._extended.strategy
            in_block = require_iteration(strategy)
            if in_block:  # all ranks are here, between two steps
                self._source.end_step()
                self._extended.modules.before_run()
            if self._source.steps_ahead < 0:
                self._source.agree_on_steps_ahead(self._copies)
            self._read_ahead(self._source.steps_ahead)
            if not self._ahead:
                if self._failure is not None:
                    raise self._failure
                self.progress.ended = True
                if in_block:
                    self._extended.modules.after_loader()
                self._extended.given_steps.end(self)
                raise StopIteration
            step = self._ahead.popleft()
            self._extended.first_step.begin(step.examples, self._source.reader.batch_size)
            steps = self._extended.given_steps
            if in_block or not steps.blocks:
                known = step.examples if self._combines_all else None
                steps.give(self, known, gradients=gradients_are_on())
            self.progress.steps += 1
            self.progress.position, self.progress.unread = step.position, None
            if in_block:
                self._source.is_under_way = True
                strategy.runs += 1
            batches = self._copies.arrived(step) if self._copies.needed else step
            return batches[0] if len(batches) == 1 else regroup(batches)

    def peek(self) -> None:
        """Read the first step, if none was read, for what it tells of all."""
        if self._steps is None:
            self.progress.unread = self.state_dict()
            self._read_ahead(0)
            if self._failure is not None:
                raise self._failure

    def _read_ahead(self, depth: int) -> None:
        """Until more than `depth` steps are there.

        An error comes when those before it have been handed out, and again at each further `next`: what it took from
        the source is lost, so nothing may follow as if it had not been.
        """
        if self._failure is not None and not self._ahead:
            self._extended.communicator.raise_together(self._failure)
        try:
            while len(self._ahead) <= depth and self._failure is None and not self._has_read_all:
                self._read()
        except Exception as failure:
            self._failure = failure

    def _read(self) -> None:
        with self._together:
            if self._steps is None:
                self._steps = self._source.open(self.progress.epoch, self._steps_read)
            step = next(self._steps, None)
            if step is None:
                self._has_read_all = True
                return
            step[:] = map(self._filled, step)
            if self._source.spec is None:
                self._source.learn_spec(step[0])
            if self._copies.needed:
                step[:] = self._copies.start(step)
        self._steps_read += 1
        self._ahead.append(step)

    def get_next(self) -> Any:
        """`next`, but at the end: OutOfRangeError."""
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("the distributed dataset has ended") from None

    def get_next_as_optional(self) -> Optional:
        try:
            return Optional(next(self), True)
        except StopIteration:
            return Optional(None, False)

    @property
    def element_spec(self) -> Any:
        """As of the dataset. Called by: every rank."""
        self.peek()
        return element_spec_of(self._source)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, steps that were handed out, and what the reader needs to go on after them. Called by: every rank.

        The same on all ranks, and picklable. It can be loaded by another number of ranks, unless each rank reads what
        it likes (a dataset function, AutoShardPolicy.OFF).
        """
        return self._source.state_at(self.progress)

    def state_schema(self, state: dict[str, Any]) -> dict[str, Any]:
        """What a state looks like: see `checkpoint.schema`. Not collective."""
        return self._source.state_schema(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: no example is repeated, none is skipped. Called by: every rank."""
        self._source.load_state_dict(state)
        self._begin(state["epoch"], state["steps"])
        self._source.has_begun(self, self.progress)

    def _filled(self, entry: Any) -> Any:
        """The batch of a step's entry; one of no examples where it has none.

        Raises: ValueError where the batches before it had another structure.
        """
        if has_examples(entry):
            self._template = entry
        else:
            if self._template is None and self._steps is not None:
                self._template = self._steps.template
            if self._template is None:
                self._template = self._source.reader.template()
            if self._template is None:
                raise ValueError(
                    "the dataset has no example that could tell what a batch looks like"
                )
            entry = without_examples(self._template)
        structure = nest.take_apart(entry)[1]
        if self._structure not in (None, structure):
            raise ValueError(
                f"the dataset changes its structure: step {self._steps_read} is {structure}, those before it were "
                f"{self._structure}"
            )
        self._structure = structure
        return entry


def element_spec_of(source: StepSource) -> Any:
    """The spec of a step. Reads the first batch, where none was read yet. Called by: every rank."""
    last = None if source.last is None else source.last()
    if source.spec is None and last is not None:
        last.peek()
    if source.spec is None:
        source.peeked = source.peeked or DistributedIterator(source)
        source.peeked.peek()
    return source.spec
