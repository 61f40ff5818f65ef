"""What `experimental_distribute_dataset` and `distribute_datasets_from_function` return, and the iterators over it."""

from __future__ import annotations

import collections
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpistrat import nest
from mpistrat.arrays import gradients_are_on
from mpistrat.context import require_iteration
from mpistrat.errors import OutOfRangeError
from mpistrat.input.agreed_steps import AgreedSteps, IteratorProgress
from mpistrat.input.batches import spec_of
from mpistrat.input.device_copies import DeviceCopies
from mpistrat.input.element_spec import PerReplicaSpec
from mpistrat.input.readers import FunctionReader, Reader
from mpistrat.input.splitting import ReplicaPieces
from mpistrat.options import InputOptions
from mpistrat.pytorch.compilation import not_compiled
from mpistrat.trace import spans
from mpistrat.values import regroup

if TYPE_CHECKING:
    from mpistrat.replicas.strategy_extended import StrategyExtended


@dataclass
class IterationState:
    """What a dataset and its iterators know together."""

    epoch: int = 0  # the number of the next iteration
    start: int = 0  # the steps that it leaves out
    spec: Any = None  # of a step; None until a step was read
    # As many steps are on the way to devices while those before them are computed; -1: not agreed yet.
    steps_ahead: int = -1
    is_under_way: bool = False  # inside `Strategy.replica()`, a step has not ended


