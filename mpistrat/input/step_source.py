"""Where the iterations over a distributed dataset get their steps, and what they have learned of it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpistrat import nest
from mpistrat.input.agreed_steps import AgreedSteps
from mpistrat.input.batches import spec_of
from mpistrat.input.device_copies import DeviceCopies
from mpistrat.input.element_spec import PerReplicaSpec
from mpistrat.input.prefetch import Prefetcher
from mpistrat.input.readers import FunctionReader, Reader, knowing_what_follows
from mpistrat.options import InputOptions

if TYPE_CHECKING:
    from mpistrat.replicas.strategy_extended import StrategyExtended

# With fewer, a thread is woken for each step when the reading is the slower: 30 us instead of 10.
_STEPS_READ_AHEAD = 4


@dataclass
class IteratorProgress:
    """How far an iterator has come: what a state is made of.

    The source keeps it in place of the iterator. If each kept the other alive, an iteration that is left early would
    leave a DataLoader's workers to the garbage collector, which ends their queues before it waits for them: 5 s.
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


class StepSource:
    """What a distributed dataset and the iterators over it share.

    Attributes:
        partial: as of `DistributedDataset`.
        epoch, start: of the next iteration: its number, and the steps that it leaves out.
        spec: the structure of a step; None until a step was read.
        last, progress: the iterator that was begun last, and how far it has come.
        peeked: the next iterator, where its first step was read for its spec.
        after_steps: as of `DistributedDataset`.
        steps_ahead: as many are on the way to devices while those before them are computed; -1: not agreed yet.
        is_under_way: whether the program has, inside `Strategy.replica()`, a step that has not ended.
    """

    def __init__(
        self, reader: Reader, extended: StrategyExtended, options: InputOptions, partial: bool
    ) -> None:
        self.reader, self.extended, self.options = reader, extended, options
        self.partial = partial and not reader.drop_last
        self.epoch = self.start = 0
        self.spec: Any = None
        self.last: weakref.ref[Any] | None = None
        self.progress: IteratorProgress | None = None
        self.peeked: Any = None
        self.is_under_way = False
        self.after_steps: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.steps_ahead = -1

    def has_begun(self, iterator: Any, progress: IteratorProgress) -> None:
        """`iterator` is the one that was begun last; the epochs after its follow."""
        self.epoch, self.start = max(self.epoch, progress.epoch) + 1, 0
        self.last, self.progress, self.peeked = weakref.ref(iterator), progress, None

    def end_step(self) -> None:
        """The program has done with the step that it has got last, if any. Called by: every rank."""
        if self.is_under_way:
            self.is_under_way = False
            for method in self.after_steps:
                call = method()
                if call is not None:
                    call()

    def open(self, epoch: int, start: int) -> AgreedSteps:
        """The steps of an epoch, from number `start` on."""
        extended, reader = self.extended, self.reader
        steps: Iterator[Any] = reader.steps(epoch, start)
        if reader.reads_ahead:
            if extended.communicator.size > 1 and not reader.ends_together:
                steps = knowing_what_follows(steps)
            depth = self.options.experimental_per_replica_buffer_size
            steps = Prefetcher(steps, max(depth, _STEPS_READ_AHEAD))
        return AgreedSteps(
            reader, steps, extended.communicator, self.partial, start, extended.num_local_replicas
        )

    def agree_on_steps_ahead(self, copies: DeviceCopies) -> None:
        """As many on all ranks, for reading has collectives, even if only some ranks have devices. Collective."""
        needed = self.extended.communicator.all_gather_object(
            copies.needed,
            label="devices of the distributed dataset: every rank must call next()",
        )
        depth = self.options.experimental_per_replica_buffer_size
        self.steps_ahead = depth if any(needed) else 0

    def state_at(self, progress: IteratorProgress) -> dict[str, Any]:
        """The state of an iterator that has come so far. Called by: every rank."""
        if progress.unread is not None:
            return progress.unread
        if progress.ended:  # it goes on with the next epoch
            progress = IteratorProgress(progress.epoch + 1)
        communicator = self.extended.communicator
        return {
            "epoch": progress.epoch,
            "steps": progress.steps,
            "ranks": communicator.size,
            **self.reader.identity(),
            **self.reader.state(communicator, progress.position),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on where `state` was taken; those after it are the epochs that follow."""
        reader, size = self.reader, self.extended.communicator.size
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
        reader.load_state(self.extended.communicator, state)
        self.epoch, self.start = state["epoch"], state["steps"]
        self.last = self.progress = self.peeked = None

    def state_schema(self, state: dict[str, Any]) -> dict[str, Any]:
        """What a state looks like: see `checkpoint.schema`. That of another input is not looked at further."""
        count, here = range(sys.maxsize), self.reader.identity()
        return {
            "epoch": count,
            "steps": count,
            "ranks": range(1, sys.maxsize),
            "source": str,
            "batch_size": (count, None),
            **(self.reader.state_schema() if state.get("source") == here["source"] else {}),
        }

    def learn_spec(self, batch: Any) -> None:
        """From the first batch of a replica of this rank."""
        reader, extended = self.reader, self.extended
        n = extended.num_replicas_in_sync
        size: int | None = None
        if reader.drop_last and reader.batch_size is not None:
            global_size = reader.batch_size * (n if isinstance(reader, FunctionReader) else 1)
            if extended.input.share.workers == 1 and global_size % n == 0:
                size = global_size // n
        spec = nest.map_structure(lambda leaf: leaf.with_batch(size), spec_of(batch))
        if n > 1:
            k = extended.num_local_replicas
            spec = nest.map_structure(lambda leaf: PerReplicaSpec((leaf,) * k), spec)
        self.spec = spec
