"""A job with servers, as one of its ranks sees it.

This file imports mpi4py, and is imported on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Iterable, Iterator, Set

from mpi4py import MPI

from mpistrat.cluster_resolver.launcher import why_not_fault_tolerant
from mpistrat.cluster_resolver.roles.job_roles import JobRoles
from mpistrat.errors import counted
from mpistrat.liveness.ending import interrupts
from mpistrat.liveness.ending.job_end import job_end
from mpistrat.liveness.ending.start_deadline import start_deadline
from mpistrat.machine.notices import tell
from mpistrat.parameter_server.client.client import Client
from mpistrat.parameter_server.rpc.channel import Channel
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint
from mpistrat.parameter_server.server.server import ParameterServer
from mpistrat.settings import shared_bytes, stall_seconds
from mpistrat.topology import Topology

# A notice to workers that run closures: the chief has no more closures.
END = "end"
# Notices. _HERE: a rank has come to `begin`. _BEGIN: all ranks have come to it.
_HERE = "here"
_BEGIN = "begin"
# A notice: the path of the job's last checkpoint.
_CHECKPOINT = "checkpoint"
# One rank says why the job ends, and ends it. Other ranks that would end it, too, first wait this long.
_SECONDS_FOR_THE_FIRST = 5.0
_SECONDS_FOR_THE_OTHERS = 10.0  # the chief's longest wait at its end for the other ranks to leave
_SECONDS_TO_SEND = 60.0  # the longest wait at a rank's end for other ranks to read its messages


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """Surround the ranks' collective calls before `ServerJob.begin`. If a rank dies in them, end the job.

    With fault tolerant MPI the other ranks get an MPI.Exception. An orderly end would then wait in MPI_Finalize for the
    dead rank, so this rank ends the job at once.

    Called by: `join_job`.
    Raises: the MPI.Exception, unchanged, if MPI is not fault tolerant.
    """
    try:
        yield
    except MPI.Exception as error:
        if _why_not_fault_tolerant():
            raise
        job_end().end_job(f"ending the job: a rank has died before all had met: {error}", 1)


def _why_not_fault_tolerant() -> str:
    """Return why the ranks cannot continue after the death of a rank; "" if they can."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return "MPI was started without MPI_THREAD_MULTIPLE, its default in mpi4py"
    return why_not_fault_tolerant(MPI.Get_library_version())


