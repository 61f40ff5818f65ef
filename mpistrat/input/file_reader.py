"""Reads a FileDataset. Under AutoShardPolicy.FILE each worker reads files of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from mpistrat.communicators import Communicator
from mpistrat.errors import InvalidArgumentError
from mpistrat.input import splitting
from mpistrat.input.datasets import FileDataset
from mpistrat.input.dropped_examples import DroppedExamples
from mpistrat.input.readers import Reader, State
from mpistrat.input.splitting import Lists, ReplicaPieces, without_first
from mpistrat.options import AutoShardPolicy
from mpistrat.replicas.input_plan import Share


@dataclass(frozen=True)
class _Restart:
    """How far an epoch's files had been read before a restart.

    Attributes:
        finished: numbers of the files that were read whole.
        partly: a dict from the number of each file that was read in part to the number of examples read.
        left: a dict from the number of each worker to the numbers of the files that it had not read whole.
    """

    finished: frozenset[int] = frozenset()
    partly: dict[int, int] = field(default_factory=dict)
    left: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class _FilePosition:
    """How far a worker (a rank that reads for itself, or all ranks together) has read its files of an epoch.

    Attributes:
        restart: how far runs before the last restart had read.
        files: numbers of the worker's files in this epoch, in reading order; None if the worker has read nothing since
            the beginning of the epoch, or since a restart.
        finished: how many of `files` the worker has read whole.
        count: number of examples that it has read of the next file.
    """

    restart: _Restart
    files: list[int] | None
    finished: int = 0
    count: int = 0

    def progress(self) -> tuple[list[int], dict[int, int], list[int]] | None:
        """Return (files read whole, examples read of the next file, files not read whole), with files as numbers.

        The second is a dict from at most one file's number to its number of examples; {} if none of it was read.
        Returns: None if the worker has read nothing.
        """
        if self.files is None:
            return None
        left = self.files[self.finished :]
        partly = {left[0]: self.count} if self.count else {}
        return self.files[: self.finished], partly, left


class FileReader(Reader):
    """Reads a FileDataset for one rank.

    Under FILE and AUTO, worker w reads the files w, w + workers, … of the epoch's order. Under DATA every worker reads
    all files, and keeps its replicas' pieces of each global batch. Under OFF every worker uses all examples.

    Raises: InvalidArgumentError if each worker reads files of its own, and there are fewer files than workers.
    """

    reads_ahead = True

    def __init__(self, dataset: FileDataset, share: Share, policy: AutoShardPolicy) -> None:
        self._dataset = dataset
        self._share = share
        self.batch_size = dataset.batch_size
        self.drop_last = dataset.drop_last
        self._splits_each = policy is AutoShardPolicy.DATA
        self._by_file = policy in (AutoShardPolicy.AUTO, AutoShardPolicy.FILE)
        if self._by_file:
            sys.audit("mpistrat.files")  # `mpistrat verify` hears it
        self.ends_together = self.compares_ends = self._splits_each or share.workers == 1
        if dataset.program_collate and self._splits_each:
            self.dropped = DroppedExamples(dataset.program_collate)
        self.same_for_any_ranks = policy is not AutoShardPolicy.OFF or share.workers == 1
        if self._by_file and len(dataset.files) < share.workers:
            raise InvalidArgumentError(
                f"AutoShardPolicy.{policy.name} gives each of the {share.workers} workers files of its own, but there "
                f"are {len(dataset.files)} files. Split the files further, use fewer ranks, or let every rank read all "
                "files: InputOptions(experimental_auto_shard_policy=AutoShardPolicy.DATA)"
            )
        self._first_example: Any = None
        self._restart = _Restart()

    def steps(self, epoch: int, start: int) -> Iterator[ReplicaPieces]:
        share = self._share
        dataset = self._dataset
        if start == 0:
            self._restart = _Restart()
        restart = self._restart
        files = [number for number in dataset.order(epoch) if number not in restart.finished]
        if self._by_file:
            files = files[share.worker :: share.workers]
        if len(restart.left) == share.workers:  # each worker goes on with its own files
            files = restart.left[share.worker]
        place = _FilePosition(restart, files)
        examples = self._examples(place, files)
        drop_last = dataset.drop_last
        if self._splits_each:
            batches = splitting.pieces_of_examples(
                examples, [dataset.batch_size], drop_last=drop_last
            )
            steps = splitting.pieces_of_each(batches, Lists(), share.pieces, share.num_replicas)
        else:
            sizes = share.sizes(dataset.batch_size)
            if self._by_file:
                begun = start * share.replicas_per_worker % len(sizes)
                sizes = sizes[begun:] + sizes[:begun]
                start = 0  # `restart` skips the steps that were made
            pieces = splitting.pieces_of_examples(examples, sizes, drop_last=drop_last)
            steps = splitting.steps_of_stream(pieces, share, drop_last=drop_last)
        collate = self.dropped or dataset.collate
        for step in without_first(steps, start):
            yield step.replace_pieces(collate, replace(place))

    def _examples(self, place: _FilePosition, files: list[int]) -> Iterator[Any]:
        """Yield the examples in the worker's `files` that were not read before the restart. Updates `place`."""
        for i, number in enumerate(files):
            examples = self._dataset.reader(self._dataset.files[number])
            place.finished = i
            place.count = place.restart.partly.get(number, 0)
            for example in without_first(examples, place.count):
                if self._first_example is None:
                    self._first_example = example
                place.count += 1
                yield example
            place.finished = i + 1
            place.count = 0

    def state(self, communicator: Communicator, position: Any) -> State:
        """Return how far the ranks have read each file, so that any number of ranks can go on. Called by: every rank.

        Returns: a dict, equal on all ranks: "finished": numbers of files read whole; "partly": examples read, by number
            of file; "left": numbers of files not read whole, by worker. {} under DATA and OFF.
        """
        if not self._by_file:
            return {}
        progress = position.progress()
        restart = position.restart
        by_rank = communicator.all_gather_object((self._share.worker, progress), label="files read")
        finished = set(restart.finished)
        partly = dict(restart.partly)
        left = dict(restart.left)
        by_worker = {worker: read for worker, read in by_rank if read is not None}
        if by_worker:
            left = {worker: [] for worker in range(self._share.workers)}
        for worker, (done, part, rest) in by_worker.items():
            finished.update(done)
            partly.update(part)
            left[worker] = rest
        partly = {number: count for number, count in partly.items() if number not in finished}
        return {"finished": sorted(finished), "partly": partly, "left": left}

    def length(self) -> int:
        return len(self._dataset.files)

    def position(self) -> _FilePosition:
        return _FilePosition(self._restart, files=None)

    def load_state(self, communicator: Communicator, state: State) -> None:
        if self._by_file:
            self._restart = _Restart(
                finished=frozenset(state["finished"]),
                partly=dict(state["partly"]),
                left=dict(state["left"]),
            )

    def state_schema(self) -> dict[str, Any]:
        if not self._by_file:
            return {}
        file = range(len(self._dataset.files))
        examples = range(sys.maxsize)
        return {"finished": [file], "partly": {int: examples}, "left": {int: [file]}}

    def template(self) -> Any:
        if self._first_example is None:
            return None
        return self._dataset.collate([self._first_example])
