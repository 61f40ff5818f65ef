"""The results of `experimental_distribute_dataset` and `distribute_datasets_from_function`, and their iterators."""

from __future__ import annotations

import collections
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mpistrat import nest
from mpistrat.arrays import gradients_are_on
from mpistrat.context import require_iteration
from mpistrat.errors import OutOfRangeError
from mpistrat.input.agreed_steps import AgreedSteps, IteratorProgress
from mpistrat.input.batches import spec_of
from mpistrat.input.device_copies import DeviceCopies
from mpistrat.input.element_spec import ArraySpec, PerReplicaSpec
from mpistrat.input.readers import FunctionReader, Reader
from mpistrat.input.splitting import ReplicaPieces
from mpistrat.options import InputOptions
from mpistrat.pytorch.compilation import not_compiled
from mpistrat.replicas.strategy_extended import StrategyExtended
from mpistrat.trace import spans
from mpistrat.values import regroup


@dataclass
class IterationState:
    """The state that a distributed dataset and its iterators share on one rank.

    Attributes:
        epoch: number of the epoch that the next iterator begins.
        start: number of steps that the next iterator skips.
        spec: the dataset's `element_spec`; None until a step was read.
        steps_ahead: number of steps to read before the program asks for them, so that their batches are copied to
            devices meanwhile; -1 until the ranks have agreed on it.
        is_under_way: whether, inside `Strategy.replica()`, the program still works on the step that it got last.
    """

    epoch: int = 0
    start: int = 0
    spec: Any = None
    steps_ahead: int = -1
    is_under_way: bool = False