class ServerJob:
    """A job with servers, on one of its ranks. Collective: all ranks construct it together.

    Args:
        comm: the communicator with the ranks of `topology` and of `roles`.
        replicated: whether each server has a backup.
    Attributes:
        outlives_ranks: whether the job continues when a rank other than the chief has died.
        why_not_fault_tolerant: why the job cannot continue after a death; "" if MPI is fault tolerant.
        rpc: the messages between all ranks.
        servers, workers: the ranks of the servers, and of the workers.
        clients: the ranks that use servers: all ranks that are no server.
        trainers: the chief's rank if there is a chief, then the workers' ranks.
        client: reads and changes arrays on the servers; every rank has one.
        server: this rank's server; None on a rank that is no server.
        coordinator: the rank that schedules functions on workers, once all ranks have begun; None if no rank does.
        ended: whether the chief has announced its end.
        is_done: whether this rank has stopped serving (a server), or has told the servers that it has ended (a client).
        checkpoint: the path of the job's last checkpoint; "" before the first.
    """

    def __init__(
        self, comm: MPI.Intracomm, topology: Topology, roles: JobRoles, replicated: bool = False
    ) -> None:
        self.topology = topology
        self.roles = roles
        self.why_not_fault_tolerant = _why_not_fault_tolerant()
        self.outlives_ranks = comm.Get_size() > 1 and not self.why_not_fault_tolerant
        with start_deadline("the duplication of a communicator", rank=comm.rank, size=comm.size):
            pipes = shared_bytes() > 0
            duplicate = comm.Dup()
            channel = Channel(duplicate, outlives_ranks=self.outlives_ranks, pipes=pipes)
        self.rpc = RpcEndpoint(channel, self.name_of, stall_seconds())
        self.servers = roles.ranks["ps"]
        self.workers = roles.ranks["worker"]
        clients = {*range(comm.Get_size())} - {*self.servers}
        self.clients = tuple(sorted(clients))
        self.trainers = (*roles.ranks.get("chief", ()), *self.workers)
        self.client = Client(self.rpc, self.servers, replicated)
        self.coordinator: int | None = None
        self.ended = False
        self.is_done = False
        self.checkpoint = ""
        lost_ranks = LossPolicy(self)
        self.rpc.describe_death = lost_ranks.describe
        self.rpc.on_lost(lost_ranks.lost)  # before the server's handler
        self.server: ParameterServer | None = None
        if roles.rank in self.servers:
            backup = self.client.routes.backups.get(roles.rank)
            self.server = ParameterServer(
                self.rpc, self.clients, self.trainers, self.trainers[0], backup
            )
        self._here = 0
        self._begun = False
        self.rpc.handle(END, self._end)
        self.rpc.handle(_HERE, self._comes)
        self.rpc.handle(_BEGIN, self._may_begin)
        self.rpc.handle(_CHECKPOINT, self._hear_of_checkpoint)
        # Exit handlers run last in, first out, so this handler runs before the ranks wait for each other. The servers
        # wait for `done`, so it runs even if the program has dropped its strategy.
        atexit.register(self.done)

    def name_of(self, rank: int) -> str:
        """Return the name of a rank for messages, such as "worker 1 (rank 2)"; "rank 2" for a rank without a task."""
        for task_type, ranks in self.roles.ranks.items():
            if rank in ranks:
                return f"{task_type} {ranks.index(rank)} (rank {rank})"
        return f"rank {rank}"

    def begin(self, coordinates: bool) -> None:
        """Let the job outlive the deaths of ranks from now on, if MPI is fault tolerant. Collective.

        Waits until all ranks have called `begin`, because before that a rank may wait for another in MPI, and would not
        hear of its death. Without fault tolerant MPI, returns at once.

        Args: coordinates: whether this rank schedules functions on the workers.
        """
        if coordinates:
            self.coordinator = self.rpc.rank
        if not self.outlives_ranks:
            return
        self.rpc.notify(self.servers[0], _HERE, coordinates)
        self.rpc.run_until(lambda: self._begun)
        job_end().losses.go_on(self.rpc.channel.has_lost)
        job_end().records.record.expendable = not coordinates

    def _comes(self, rank: int, coordinates: bool) -> None:
        self._here += 1
        if coordinates:
            self.coordinator = rank
        if self._here == self.rpc.size:
            self.rpc.notify_all(range(self.rpc.size), _BEGIN, self.coordinator)

    def _may_begin(self, source: int, coordinator: int | None) -> None:
        self._begun = True
        self.coordinator = coordinator

    def tell_of_checkpoint(self, path: str) -> None:
        """Send a checkpoint's path to all ranks, because errors about lost variables name the last checkpoint.

        Called by: the rank that saves or restores checkpoints, any thread.
        """
        self.checkpoint = path
        if not self.is_done:
            self.rpc.notify_all(self.servers, _CHECKPOINT, path)

    def _hear_of_checkpoint(self, source: int, path: str) -> None:
        self.checkpoint = path
        if self.server is None:
            return
        speaker = self.living(self.servers)[0]
        if self.rpc.rank == speaker:
            others = self.server.clients - {source}
            self.rpc.notify_all(others, _CHECKPOINT, path)

    def living(self, ranks: Iterable[int]) -> list[int]:
        """Return these ranks without the ranks that are known to have died."""
        lost = self.rpc.channel.lost
        return [rank for rank in ranks if rank not in lost]

    def serve(self) -> None:
        """Do a server's work, and return when all clients have left or died. Called by: a server's rank."""
        if self.server is not None and not self.is_done:
            with interrupts.ignore_interrupts():
                self.server.serve()
            self._leave()

    def done(self) -> None:
        """Tell the servers that this rank has ended; on the chief, tell the workers to end, too.

        Waits until these messages have gone out. After a death, the coordinator also waits up to 10 s for the other
        ranks to end. A second call does nothing.

        Called by: `shutdown`, workers at their end, and the process's exit.
        """
        if self.is_done:
            return
        self._leave()
        if self.roles.task_type == "chief":
            self.rpc.notify_all(self.workers, END)
        if self.server is None:
            self.client.routes.leave()
        self._send_the_rest()
        lost = self.rpc.channel.lost
        if self.outlives_ranks and self.rpc.rank == self.coordinator and lost:
            # After a death the ranks do not wait for each other at the end, and mpirun would kill the other ranks if
            # this rank fails.
            others = self.rpc.size - 1
            self.rpc.run_until(lambda: len(lost) == others, _SECONDS_FOR_THE_OTHERS)

    def _send_the_rest(self) -> None:
        """Wait until this rank's messages to the servers, and the coordinator's to workers, have gone out.

        It receives meanwhile, because a full pipe takes the rest of a message only then. If a rank has not read its
        messages after 60 s, end the job.
        """
        to = [*self.servers]
        if self.rpc.rank == self.coordinator:
            to += self.workers
        unsent = self.rpc.channel.unsent
        if not self.rpc.run_until(lambda: not unsent(to), _SECONDS_TO_SEND):
            names = ", ".join(self.name_of(rank) for rank in unsent(to))
            job_end().end_job(
                f"ending the job: {self.rpc.own_name} was at its end for {_SECONDS_TO_SEND:g} s, and "
                f"{names} did not read its messages. See what they do (py-spy dump), or whether they were stopped",
                1,
            )

    def _leave(self) -> None:
        self.is_done = True
        atexit.unregister(self.done)

    def _end(self, source: int, body: None) -> None:
        self.ended = True


