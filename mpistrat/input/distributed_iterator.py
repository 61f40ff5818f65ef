"""One epoch of a distributed dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import arrays, nest
from mpistrat.context import require_iteration
from mpistrat.errors import OutOfRangeError
from mpistrat.input.batches import spec_of, without_examples
from mpistrat.input.prefetch import Prefetcher
from mpistrat.input.readers import EMPTY, MISSING, FileReader, Step
from mpistrat.values import regroup

if TYPE_CHECKING:
    from mpistrat.input.distributed_dataset import DistributedDataset

# What ranks tell each other, who go by the largest. With `partial`: how many steps this one surely has, from this on;
# otherwise: 0 for a step, 1 for none.
_ERROR = 1 << 30


class Optional:
    """A step, or none. As `tf.experimental.Optional`."""

    def __init__(self, value: Any, has_value: bool) -> None:
        self._value, self._has_value = value, has_value

    def has_value(self) -> bool:
        return self._has_value

    def get_value(self) -> Any:
        """Raises: ValueError when there is none."""
        if not self._has_value:
            raise ValueError("the distributed dataset has ended: there is no value")
        return self._value


class DistributedIterator(Iterator[Any]):
    """The steps of one epoch; made by `iter(distributed_dataset)`. Every rank must go through it."""

    def __init__(self, dataset: DistributedDataset, epoch: int, start: int) -> None:
        self._dataset = dataset
        self._extended = dataset._extended
        self._reader = dataset._reader
        fetches = dataset._options.experimental_fetch_to_device is not False
        devices = self._extended.worker_devices
        self._moves = fetches and not all(device.startswith("cpu") for device in devices)
        self._begin(epoch, start)

    def _begin(self, epoch: int, start: int) -> None:
        self._epoch, self._steps_done = epoch, start
        self._source: Iterator[Step] | None = None
        self._position: Any = None
        self._template: Any = None
        self._structure: str | None = None
        self._steps_left: int | None = None  # None: not known
        self._sure = 0  # steps that some rank has
        self._has_asked = False
        self._ended = False
        self._held: list[tuple[Any, Any]] = []

    def initialize(self) -> None:
        """Begin again, with a new epoch. (tf.compat.v1)"""
        self._dataset._epoch = max(self._dataset._epoch, self._epoch + 1)
        self._begin(self._epoch + 1 if self._steps_done else self._epoch, 0)

    def __next__(self) -> Any:
        """The next step, for all replicas of this rank. Raises: StopIteration after the last one.

        ValueError inside `run`; RuntimeError in another strategy's scope.
        """
        require_iteration(self._extended.strategy)
        if self._held:
            value, self._position = self._held.pop()
            self._steps_done += 1
            return value
        step = None if self._ended else self._next_step()
        if step is None:
            self._ended = True
            raise StopIteration
        self._steps_done += 1
        with self._extended.communicator.raising_together():
            batches = [self._filled(entry) for entry in step]
            for batch in batches:
                self._check_structure(batch)
        if self._dataset._spec is None:
            self._dataset._learn_spec(batches[0])
        if self._moves:
            devices = self._extended.worker_devices
            batches = [_on(device, batch) for batch, device in zip(batches, devices, strict=True)]
        return batches[0] if len(batches) == 1 else regroup(batches)

    def peek(self) -> None:
        """Read the first step, for what it tells of all, and keep it for `next`."""
        with contextlib.suppress(StopIteration):
            value = next(self)
            self._held = [(value, self._position)]
            self._steps_done -= 1
            self._position = None

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
        return self._dataset.element_spec

    def state_dict(self) -> dict[str, Any]:
        """Epoch, steps that were handed out, and what the reader needs to go on after them. Called by: every rank.

        The same on all ranks, and picklable. It can be loaded by another number of ranks, unless each rank reads what
        it likes (a dataset function, AutoShardPolicy.OFF).
        """
        communicator = self._extended.communicator
        if self._ended:  # it goes on with the next epoch
            return DistributedIterator(self._dataset, self._epoch + 1, 0).state_dict()
        return {
            "epoch": self._epoch,
            "steps": self._steps_done,
            "ranks": communicator.size,
            **self._reader.identity(),
            **self._reader.state(communicator, self._position),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: no example is repeated, none is skipped. Called by: every rank."""
        self._dataset.load_state_dict(state)
        self._dataset._epoch, self._dataset._start = state["epoch"] + 1, 0
        self._dataset._last = self
        self._begin(state["epoch"], state["steps"])

    # Reading

    def _next_step(self) -> Step | None:
        if not self._reader.ends_together:
            return self._agreed_step()
        with self._extended.communicator.raising_together():
            return self._read()

    def _read(self) -> Step | None:
        if self._source is None:
            self._source = self._open()
        step = next(self._source, None)
        if step is None:
            return None
        if any(entry is MISSING for entry in step) and not (
            self._dataset.partial and _is_batched(step)
        ):
            return None
        self._position = getattr(step, "position", None)
        return step

    def _open(self) -> Iterator[Step]:
        reader = self._reader
        steps = reader.steps(self._epoch, self._steps_done)
        if isinstance(reader, FileReader):
            return Prefetcher(steps, self._dataset._options.experimental_per_replica_buffer_size)
        return steps

    def _agreed_step(self) -> Step | None:
        """Ranks may have different numbers of steps: they go on as long as any of them has data (`partial`), or all.

        They ask each other at the first step, and then when no rank is known to have another, unless all know how many
        theirs are.
        """
        communicator = self._extended.communicator
        step, error = None, None
        try:
            step = self._read()
        except Exception as failed:
            error = failed
        if communicator.size == 1:
            if error is not None:
                raise error
            return step
        if error is not None and (self._steps_left is not None or self._sure):
            communicator.raise_together(error)
        if self._steps_left is not None:
            go_on = self._steps_left > 0
            self._steps_left -= 1
        elif self._sure:
            go_on = True
            self._sure -= 1
        else:
            go_on = self._ask(step, error)
        if not go_on:
            return None
        return [MISSING] * self._extended.num_local_replicas if step is None else step

    def _ask(self, step: Step | None, error: Exception | None) -> bool:
        communicator, partial = self._extended.communicator, self._dataset.partial
        if error is not None:
            mine = _ERROR
        elif partial:
            mine = 0 if step is None else 1 + self._ready()
        else:
            mine = int(step is None)
        if self._has_asked:
            verdict = np.array(mine, np.int32)
            communicator.all_reduce(verdict, "max", label="end of the distributed dataset")
            worst = int(verdict)
        else:
            self._has_asked = True
            batch = None if step is None else next(filter(_has_examples, step), None)
            spec = None if batch is None else spec_of(batch)
            told = communicator.all_gather_object(
                (mine, self._reader.num_steps(), spec),
                label="first step of the distributed dataset",
            )
            worst = max(code for code, _, _ in told)
            counts = [count for _, count, _ in told if count is not None]
            if worst != _ERROR:
                self._learn_from_others([spec for _, _, spec in told])
                if partial and len(counts) == communicator.size:
                    self._steps_left = max(counts) - self._steps_done - 1
        if worst == _ERROR:
            communicator.raise_any(error, "could not read its part of the dataset")
        if not partial:
            return worst == 0
        self._sure = max(0, worst - 1)
        return worst > 0

    def _ready(self) -> int:
        return self._source.ready() if isinstance(self._source, Prefetcher) else 0

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
            self._template = nest.map_structure(lambda spec: spec.empty(), known[0])

    def _filled(self, entry: Any) -> Any:
        """The batch of a step's entry; one of no examples where it has none."""
        if _has_examples(entry):
            self._template = entry
            return entry
        if self._template is None:
            self._template = self._reader.template()
        if self._template is None:
            raise ValueError("the dataset has no example that could tell what a batch looks like")
        return without_examples(self._template)

    def _check_structure(self, batch: Any) -> None:
        """Raises: ValueError when the dataset changes its structure."""
        structure = nest.describe(batch)
        if self._structure is None:
            self._structure = structure
        elif structure != self._structure:
            raise ValueError(
                f"the dataset changes its structure: step {self._steps_done} is {structure}, those before it were "
                f"{self._structure}"
            )


def _on(device: str, batch: Any) -> Any:
    return nest.map_structure(
        lambda leaf: arrays.to_device(leaf, device) if arrays.is_array(leaf) else leaf, batch
    )


def _has_examples(entry: Any) -> bool:
    return entry is not MISSING and entry is not EMPTY


def _is_batched(step: Step) -> bool:
    """Whether its elements are batches, which can be of no examples, and not numbers, which cannot."""
    entry = next(filter(_has_examples, step), None)
    return entry is None or not all(map(_is_number, nest.leaves(entry)))


def _is_number(leaf: Any) -> bool:
    return arrays.is_number(leaf) or (arrays.is_array(leaf) and leaf.ndim == 0)


def _without_sizes(spec: Any) -> Any:
    """Batches of different sizes are alike; so are examples that vary in size."""
    return replace(spec, shape=(None,) * len(spec.shape))
