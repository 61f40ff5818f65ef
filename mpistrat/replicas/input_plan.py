"""The part of the input that a rank reads, and the devices that its batches go to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Numbers of examples of a step: one for each replica of this rank, and, last, the sum over all replicas of all ranks.
# int64 [replicas + 1]: an array, because for torch.compile an array is an input of a graph, and a number a constant.
StepExamples = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """This rank's part of the input.

    A worker is a reader of the input: a rank that reads for itself, or all ranks together. A piece is the part of a
    global batch that one replica takes.

    Attributes:
        workers: number of workers.
        worker: number of this rank's worker.
        num_replicas: number of replicas of all workers.
        replicas: numbers of this rank's replicas among the replicas of its worker; from 0 if each rank is a worker.
        first: None: worker w takes the pieces w, w + workers, …, as in TensorFlow. A number: replica i takes piece i of
            each global batch, and `first` is the number of this worker's first replica among all replicas. With one
            replica per worker, both give the same pieces.
    """

    workers: int
    worker: int
    num_replicas: int
    replicas: range
    first: int | None = None

    @property
    def replicas_per_worker(self) -> int:
        """The number of replicas of each worker. Raises: ValueError if workers have different numbers of replicas."""
        each, rest = divmod(self.num_replicas, self.workers)
        if rest or self.replicas.stop > each or self.first not in (None, self.worker * each):
            raise ValueError(
                f"{self.num_replicas} replicas are spread unequally over {self.workers} ranks, so a rank cannot read "
                "files or batches of its own. Let each rank read its part of every batch (AutoShardPolicy.DATA)"
            )
        return each

    @property
    def pieces(self) -> list[int]:
        """The numbers of the pieces of a global batch that this rank's replicas take, in replica order."""
        first = self.first
        step = 1
        if first is None:
            first = self.worker
            step = self.workers
        return [first + replica * step for replica in self.replicas]

    def sizes(self, global_batch_size: int) -> list[int]:
        """Return the numbers of examples of the next n pieces that this rank's worker reads; n is `num_replicas`.

        Of n pieces, the first batch mod n have floor(batch / n) + 1 examples, and the others floor(batch / n). Piece i
        belongs to replica i. The result begins with the piece of this worker's first replica; the pieces of the
        following replicas come next, and replica 0 follows the last replica. So all workers have read equally much
        after n pieces.

        Raises: ValueError if workers have different numbers of replicas.
        """
        floor, larger = divmod(global_batch_size, self.num_replicas)
        sizes = [floor + (i < larger) for i in range(self.num_replicas)]
        first = self.worker * self.replicas_per_worker
        return sizes[first:] + sizes[:first]


@dataclass(frozen=True)
class InputPlan:
    """How a strategy's datasets are read on this rank.

    Attributes:
        share: this rank's part of each global batch.
        pipelines: how many input pipelines there are, and the number of this rank's pipeline, from 0.
        devices: the device of each local replica's batches; () leaves batches where they are.
        partial_steps: whether an epoch goes on as long as any replica has data; replicas without data get batches of no
            examples.
        per_replica: whether a dataset function may be called once for each replica (InputReplicationMode.PER_REPLICA).
    """

    share: Share
    pipelines: tuple[int, int]
    devices: tuple[str, ...]
    partial_steps: bool = True
    per_replica: bool = False
