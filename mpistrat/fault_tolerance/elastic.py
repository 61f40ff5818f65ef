"""Training that goes on when a rank is lost: `run_elastic`.

As in Horovod's `elastic.run` and in torchelastic, the training function is called again, by those that are left. What
it then restores comes from memory: each rank keeps copies of the state after the last two steps that it has committed.
The ranks agree on the step to go back to by ULFM (https://fault-tolerance.org): revoke, agree, shrink.
"""

from __future__ import annotations

import gc
import pickle
import statistics
import time
import traceback
from collections import ChainMap, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from mpistrat.checkpoint import Checkpoint
from mpistrat.checkpoint.shards import check_whole
from mpistrat.cluster_resolver import MPIClusterResolver
from mpistrat.cluster_resolver.launcher import why_not_fault_tolerant
from mpistrat.context import leaving_what_is_entered
from mpistrat.errors import TooFewReplicasError
from mpistrat.fault_tolerance.committed_states import CommittedStates
from mpistrat.liveness.ending.program_exit import remember_raised
from mpistrat.machine.notices import tell
from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpistrat.torch_distributed.default_group import leave_default_group, move_default_group
from mpistrat.torch_distributed.next_group import has_default_group

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpistrat.fault_tolerance.survivors import Survivors

T = TypeVar("T")


def run_elastic(
    train: Callable[[Elastic], T],
    *,
    min_replicas: int = 1,
    steps_per_copy: int = 1,
    comm: MPI.Intracomm | None = None,
) -> T:
    """`train(elastic)`, called again by the ranks that are left whenever some are lost; returns what it returns.

    A default group of torch.distributed is destroyed then. One of the backend "mpistrat" that was there before the
    call is made anew over the ranks that are left; a strategy with `torch_distributed=True` makes its own.

    That takes Open MPI 5 under `mpirun --with-ft ulfm`. Elsewhere a line on stderr says why not, and a lost rank ends
    the job, as it does before and after the call.

    Called by: every rank of the job (or of `comm`).
    Args:
        train: builds the strategy and the model, restores, and trains; see `Elastic`.
        min_replicas: with fewer, training does not go on. With `deterministic=True` there are always as many as before.
        steps_per_copy: of how many commits one keeps a copy; up to as many steps are repeated after a loss.
        comm: the mpi4py communicator of the ranks that take part; None is all.
    Raises:
        TooFewReplicasError: on all ranks that are left, with fewer than `min_replicas` replicas.
    """
    for name, value in {"min_replicas": min_replicas, "steps_per_copy": steps_per_copy}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r:.60}")
    over = MPIClusterResolver(comm).comm
    survivors = None if over is None or over.Get_size() == 1 else _survivors_of(over)
    elastic = Elastic(over, survivors, min_replicas, steps_per_copy)
    return train(elastic) if survivors is None else _go_on_with(train, elastic, survivors)


def _survivors_of(comm: MPI.Intracomm) -> Survivors | None:
    """None, and a line on stderr, where a lost rank ends the job."""
    from mpi4py import MPI

    why_not = why_not_fault_tolerant(MPI.Get_library_version())
    if not why_not and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        why_not = "MPI was started without MPI_THREAD_MULTIPLE, mpi4py's default"
    if why_not:
        if comm.Get_rank() == 0:
            tell(f"a rank that is lost ends this job: {why_not}. Save checkpoints to go on from")
        return None
    from mpistrat.fault_tolerance.survivors import Survivors

    return Survivors(comm)