class DistributedDataset(Iterable[Any]):
    """Steps of per-replica batches; made by a strategy.

    Each iteration over it is an epoch, and every rank must iterate. With one replica per rank a step is
    that replica's batch; with several it is a structure of `PerReplica` batches.

    What else a program asks of it, it asks of what is distributed: of a DataLoader `dataset`, `batch_size` (of the
    global batch, or with `local_batches` of a replica's), `sampler`, `batch_sampler`, `drop_last`, `num_workers`,
    `collate_fn`, and what its class has of its own.

    Attributes:
        strategy: whose replicas it gives batches to.
        after_steps: methods that every rank calls inside `Strategy.replica()` when the program asks for the next step,
            and so has done with the step before. `state_dict` then gives the state after that step.
        partial: an epoch goes on as long as any replica of any rank has data, and the others get batches of no
            examples. Otherwise it ends where a replica has no data.
    """

    def __init__(
        self,
        reader: Reader,
        extended: StrategyExtended,
        options: InputOptions,
        distributed: Any,
        partial: bool,
    ) -> None:
        self.strategy: Any = extended.strategy
        self.partial = partial and not reader.drop_last
        self.after_steps: list[weakref.WeakMethod[Callable[[], None]]] = []
        # Private, for all else is asked of `distributed`.
        self._reader, self._extended, self._options = reader, extended, options
        self._distributed = distributed
        self._shared = IterationState()
        # Gives the iterator that was begun last, if it is alive.
        self._last: Callable[[], DistributedIterator | None] = _no_iterator
        # The next iterator, if its first step was read for its spec.
        self._peeked: DistributedIterator | None = None
        self._progress = IteratorProgress(0)  # of the peeked iterator, else of the last one

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        distributed = self._distributed
        kind = type(distributed)
        if kind.__module__ != "builtins" and hasattr(distributed, name):
            return getattr(distributed, name)
        raise AttributeError(
            f"a DistributedDataset has no {name!r}, and neither has the {kind.__name__} that it distributes"
        )

    @not_compiled
    def __iter__(self) -> DistributedIterator:
        iterator = self._peeked or DistributedIterator(self)
        self._has_begun(iterator)
        return iterator

    def _has_begun(self, iterator: DistributedIterator) -> None:
        """`iterator` was begun last. The next iterator begins with the epoch after its epoch."""
        self._shared.epoch = max(self._shared.epoch, iterator.progress.epoch) + 1
        self._shared.start = 0
        self._last, self._progress, self._peeked = weakref.ref(iterator), iterator.progress, None

    def _end_step(self) -> None:
        """The program has done with the step that it has got last, if any. Called by: every rank."""
        if self._shared.is_under_way:
            self._shared.is_under_way = False
            for method in self.after_steps:
                call = method()
                if call is not None:
                    call()

    def __len__(self) -> int:
        """Steps of an epoch. Raises: TypeError when that is not known before it ends."""
        steps = self._reader.num_steps()
        if steps is None and self._reader.ends_together and self.cardinality >= 0:
            steps = self.cardinality
        if steps is None:
            raise TypeError("the number of steps of this distributed dataset is not known")
        return steps

    @property
    def cardinality(self) -> int:
        """Global batches of an epoch; -1: they never end, -2: it is not known before."""
        return self._reader.cardinality()

    @property
    def element_spec(self) -> Any:
        """The structure of a step, with an ArraySpec (PerReplicaSpec with more than one replica) for each array.

        Reads the first batch, where none was read yet. Called by: every rank.
        """
        last = self._last()
        if self._shared.spec is None and last is not None:
            last.peek()
        if self._shared.spec is None:
            self._peeked = self._peeked or DistributedIterator(self)
            self._progress = self._peeked.progress
            self._peeked.peek()
        return self._shared.spec

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """`reduce_func(state, step)` over the steps of an epoch."""
        return functools.reduce(reduce_func, self, initial_state)

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration that was begun last stands; see `DistributedIterator.state_dict`."""
        with spans.current.range("dataset.state_dict"):
            return self._state_at(self._progress)

    def _state_at(self, progress: IteratorProgress) -> dict[str, Any]:
        """The state of an iterator that has come so far. Called by: every rank."""
        if progress.unread is not None:
            return progress.unread
        if progress.ended:  # it goes on with the next epoch
            progress = IteratorProgress(progress.epoch + 1)
        communicator, position = self._extended.communicator, progress.position
        if position is None:
            position = self._reader.position()
        return {
            "epoch": progress.epoch,
            "steps": progress.steps,
            "ranks": communicator.size,
            **self._reader.identity(),
            **self._reader.state(communicator, position),
        }

    def state_schema(self, state: dict[str, Any]) -> dict[str, Any]:
        """What a state looks like: see `checkpoint.schema`. Not collective.

        The state of another input is not looked at further.
        """
        count, here = range(sys.maxsize), self._reader.identity()
        return {
            "epoch": count,
            "steps": count,
            "ranks": range(1, sys.maxsize),
            "source": str,
            "batch_size": (count, None),
            **(self._reader.state_schema() if state.get("source") == here["source"] else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on where `state` was taken; those after it are the epochs that follow."""
        reader, size = self._reader, self._extended.communicator.size
        saved = {name: state.get(name) for name in ("source", "batch_size")}
        here = reader.identity()
        if saved != here:
            raise ValueError(
                f"the state is of another input: it was saved of {saved}, this is {here}"
            )
        if not reader.same_for_any_ranks and state.get("ranks") != size:
            raise ValueError(
                f"the input was saved on {state.get('ranks')} ranks, this is {size}: where each rank reads what it "
                "likes (a dataset function, or AutoShardPolicy.OFF), only as many can go on"
            )
        reader.load_state(self._extended.communicator, state)
        self._shared.epoch, self._shared.start = state["epoch"], state["steps"]
        self._last, self._peeked = _no_iterator, None
        self._progress = IteratorProgress(self._shared.epoch, self._shared.start)


