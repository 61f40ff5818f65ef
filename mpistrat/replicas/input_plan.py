"""Which part of the input a rank reads, and where its batches go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# How many examples of a step each replica of this rank has, and last how many all replicas have: int64 [replicas + 1].
# An array is an input of what torch.compile compiles; numbers would be constants.
StepExamples = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """This rank's part of the input.

    Attributes:
        workers, worker: how many workers read, and the number of this rank's worker. docs/glossary.md defines them.
        num_replicas: over all workers.
        replicas: this rank's replicas, numbered within its worker.
        first: the number in the job of this worker's first replica: replica i takes piece i of each global batch. With
            None the pieces are dealt out to the workers in turn, as TensorFlow does; with one replica per worker that
            is the same.
    """

    workers: int
    worker: int
    num_replicas: int
    replicas: range
    first: int | None = None

    @property
    def replicas_per_worker(self) -> int:
        """Raises: ValueError when some workers have more than others."""
        each, rest = divmod(self.num_replicas, self.workers)
        if rest or self.replicas.stop > each or self.first not in (None, self.worker * each):
            raise ValueError(
                f"{self.num_replicas} replicas are spread unequally over {self.workers} ranks: then each of these "
                "reads its part of every batch (AutoShardPolicy.DATA), not files or batches of its own"
            )
        return each

    @property
    def pieces(self) -> list[int]:
        """The numbers of the pieces of a global batch that this rank's replicas take, in their order."""
        if self.first is not None:
            return [self.first + replica for replica in self.replicas]
        return [self.worker + replica * self.workers for replica in self.replicas]

    def sizes(self, global_batch_size: int) -> list[int]:
        """The sizes of the worker's pieces, in turn: each is floor(batch / n), the first batch mod n are one larger.

        Worker w begins at its own replicas, so that over n pieces all workers read as much.
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
        pipelines: how many input pipelines there are, and which of them is this rank's.
        devices: where batches are brought, by local replica; () leaves them where they are.
        partial_steps: whether a dataset makes a step as long as any replica has data.
        per_replica: whether an input function may be called once for each replica.
    """

    share: Share
    pipelines: tuple[int, int]
    devices: tuple[str, ...]
    partial_steps: bool = True
    per_replica: bool = False
