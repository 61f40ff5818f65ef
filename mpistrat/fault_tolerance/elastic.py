"""Training that goes on when a rank is lost: `run_elastic`.

As in Horovod's `elastic.run` and in torchelastic, the ranks that are left call the training function again. They
restore the state from memory: each rank keeps copies of the state after the last two steps that it has committed. They
make a smaller communicator with ULFM (https://fault-tolerance.org), MPI's revoke, shrink and agree, and choose the
step to go back to.
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
from mpistrat.errors import TooFewReplicasError, listed
from mpistrat.fault_tolerance.committed_states import CommittedStates
from mpistrat.liveness.ending.program_exit import remember_raised
from mpistrat.machine.notices import tell
from mpistrat.options import is_integer
from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpistrat.torch_distributed.default_group import leave_default_group, move_default_group
from mpistrat.torch_distributed.next_group import asked_name

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
    """Call `train(elastic)`, and call it again on the ranks that are left whenever ranks are lost.

    When a rank is lost, torch.distributed's default group is destroyed. If that group had the backend "mpistrat" before
    the call of `run_elastic`, a new one is made over the ranks that are left. A strategy with `torch_distributed=True`
    makes the default group itself.

    Going on needs Open MPI 5 under `mpirun --with-ft ulfm`. Elsewhere rank 0 prints on stderr why a lost rank ends the
    job. Before and after the call of `run_elastic` a lost rank always ends the job.

    Called by: every rank of the job (or of `comm`).
    Args:
        train: a function that builds the strategy and the model, restores the state, and trains; see `Elastic`.
        min_replicas: smallest number of replicas with which training goes on. A `deterministic=True` strategy always
            keeps its number of replicas.
        steps_per_copy: number of commits from one copy of the state to the next. After a loss, up to `steps_per_copy`
            steps are repeated.
        comm: the mpi4py communicator of the ranks that take part; None is all ranks of the job.
    Returns: the value that `train` returns.
    Raises:
        TooFewReplicasError: on all ranks that are left, with fewer than `min_replicas` replicas.
        ValueError: `min_replicas` or `steps_per_copy` is no int from 1 on.

    Example:
        >>> def train(elastic):
        ...     with elastic.strategy(devices=["cpu"]).scope():
        ...         return "trained"
        >>> ms.fault_tolerance.run_elastic(train, min_replicas=1)
        'trained'
    """
    for name, value in {"min_replicas": min_replicas, "steps_per_copy": steps_per_copy}.items():
        if not is_integer(value) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r:.60}")
    over = MPIClusterResolver(comm).comm
    survivors = None
    if over is not None and over.Get_size() > 1:
        survivors = _survivors_of(over)
    elastic = Elastic(over, survivors, min_replicas, steps_per_copy)
    if survivors is None:
        return train(elastic)
    return _go_on_with(train, elastic, survivors)


def _survivors_of(comm: MPI.Intracomm) -> Survivors | None:
    """Return the `Survivors` (the ranks of `comm` that are left). Called by: every rank of `comm`.

    Returns: None if a lost rank ends the job with this MPI or launcher. Rank 0 then prints the reason on stderr.
    """
    from mpi4py import MPI

    why_not = why_not_fault_tolerant(MPI.Get_library_version())
    if not why_not and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        why_not = "MPI was started without MPI_THREAD_MULTIPLE, mpi4py's default"
    if why_not:
        if comm.Get_rank() == 0:
            tell(f"a rank that is lost ends this job: {why_not}. Save checkpoints to restore from")
        return None
    from mpistrat.fault_tolerance.survivors import Survivors

    return Survivors(comm)


def _go_on_with(train: Callable[[Elastic], T], elastic: Elastic, survivors: Survivors) -> T:
    results: list[T] = []
    backend = asked_name()  # of the group that is made anew after a loss
    try:
        while True:
            results.clear()
            try:
                survivors.meet()
                elastic.comm = survivors.comm
                move_default_group(survivors.comm, again=backend)
                with leaving_what_is_entered():
                    result = train(elastic)
                survivors.communicator.barrier(label="end of run_elastic")
                results.append(result)
            except Exception as error:
                if not survivors.has_lost(error):
                    raise
                # The traceback's frames hold the model and its memory.
                traceback.clear_frames(error.__traceback__)
            except SystemExit as error:
                remember_raised(error)  # the exit code, for an end without MPI_Finalize
                raise
            noticed = time.monotonic()
            with survivors.reported_as("going on without the ranks that were lost"):
                if survivors.all_done(bool(results)):
                    return results[0]
                elastic._recover(survivors, noticed)
    finally:
        survivors.end()


class Elastic:
    """The argument of a training function of `run_elastic`: it makes the strategy, commits steps and restores them.

    Made by: `run_elastic`.
    Attributes:
        comm: the mpi4py communicator of the ranks that are left; None if the job is one rank without MPI.
        step: number of committed steps.

    Example:
        >>> def train(elastic):
        ...     model = elastic.strategy(devices=["cpu"]).prepare(torch.nn.Linear(2, 1))
        ...     step = elastic.restore(ms.checkpoint.Checkpoint(model=model))  # 0 the first time
        ...     elastic.commit()  # after each step
        >>> ms.fault_tolerance.run_elastic(train, steps_per_copy=10)

    Example:
        >>> ms.fault_tolerance.run_elastic(lambda elastic: elastic.explain())  # one rank keeps no copies
        'no state was committed'
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None,
        survivors: Survivors | None,
        min_replicas: int,
        steps_per_copy: int,
    ) -> None:
        self.comm = comm
        self.step = 0
        self._survivors = survivors
        self._min_replicas = min_replicas
        self._steps_per_copy = steps_per_copy
        self._checkpoint: Checkpoint | None = None
        # The number of replicas that a deterministic strategy keeps, however many ranks are lost.
        self._replicas: int | None = None
        self._states = CommittedStates()
        self._restored: Any = None  # the state that the next restore() loads
        self._seconds: deque[float] = deque(maxlen=1000)  # durations of the last copies of a state
        self._num_kept = 0
        # The lost ranks, the number of ranks before, and when this rank noticed the loss.
        self._loss: tuple[list[int], int, float] | None = None

    def strategy(self, **arguments: Any) -> MultiWorkerMirroredStrategy:
        """Make a `MultiWorkerMirroredStrategy` with these arguments, over the ranks that are left.

        With `deterministic=True` the ranks that are left take over the replicas of lost ranks, as further replicas on
        the CPU. Training then gives the same bits as without a loss. Otherwise there are fewer replicas, and each
        replica gets a larger part of a batch.

        Called by: every rank.
        Raises: TooFewReplicasError on all ranks, if fewer than `min_replicas` replicas are left.
        """
        if self._replicas is not None and arguments.get("deterministic"):
            rank = self.comm.rank if self.comm else 0
            size = self.comm.size if self.comm else 1
            replicas = replicas_of(self._replicas, size)[rank]
            arguments["devices"] = [f"cpu:{i}" for i in range(replicas)]
        strategy = MultiWorkerMirroredStrategy(comm=self.comm, **arguments)
        replicas = strategy.num_replicas_in_sync
        if strategy.extended.deterministic and self._replicas is None:
            self._replicas = replicas
        if replicas < self._min_replicas:
            raise TooFewReplicasError(
                f"{replicas} replicas are left, and min_replicas={self._min_replicas} are wanted. Start the job again "
                "from its last checkpoint"
            )
        return strategy

    def restore(self, checkpoint: Checkpoint) -> int:
        """Load the last committed state into the objects of `checkpoint` after the loss of a rank.

        If no rank was lost before this call, it loads nothing, and copies the objects' state, so that training can go
        back to it after a loss. On a single rank, or if a lost rank ends the job, it does neither.

        Called by: every rank, before its first step.
        Args:
            checkpoint: a Checkpoint of all objects that change during training.
        Returns: the number of committed steps.
        Raises: ValueError for a state with a sharded tensor, because its parts are lost with their ranks.
        """
        self._checkpoint = checkpoint
        if self._survivors is None:
            return self.step
        if self._restored is None:
            self._keep(checkpoint, self._survivors)  # for a loss in the first step
        else:
            ranks = self._restored["ranks"]
            known = self._survivors.communicator.all_gather_object(ranks, label="restore")
            ranks = ChainMap(ranks, *known)
            states = {rank: pickle.loads(state) for rank, state in ranks.items()}
            checkpoint.load_state_dict({**self._restored, "ranks": states})
            self._restored = None
        self._tell(self._survivors.comm)
        return self.step

    def commit(self) -> None:
        """Count a step as done, so that training goes on from here if a rank is lost later.

        The call waits for all ranks. Each `steps_per_copy`-th call then copies the state. On a single rank, or if a
        lost rank ends the job, the call only counts.

        Called by: every rank, after each step.
        Raises: an error if a rank is lost. `train` lets it pass, and `run_elastic` calls `train` again.
        """
        if self._survivors is None:
            self.step += 1
            return
        self._survivors.communicator.barrier(label=f"commit of step {self.step + 1}")
        self.step += 1
        if self._checkpoint is not None and self.step % self._steps_per_copy == 0:
            self._keep(self._checkpoint, self._survivors)

    def explain(self) -> str:
        """Return a text: the number of committed states, the MB of this rank's last state, the median ms of a copy.

        On a single rank, or if a lost rank ends the job, it is "no state was committed". Not collective.
        """
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
            check_whole(state["common"])
        parts = state["ranks"]
        ranks = {rank: pickle.dumps(part) for rank, part in parts.items()}
        survivors.exchange(ranks)
        self._states.keep(self.step, {**state, "ranks": ranks})
        self._seconds.append(time.perf_counter() - started)
        self._num_kept += 1

    def _recover(self, survivors: Survivors, noticed: float) -> None:
        """Free the old model and strategy, and go back to the last step that all ranks have committed.

        Called by: every rank that is left, before `train` is called again.
        Args:
            noticed: time when this rank noticed the loss, by `time.monotonic()`.
        """
        from mpistrat.liveness.ending.job_end import job_end

        job_end().end_without_finalize()
        size = survivors.comm.size
        lost, step = survivors.go_on(self._states.last)
        if self._loss is not None:  # another rank was lost during the last recovery
            before, size, noticed = self._loss
            lost = before + lost
        self._loss = lost, size, noticed
        leave_default_group()
        self._checkpoint = None
        gc.collect()  # frees the model, the strategy and their memory
        self._restored = self._states.back_to(step)
        self.step = step or 0

    def _tell(self, comm: MPI.Intracomm) -> None:
        if self._loss is not None and comm.rank == 0:
            lost, size, noticed = self._loss
            tell(
                f"{comm.size} of {size} ranks go on after step {self.step} without {listed(sorted(lost))}, "
                f"{time.monotonic() - noticed:.2f} s after the loss was noticed"
            )
        self._loss = None


def replicas_of(total: int, ranks: int) -> list[int]:
    """Return each rank's number of replicas, `total` in all: as equal as possible, the first ranks have one more."""
    each, more = divmod(total, ranks)
    return [each + (rank < more) for rank in range(ranks)]