class LossPolicy:
    """Decides whether the job continues after the death of a rank, and which rank writes the message about it.

    Args: job: the job on this rank.
    """

    def __init__(self, job: ServerJob) -> None:
        self._job = job

    def describe(self, rank: int) -> str:
        """Return the text about a dead rank for errors and messages.

        For a dead server, the text names its variables, and the server that has their backup copies. If no server has
        copies, it names the job's last checkpoint.
        """
        job = self._job
        died = f"{job.name_of(rank)} has died"
        if rank not in job.servers:
            return died
        routes = job.client.routes
        holder = routes.holder_of(rank)
        names = {}
        given_up = {}
        if job.server is not None and holder == job.rpc.rank:
            names = job.server.backup_copies.names
            given_up = job.server.backup_copies.given_up
        if given_up or routes.is_lost_with(rank):
            names_lost = _quoted(given_up.values() or job.client.names_lost())
            last = "and it has no checkpoint of a CheckpointManager"
            if job.checkpoint:
                last = f"from its last checkpoint, {job.checkpoint}"
            return f"{died}, and with it {names_lost}: the job must be started again, {last}"
        primary = job.name_of(routes.primaries[rank])
        kept = _quoted(names.values())
        return (
            f"{died}; {job.name_of(holder)} goes on with {kept}, of which there is no other copy "
            f"now, nor of the variables of {primary}"
        )

    def lost(self, rank: int) -> None:
        """Handle the end of a rank's process: end the job, or have one rank write that the job continues.

        Does nothing once this rank is done, or on a server that the dead rank does not concern.

        Called by: the thread that reads messages, once for each dead rank.
        """
        job = self._job
        if job.is_done or not self._concerns_server(rank):
            return
        if not job.outlives_ranks:
            self._end_if_needed(rank)
            return
        job_end().end_without_finalize()
        if rank == job.coordinator and not job.ended:
            self._end_job(f"{job.name_of(rank)} has died, and no other rank can schedule functions")
        lost = job.rpc.channel.lost
        if job.coordinator in lost or job.rpc.rank != self._speaker(rank):
            return
        if rank in job.servers:
            tell(self.describe(rank), "ERROR")
            return
        others = {*job.clients} - {*lost, job.coordinator}
        if not others and job.coordinator is None:
            self._end_job(f"{job.name_of(rank)}, the last worker, has died")
        tell(self._who_goes_on(rank, others), "ERROR")

    def _concerns_server(self, rank: int) -> bool:
        """Whether this rank must react to the death of `rank`: always, if this rank is no server.

        A server reacts to a client that has not told it of its end, and to another server while it has clients itself.
        """
        if self._job.server is None:
            return True
        clients = self._job.server.clients
        if rank in self._job.servers:
            return bool(clients)
        return rank in clients

    def _speaker(self, lost: int) -> int:
        """Return the rank that writes the message about the death of `lost`; -1 if there is none.

        That is a dead server's backup, because it has the names of the arrays; otherwise the coordinator; without a
        coordinator, the first living server.
        """
        job = self._job
        holder = job.client.routes.holder_of(lost)
        if holder != lost:
            return holder
        if job.coordinator is not None:
            return job.coordinator
        living = job.living(job.servers)
        if not living:
            return -1
        return living[0]

    def _who_goes_on(self, lost: int, others: Set[int]) -> str:
        job = self._job
        died = f"{job.name_of(lost)} has died"
        number = counted(len(others), "other worker") if others else "no other workers"
        if job.coordinator is not None:
            if not others:
                return f"{died}, and no worker is left"
            return f"{died}; {number} will execute its unfinished functions"
        text = f"{died}; the job goes on with {number}, and nobody reads its share of the data"
        workers = [worker for worker in job.workers if worker in others | {lost}]
        if workers[0] == lost and workers[1:]:
            text += f"; {job.name_of(workers[1])} saves checkpoints from now on"
        return text

    def _end_if_needed(self, rank: int) -> None:
        """End the job if this rank needs the dead `rank`: a server or the chief, and on a server also a client.

        First wait 5 s, because most launchers end a job when a rank dies. The observer (a process per node that watches
        the ranks) then says who died first.
        """
        job = self._job
        needed = {*job.servers, *job.roles.ranks.get("chief", ())}
        if job.server is not None:
            needed.update(job.clients)
        if rank in needed:
            time.sleep(_SECONDS_FOR_THE_FIRST)
            job_end().end_job(
                f"ending the job: {job.name_of(rank)} has died, or has left without a word, and "
                f"{job.rpc.own_name} needs it",
                1,
            )

    def _end_job(self, why: str) -> None:
        job = self._job
        living = job.living((*job.servers, *job.clients))
        if job.rpc.rank != living[0]:
            time.sleep(_SECONDS_FOR_THE_FIRST)
        job_end().end_job(f"ending the job: {why}", 1)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "the variables that it kept"
