"""The part of the input that a rank reads, and the devices that its batches go to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Numbers of examples of a step: of each replica of this rank, and last of all replicas together. int64 [replicas + 1].
# It is an array, because torch.compile takes an array for an input of the graph, and numbers for constants.
StepExamples = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """This rank's part of the input.

    Attributes:
        workers: number of workers that read. docs/glossary.md defines a worker.
        worker: number of this rank's worker.
        num_replicas: number of replicas of all workers.
        replicas: this rank's replicas, numbered within its worker.
        first: the number of this worker's first replica among all replicas: replica i takes piece i of each global
            batch. None: the pieces are dealt out to the workers in turn, as in TensorFlow. With one replica per worker
            both are the same.
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
        if self.first is not None:
            return [self.first + replica for replica in self.replicas]
        return [self.worker + replica * self.workers for replica in self.replicas]

    def sizes(self, global_batch_size: int) -> list[int]:
        """Return the sizes of the worker's pieces, in examples, in turn.

        Each piece has floor(batch / n) examples, and the first batch mod n pieces have one more. Worker w begins at its
        own replicas, so that over n pieces all workers read equally much.

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
        pipelines: the number of input pipelines, and the number of this rank's pipeline.
        devices: the device of each local replica's batches; () leaves batches where they are.
        partial_steps: whether a dataset makes a step as long as any replica has data.
        per_replica: whether an input function may be called once for each replica.
    """

    share: Share
    pipelines: tuple[int, int]
    devices: tuple[str, ...]
    partial_steps: bool = True
    per_replica: bool = False