def _no_iterator() -> None:
    """No iterator was begun yet."""


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
        strategy, after_steps: as of the dataset.
        divides: all of its steps are known to have as many examples, and these divide by the number of replicas.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset, self._extended = dataset, dataset._extended
        self._shared = shared = dataset._shared
        self.after_steps = dataset.after_steps
        fetches = dataset._options.experimental_fetch_to_device is not False
        self._copies = DeviceCopies(self._extended.input.devices if fetches else ())
        self._together = self._extended.communicator.raising_together()
        self.progress = IteratorProgress(shared.epoch, shared.start)
        self.strategy: Any = dataset.strategy
        strategy, reader = self.strategy, dataset._reader
        combined = strategy.num_replicas_in_sync * strategy.workers_combined
        # False where workers do not wait for each other: each has steps of its own, with its pieces of global batches.
        self._combines_all = combined == self._extended.input.share.num_replicas
        self.divides = reader.drop_last and (reader.batch_size or 1) % combined == 0
        self._begin(shared.epoch, shared.start)

    def _begin(self, epoch: int, start: int) -> None:
        self.progress.begin(epoch, start)
        self._steps: AgreedSteps | None = None
        self._ahead: collections.deque[ReplicaPieces] = collections.deque()
        self._failure: Exception | None = None
        self._has_read_all = False

    def initialize(self) -> None:
        """Begin again, with a new epoch. (tf.compat.v1)"""
        done = self.progress
        self._shared.epoch = max(self._shared.epoch, done.epoch + 1)
        self._begin(done.epoch + 1 if done.steps else done.epoch, 0)

    @not_compiled
    def __next__(self) -> Any:
        """The next step, for all replicas of this rank. Raises: StopIteration after the last one.

        ValueError inside `run`; RuntimeError in another strategy's scope.
        """
        with spans.current.range("next(iterator)"):
            dataset, shared, extended = self._dataset, self._shared, self._extended
            strategy, steps = extended.strategy, extended.given_steps
            in_block = require_iteration(strategy)
            if in_block:  # all ranks are here, between two steps
                dataset._end_step()
                extended.modules.before_run()
            if shared.steps_ahead < 0:
                shared.steps_ahead = _agreed_depth(self._copies, extended, dataset._options)
            self._read_ahead(shared.steps_ahead)
            if not self._ahead:
                self._end(in_block)
                raise StopIteration
            step = self._ahead.popleft()
            extended.first_step_notice.at_step(step.examples, dataset._reader.batch_size)
            if in_block or not steps.blocks:
                known = step.examples if self._combines_all else None
                steps.give(self, known, gradients=gradients_are_on())
            self.progress.steps += 1
            self.progress.position, self.progress.unread = step.position, None
            if in_block:
                shared.is_under_way = True
                strategy.runs += 1
            batches = self._copies.arrived(step) if self._copies.needed else step
            return batches[0] if len(batches) == 1 else regroup(batches)

    def _end(self, in_block: bool) -> None:
        """The epoch has no further step. Raises: the error that the ranks met in place of a step."""
        if self._failure is not None:
            raise self._failure
        self.progress.ended = True
        if in_block:
            self._extended.modules.after_loader()
        self._extended.given_steps.end(self)

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
        dataset, progress = self._dataset, self.progress
        with self._together:
            if self._steps is None:
                self._steps = AgreedSteps(
                    dataset._reader, self._extended, dataset._options, dataset.partial, progress
                )
            step = next(self._steps, None)
            if step is None:
                self._has_read_all = True
                return
            if self._shared.spec is None:
                self._shared.spec = _spec_of_step(step[0], dataset._reader, self._extended)
            if self._copies.needed:
                step[:] = self._copies.start(step)
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
        return self._dataset.element_spec

    def state_dict(self) -> dict[str, Any]:
        """Epoch, steps that were handed out, and what the reader needs to go on after them. Called by: every rank.

        The same on all ranks, and picklable. It can be loaded by another number of ranks, unless each rank reads what
        it likes (a dataset function, AutoShardPolicy.OFF).
        """
        return self._dataset._state_at(self.progress)

    def state_schema(self, state: dict[str, Any]) -> dict[str, Any]:
        """What a state looks like: see `checkpoint.schema`. Not collective."""
        return self._dataset.state_schema(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: no example is repeated, none is skipped. Called by: every rank."""
        self._dataset.load_state_dict(state)
        self._begin(state["epoch"], state["steps"])
        self._dataset._has_begun(self)


def _agreed_depth(copies: DeviceCopies, extended: StrategyExtended, options: InputOptions) -> int:
    """How many steps all ranks read ahead: reading has collectives, even if few ranks have devices. Collective."""
    needed = extended.communicator.all_gather_object(
        copies.needed, label="devices of the distributed dataset: every rank must call next()"
    )
    return options.experimental_per_replica_buffer_size if True in needed else 0


def _spec_of_step(batch: Any, reader: Reader, extended: StrategyExtended) -> Any:
    """Args: batch: the first of a replica of this rank."""
    n = extended.num_replicas_in_sync
    size: int | None = None
    if reader.drop_last and reader.batch_size is not None:
        global_size = reader.batch_size * (n if isinstance(reader, FunctionReader) else 1)
        if extended.input.share.workers == 1 and global_size % n == 0:
            size = global_size // n
    spec = nest.map_structure(lambda leaf: leaf.with_batch(size), spec_of(batch))
    if n == 1:
        return spec
    replicas = extended.num_local_replicas
    return nest.map_structure(lambda leaf: PerReplicaSpec((leaf,) * replicas), spec)