class DistributedDataset(Iterable[Any]):
    """An iterable over steps of per-replica batches. A strategy makes it.

    Each iteration over it is an epoch, and every rank must iterate. With one replica per rank, a step is that replica's
    batch. With several, a step is a structure of `PerReplica` batches.

    Other attributes come from the dataset that the program has distributed. For a DataLoader these are `dataset`,
    `batch_size` (of the global batch; with `local_batches`, of a replica's batch), `sampler`, `batch_sampler`,
    `drop_last`, `num_workers`, `collate_fn`, and attributes of its subclass.

    Attributes:
        strategy: the strategy of the replicas that get the batches.
        after_steps: methods that every rank calls inside `Strategy.replica()` when the program asks for the next step.
            At that time `state_dict` gives the state after the step before. The `PreemptionCheckpointHandler` adds a
            method.
        partial: whether an epoch goes on as long as any replica of any rank has data; replicas without data get batches
            of no examples. If False, an epoch ends where a replica has no data.

    Example:
        >>> strategy = ms.OneDeviceStrategy("cpu")
        >>> dataset = strategy.experimental_distribute_dataset(ms.input.BatchedDataset(np.arange(6), 4))
        >>> dataset.cardinality, dataset.element_spec
        (2, ArraySpec(shape=(None,), dtype='int64', library='numpy'))
        >>> int(dataset.reduce(0, lambda total, batch: total + batch.sum()))
        15
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
        self.after_steps: list[Callable[[], None]] = []
        # Private names, because `__getattr__` looks up all public ones in `distributed`.
        self._reader = reader
        self._extended = extended
        self._options = options
        self._distributed = distributed
        self._shared = IterationState()
        # Returns the iterator that was begun last, or None if the program no longer has it.
        self._last: Callable[[], DistributedIterator | None] = _no_iterator
        # The next iterator, if `element_spec` has read its first step.
        self._peeked: DistributedIterator | None = None
        # The progress of the peeked iterator; without one, of the iterator that was begun last.
        self._progress = IteratorProgress(0)

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
        """Record `iterator` as begun last. The next iterator begins with the epoch after its epoch."""
        self._shared.epoch = max(self._shared.epoch, iterator.progress.epoch) + 1
        self._shared.start = 0
        self._last = weakref.ref(iterator)
        self._progress = iterator.progress
        self._peeked = None

    def __len__(self) -> int:
        """Return the number of steps of an epoch.

        Raises: TypeError if the number is not known before the epoch ends.
        """
        steps = self._reader.num_steps()
        if steps is None and self._reader.ends_together and self.cardinality >= 0:
            steps = self.cardinality
        if steps is None:
            raise TypeError("the number of steps of this distributed dataset is not known")
        return steps

    @property
    def cardinality(self) -> int:
        """The number of global batches of an epoch; -1: the batches never end; -2: not known in advance."""
        return self._reader.cardinality()

    @property
    def element_spec(self) -> Any:
        """The structure of a step, with a spec for each array: `ArraySpec`, or `PerReplicaSpec` with several replicas.

        Reads the first step if none was read yet; the next iteration then begins with that step. Called by: every rank.
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
        """Return `reduce_func(state, step)` folded over the steps of one epoch, beginning with `initial_state`.

        Called by: every rank. Combines nothing over ranks or replicas.
        """
        return functools.reduce(reduce_func, self, initial_state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the iteration that was begun last, as `DistributedIterator.state_dict` does.

        Called by: every rank.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> dataset = strategy.experimental_distribute_dataset(ms.input.BatchedDataset(np.arange(6), 2))
            >>> _ = next(iter(dataset))
            >>> dataset.load_state_dict(dataset.state_dict())
            >>> list(dataset)
            [array([2, 3]), array([4, 5])]
        """
        with spans.current.range("dataset.state_dict"):
            return self._state_at(self._progress)

    def _state_at(self, progress: IteratorProgress) -> dict[str, Any]:
        """Return the state of an iterator with this progress; after an epoch's end, the state before the next epoch.

        Called by: every rank.
        """
        if progress.unread is not None:
            return progress.unread
        if progress.ended:  # the next epoch follows
            progress = IteratorProgress(progress.epoch + 1)
        communicator = self._extended.communicator
        position = progress.position
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
        """Return the form that `state` must have, for `checkpoint.schema`. Not collective.

        The reader's part of the form is left out if another kind of input has saved `state`.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> dataset = strategy.experimental_distribute_dataset(ms.input.BatchedDataset(np.arange(6), 2))
            >>> sorted(dataset.state_schema({}))
            ['batch_size', 'epoch', 'ranks', 'source', 'steps']
        """
        count = range(sys.maxsize)
        schema = {
            "epoch": count,
            "steps": count,
            "ranks": range(1, sys.maxsize),
            "source": str,
            "batch_size": (count, None),
        }
        if state.get("source") == self._reader.identity()["source"]:
            schema.update(self._reader.state_schema())
        return schema

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where `state` was taken. Later iterations are the epochs after it.

        Called by: every rank.
        Raises: ValueError if `state` is of another kind of input or batch size, or, in mid-epoch, of another length; or
            of another number of ranks, where each rank reads data of its own (a dataset function, AutoShardPolicy.OFF).
        """
        reader = self._reader
        size = self._extended.communicator.size
        here = reader.identity()
        # Earlier versions saved no length.
        saved = {name: state.get(name, here[name]) for name in here}
        if not state["steps"]:  # the next epoch may have another length
            saved["length"] = here["length"]
        if not reader.same_for_any_ranks and state.get("ranks") != size:
            raise ValueError(
                f"the input was saved on {state.get('ranks')} ranks, this is {size}. Start as many ranks as before: "
                "each rank reads data of its own (local_batches=True, a dataset function, or AutoShardPolicy.OFF)"
            )
        if saved != here:
            raise ValueError(
                f"the state is of another input, {saved}, and this is {here}. Load it into a dataset of the same kind, "
                "with the same batch size and, in mid-epoch, the same length"
            )
        reader.load_state(self._extended.communicator, state)
        self._shared.epoch = state["epoch"]
        self._shared.start = state["steps"]
        self._last = _no_iterator
        self._peeked = None
        self._progress = IteratorProgress(self._shared.epoch, self._shared.start)


def _no_iterator() -> None:
    """Return None. It stands in for the weak reference to an iterator while no iterator was begun."""


class Optional:
    """A step, or none, like `tf.experimental.Optional`."""

    def __init__(self, value: Any, has_value: bool) -> None:
        self._value = value
        self._has_value = has_value

    def has_value(self) -> bool:
        """Whether there is a step."""
        return self._has_value

    def get_value(self) -> Any:
        """Return the step. Raises: ValueError if there is none."""
        if not self._has_value:
            raise ValueError("the distributed dataset has ended: there is no value")
        return self._value


class DistributedIterator(Iterator[Any]):
    """The steps of one epoch; `iter(distributed_dataset)` makes it. Every rank must go through it.

    Attributes:
        strategy: the strategy that distributes the dataset.
        after_steps: methods that every rank calls inside `Strategy.replica()` when the program asks for the next step;
            the dataset's own list.
        progress: how far the program has come in the epoch.
        divides: whether all steps surely have the same number of examples, divisible by the number of replicas.

    Example:
        >>> strategy = ms.OneDeviceStrategy("cpu")
        >>> iterator = iter(strategy.experimental_distribute_dataset(ms.input.BatchedDataset(np.arange(6), 4)))
        >>> iterator.element_spec
        ArraySpec(shape=(None,), dtype='int64', library='numpy')
        >>> iterator.get_next()
        array([0, 1, 2, 3])
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._extended = dataset._extended
        self._shared = shared = dataset._shared
        self.after_steps = dataset.after_steps
        devices = self._extended.input.devices
        if dataset._options.experimental_fetch_to_device is False:
            devices = ()
        self._copies = DeviceCopies(devices)
        self._together = self._extended.communicator.raising_together()
        self.progress = IteratorProgress(shared.epoch, shared.start)
        self.strategy: Any = dataset.strategy
        reader = dataset._reader
        combined = self.strategy.num_replicas_in_sync * self.strategy.workers_combined
        # False where workers do not wait for each other: each worker then has steps of its own.
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
        """Begin the next epoch; if the program has got no step of this epoch, begin this epoch again. (tf.compat.v1)

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> iterator = iter(strategy.experimental_distribute_dataset(ms.input.BatchedDataset(np.arange(3), 3)))
            >>> _ = next(iterator)
            >>> iterator.initialize()
            >>> next(iterator)
            array([0, 1, 2])
        """
        done = self.progress
        self._shared.epoch = max(self._shared.epoch, done.epoch + 1)
        epoch = done.epoch + 1 if done.steps else done.epoch
        self._begin(epoch, 0)

    @not_compiled
    def __next__(self) -> Any:
        """Return this rank's next step: a batch, or `PerReplica` batches with several replicas. Called by: every rank.

        If batches are copied to a device, it also reads later steps and begins to copy them. Inside
        `Strategy.replica()` the call ends the step before: it calls the methods in `after_steps`.

        Raises:
            StopIteration: after the last step.
            ValueError: inside `run`.
            RuntimeError: in another strategy's scope.
        """
        with spans.current.range("next(iterator)"):
            shared = self._shared
            in_block = require_iteration(self.strategy)
            if in_block:  # all ranks call this, between two steps
                if shared.is_under_way:
                    shared.is_under_way = False
                    for method in self.after_steps:
                        method()
                self._extended.modules.before_run()
            if shared.steps_ahead < 0:
                shared.steps_ahead = _agreed_depth(self._copies, self._dataset)
            self._read_ahead(shared.steps_ahead)
            if not self._ahead:
                self._end(in_block)
                raise StopIteration
            step = self._ahead.popleft()
            self._begin_step(step, in_block)
            if self._copies.needed:
                step[:] = self._copies.arrived(step)
            if len(step) == 1:
                return step[0]
            return regroup(step, may_differ=True)

    def _begin_step(self, step: ReplicaPieces, in_block: bool) -> None:
        """Tell the strategy of the step that the program gets, because losses count by examples; record the progress.

        Args: in_block: whether the program is inside `Strategy.replica()`.
        """
        extended = self._extended
        extended.replicas.first_step_notice.at_step(step.examples, self._dataset._reader.batch_size)
        if in_block or not extended.given_steps.blocks:
            examples = step.examples if self._combines_all else None
            extended.given_steps.give(self, examples, gradients=gradients_are_on())
        self.progress.steps += 1
        self.progress.position = step.position
        self.progress.unread = None
        if in_block:
            self._shared.is_under_way = True
            self.strategy.runs += 1

    def _end(self, in_block: bool) -> None:
        """Record that the epoch has no further step. Raises: the error that `_read_ahead` has kept, if any."""
        if self._failure is not None:
            raise self._failure
        self.progress.ended = True
        if in_block:
            self._extended.modules.after_loader()
        self._extended.given_steps.end(self)

    def peek(self) -> None:
        """Read the epoch's first step, so that the element spec is known. Nothing happens if a step was read already.

        The following `next` gives the step.

        Called by: every rank.
        Raises: the error that reading the step raises.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> iterator = iter(strategy.experimental_distribute_dataset(ms.input.BatchedDataset(np.arange(3), 3)))
            >>> iterator.peek()
            >>> next(iterator)
            array([0, 1, 2])
        """
        if self._steps is None:
            self.progress.unread = self.state_dict()
            self._read_ahead(0)
            if self._failure is not None:
                raise self._failure

    def _read_ahead(self, depth: int) -> None:
        """Read steps until more than `depth` of them wait for the program, or the epoch has ended.

        An error in reading is kept. It is raised once the program has got all earlier steps, and again at each further
        `next`. The step that could not be read is lost, so no later step may follow.

        Called by: every rank.
        """
        if self._failure is not None:
            if not self._ahead:
                self._extended.communicator.raise_together(self._failure)
            return
        try:
            while len(self._ahead) <= depth and not self._has_read_all:
                self._read()
        except Exception as failure:
            self._failure = failure

    def _read(self) -> None:
        """Read one step, begin to copy it to the devices, and append it to `_ahead`. Called by: every rank."""
        dataset = self._dataset
        progress = self.progress
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
        """Return the next step, like `next`. Raises: OutOfRangeError after the last step."""
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("the distributed dataset has ended") from None

    def get_next_as_optional(self) -> Optional:
        """Return the next step in an `Optional`, after the last step an empty `Optional`. Called by: every rank.

        Example:
            >>> iterator = iter(ms.OneDeviceStrategy("cpu").experimental_distribute_dataset([np.arange(2)]))
            >>> iterator.get_next_as_optional().get_value()
            array([0, 1])
            >>> iterator.get_next_as_optional().has_value()
            False
        """
        try:
            return Optional(next(self), True)
        except StopIteration:
            return Optional(None, False)

    @property
    def element_spec(self) -> Any:
        """The structure of a step, with an `ArraySpec` or a `PerReplicaSpec` for each array. Called by: every rank."""
        self.peek()
        return self._dataset.element_spec

    def state_dict(self) -> dict[str, Any]:
        """Return where the program is: a dict of the epoch, the number of steps that it got, and the reader's state.

        The state is picklable and equal on all ranks. Another number of ranks can load it, unless each rank reads data
        of its own (a dataset function, AutoShardPolicy.OFF).

        Called by: every rank.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> iterator = iter(strategy.experimental_distribute_dataset(ms.input.BatchedDataset(np.arange(6), 2)))
            >>> _ = next(iterator)
            >>> iterator.state_dict()
            {'epoch': 0, 'steps': 1, 'ranks': 1, 'source': 'IndexReader', 'batch_size': 2, 'length': 6}
        """
        return self._dataset._state_at(self.progress)

    def state_schema(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the form that `state` must have, for `checkpoint.schema`. Not collective.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> iterator = iter(strategy.experimental_distribute_dataset(ms.input.BatchedDataset(np.arange(6), 2)))
            >>> iterator.state_schema({})["ranks"]
            range(1, ...)
        """
        return self._dataset.state_schema(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: no example is repeated or skipped. Called by: every rank.

        Raises: ValueError if `DistributedDataset.load_state_dict` refuses `state`.

        Example:
            >>> iterator = iter(ms.OneDeviceStrategy("cpu").experimental_distribute_dataset([np.ones(2), np.ones(3)]))
            >>> state = iterator.state_dict()  # before the first step
            >>> steps = list(iterator)
            >>> iterator.load_state_dict(state)
            >>> next(iterator)  # the first step again
            array([1., 1.])
        """
        self._dataset.load_state_dict(state)
        self._begin(state["epoch"], state["steps"])
        self._dataset._has_begun(self)


def _agreed_depth(copies: DeviceCopies, dataset: DistributedDataset) -> int:
    """Return the number of steps that all ranks read ahead: 0 if no rank copies batches to a device.

    The ranks need the same depth, because reading has collectives. Called by: every rank.
    """
    needed = dataset._extended.communicator.all_gather_object(
        copies.needed, label="devices of the distributed dataset: every rank must call next()"
    )
    if True not in needed:
        return 0
    ahead = dataset._options.experimental_per_replica_buffer_size
    if dataset._reader.asks_late:
        ahead -= 1
    return ahead


def _spec_of_step(batch: Any, reader: Reader, extended: StrategyExtended) -> Any:
    """Return the element spec of a step. The batch dimension is None, unless all batches have the same known size.

    Args: batch: the batch of this rank's first replica.
    """
    n = extended.num_replicas_in_sync
    size: int | None = None
    if reader.drop_last and reader.batch_size is not None:
        global_size = reader.batch_size
        if isinstance(reader, FunctionReader):
            global_size *= n
        if extended.input.share.workers == 1 and global_size % n == 0:
            size = global_size // n

    def spec_of_leaf(leaf: ArraySpec) -> ArraySpec | PerReplicaSpec:
        spec = leaf.with_batch(size)
        if n == 1:
            return spec
        return PerReplicaSpec((spec,) * extended.num_local_replicas)

    return nest.map_structure(spec_of_leaf, spec_of(batch))