def _go_on_with(train: Callable[[Elastic], T], elastic: Elastic, survivors: Survivors) -> T:
    results: list[T] = []
    has_group = has_default_group("mpistrat")  # that training goes on with
    try:
        while True:
            results.clear()
            try:
                survivors.meet()
                move_default_group(survivors.comm, again=has_group)
                with leaving_what_is_entered():
                    result = train(elastic)
                survivors.communicator.barrier(label="end of run_elastic")
                results.append(result)
            except Exception as error:
                if not survivors.has_lost(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold the model and its memory
            except SystemExit as error:
                remember_raised(error)  # for an end without MPI_Finalize
                raise
            noticed = time.monotonic()
            with survivors.reported_as("going on without the ranks that were lost"):
                if survivors.all_done(bool(results)):
                    return results[0]
                elastic._recover(survivors, noticed)
    finally:
        survivors.end()


class Elastic:
    """What a training function goes on with; `run_elastic` makes it.

    Attributes:
        comm: the mpi4py communicator of the ranks that are left, for the strategy; None is one rank without MPI.
        step: how many steps are committed.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None,
        survivors: Survivors | None,
        min_replicas: int,
        steps_per_copy: int,
    ) -> None:
        self.comm = comm if survivors is None else survivors.comm
        self.step = 0
        self._survivors = survivors
        self._min_replicas, self._steps_per_copy = min_replicas, steps_per_copy
        self._checkpoint: Checkpoint | None = None
        # Of a deterministic strategy: how many there are to be, whatever is lost.
        self._replicas: int | None = None
        self._states = CommittedStates()
        self._restored: Any = None  # what the next restore() loads
        self._seconds: deque[float] = deque(maxlen=1000)  # of the last commits of a state
        self._num_kept = 0
        self._loss: tuple[list[int], int, float] | None = None  # who, of how many, when noticed

    def strategy(self, **arguments: Any) -> MultiWorkerMirroredStrategy:
        """A `MultiWorkerMirroredStrategy` with these arguments, over the ranks that are left.

        With `deterministic=True` they take over the replicas of those that are lost, as further replicas on the CPU:
        training has the same bits as if none were. Otherwise there are fewer replicas, and each has more of a batch.

        Called by: every rank.
        Raises: TooFewReplicasError on all ranks.
        """
        if self._replicas is not None and arguments.get("deterministic"):
            rank, size = (self.comm.rank, self.comm.size) if self.comm else (0, 1)
            replicas = replicas_of(self._replicas, size)[rank]
            arguments["devices"] = [f"cpu:{i}" for i in range(replicas)]
        strategy = MultiWorkerMirroredStrategy(comm=self.comm, **arguments)
        replicas = strategy.num_replicas_in_sync
        if strategy.extended.deterministic and self._replicas is None:
            self._replicas = replicas
        if replicas < self._min_replicas:
            raise TooFewReplicasError(
                f"{replicas} replicas are left, and min_replicas={self._min_replicas} are wanted; start the job again, "
                "from its last checkpoint"
            )
        return strategy

    def restore(self, checkpoint: Checkpoint) -> int:
        """Put the objects of `checkpoint` into their state after the last committed step; the first time, leave them.

        Called by: every rank, before its first step.
        Args: checkpoint: of all that changes while it trains.
        Returns: `step`.
        """
        self._checkpoint = checkpoint
        if self._survivors is None:
            return self.step
        if self._restored is None:
            self._keep(checkpoint, self._survivors)  # a rank may be lost in the first step
        else:
            ranks = self._restored["ranks"]
            known = self._survivors.communicator.all_gather_object(ranks, label="restore")
            ranks = ChainMap(ranks, *known)
            states = {rank: pickle.loads(state) for rank, state in ranks.items()}
            checkpoint.load_state_dict({**self._restored, "ranks": states})
            self._restored = None
        self._tell()
        return self.step

    def commit(self) -> None:
        """The step is done: should a rank be lost, training goes on from here.

        Called by: every rank, after each step. It waits until all have come, and copies the state.
        """
        if self._survivors is None:
            self.step += 1
            return
        self._survivors.communicator.barrier(label=f"commit of step {self.step + 1}")
        self.step += 1
        if self._checkpoint is not None and self.step % self._steps_per_copy == 0:
            self._keep(self._checkpoint, self._survivors)

    def explain(self) -> str:
        """What commits cost. Not collective."""
        if not self._seconds:
            return "no state was committed"
        median = statistics.median(self._seconds)
        return (
            f"{self._num_kept} states were committed; this rank copies {self._states.nbytes / 1e6:.3g} MB in "
            f"{median * 1e3:.3g} ms"
        )

    def _keep(self, checkpoint: Checkpoint, survivors: Survivors) -> None:
        started = time.perf_counter()
        state = checkpoint.state_dict()
        if not self._num_kept:
            check_whole(state["common"], "run_elastic")
        ranks = {rank: pickle.dumps(part) for rank, part in state["ranks"].items()}
        survivors.exchange(ranks)
        self._states.keep(self.step, {**state, "ranks": ranks})
        self._seconds.append(time.perf_counter() - started)
        self._num_kept += 1

    def _recover(self, survivors: Survivors, noticed: float) -> None:
        """Called by: every rank that is left."""
        from mpistrat.liveness.ending.job_end import job_end

        job_end().end_without_finalize()
        size = survivors.comm.size
        lost, step = survivors.go_on(self._states.last)
        if self._loss is not None:  # lost while they went on
            lost, (_, size, noticed) = self._loss[0] + lost, self._loss
        self._loss = lost, size, noticed
        self.comm = survivors.comm
        leave_default_group()
        self._checkpoint = None
        gc.collect()  # the model, the strategy and their memory
        self._restored = self._states.back_to(step)
        self.step = step or 0

    def _tell(self) -> None:
        if self._loss is not None and self.comm is not None and self.comm.rank == 0:
            lost, size, noticed = self._loss
            ranks = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, sorted(lost)))}"
            left = self.comm.size
            tell(
                f"{left} of {size} ranks go on after step {self.step} without {ranks}, "
                f"{time.monotonic() - noticed:.2f} s after the loss was noticed"
            )
        self._loss = None


def replicas_of(total: int, ranks: int) -> list[int]:
    """How many of `total` replicas each rank has: as equally as they can be spread, the first ones have more."""
    each, more = divmod(total, ranks)
    return [each + (rank < more) for rank in range(ranks)]
