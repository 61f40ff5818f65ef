"""A job with servers, as one of its ranks sees it.

mpi4py is imported by this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Iterator, Sequence

from mpi4py import MPI

from mpistrat.cluster_resolver.fault_tolerant_mpi import why_not_fault_tolerant
from mpistrat.cluster_resolver.job_roles import JobRoles
from mpistrat.cluster_resolver.start_deadline import start_deadline
from mpistrat.liveness import interrupts, job_end
from mpistrat.machine.notices import tell
from mpistrat.parameter_server.client import Client
from mpistrat.parameter_server.routes import backups_of
from mpistrat.parameter_server.rpc.channel import Channel
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint
from mpistrat.parameter_server.server import ParameterServer
from mpistrat.settings import shared_bytes, stall_seconds

# A notice to workers that run closures: the chief has no more.
END = "end"
# Notices: a rank has come to `begin`; all have.
_HERE, _BEGIN = "here", "begin"
# A notice: where a checkpoint of the job is.
_CHECKPOINT = "checkpoint"
_SECONDS_FOR_THE_FIRST = 5.0  # to say why the job ends, and to end it: all would say the same
_SECONDS_FOR_THE_OTHERS = 10.0  # to leave, before the chief
_SECONDS_TO_SEND = 60.0  # at the end, what the others have not read yet


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """Around all that the ranks do together until `begin`: the death of one is that of the job, until then.

    Fault tolerant MPI raises errors on the others, and MPI_Finalize would wait for the dead.
    """
    try:
        yield
    except MPI.Exception as error:
        if _why_not_fault_tolerant():
            raise
        job_end.end_job(f"ending the job: a rank has died before all had met: {error}", 1)


def _why_not_fault_tolerant() -> str:
    """ "" where ranks can go on when one has died."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return "MPI was started without MPI_THREAD_MULTIPLE, its default in mpi4py"
    return why_not_fault_tolerant(MPI.Get_library_version())


class ServerJob:
    """What a rank needs to serve, or to use servers. Collective to make.

    Args:
        comm: the ranks of `roles`.
        replicated: whether each server keeps second copies of what another one makes.
    Attributes:
        outlives_ranks: whether it goes on when one has died: all but a chief can.
        why_not_fault_tolerant: "" where MPI is.
        roles: who has which task.
        rpc: to all the ranks.
        client: to the servers; also on these.
        ended: whether the chief has said that there is no more to do.
    """

    def __init__(self, comm: MPI.Intracomm, roles: JobRoles, replicated: bool = False) -> None:
        self.roles = roles
        with start_deadline("the duplication of a communicator"):
            duplicate = comm.Dup()
        self.why_not_fault_tolerant = _why_not_fault_tolerant()
        self.outlives_ranks = comm.Get_size() > 1 and not self.why_not_fault_tolerant
        channel = Channel(duplicate, outlives_ranks=self.outlives_ranks, pipes=shared_bytes() > 0)
        self.rpc = RpcEndpoint(channel, self.name_of, stall_seconds())
        self.rpc.describe_death = self._what_died
        self.servers = roles.ranks["ps"]
        self.client = Client(self.rpc, self.servers, replicated)
        self.ended = False
        self._done = False
        self._last_checkpoint = ""  # its path
        self.rpc.on_lost(self._lost)  # before the server's
        self._server: ParameterServer | None = None
        if roles.rank in self.servers:
            backup = backups_of(self.servers)[roles.rank] if replicated else None
            self._server = ParameterServer(
                self.rpc, self.clients, self.trainers, self.trainers[0], backup
            )
        self._here, self._begun = 0, False
        self._coordinates = False  # whether this rank has others run functions
        self._coordinator: int | None = None  # the rank that does, once all have begun
        self.rpc.handle(END, lambda source, body: self._end())
        self.rpc.handle(_HERE, self._comes)
        self.rpc.handle(_CHECKPOINT, self._hear_of_checkpoint)
        self.rpc.handle(_BEGIN, lambda source, coordinator: self._may_begin(coordinator))
        # Runs before the ranks wait for each other at their ends: handlers run last in, first out.
        # Also where the program has forgotten its strategy by then: the servers wait for it.
        atexit.register(self.done)

    @property
    def clients(self) -> tuple[int, ...]:
        """The ranks that use servers."""
        return tuple(rank for rank in range(self.rpc.size) if rank not in self.servers)

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that a coordinator has run functions."""
        return self.roles.ranks["worker"]

    @property
    def trainers(self) -> tuple[int, ...]:
        """The ranks that train by themselves, where there is no coordinator."""
        return (*self.roles.ranks.get("chief", ()), *self.roles.ranks["worker"])

    def name_of(self, rank: int) -> str:
        """Such as "worker 1 (rank 2)"."""
        for task_type, ranks in self.roles.ranks.items():
            if rank in ranks:
                return f"{task_type} {ranks.index(rank)} (rank {rank})"
        return f"rank {rank}"

    def begin(self, coordinates: bool) -> None:
        """From now on, if MPI is fault tolerant, the death of a rank is not that of the job. Collective.

        Returns when all ranks are here: before, some may wait for others in MPI, which nobody would tell of a death.

        Args: coordinates: whether this rank has others run functions.
        """
        self._coordinates = coordinates
        if not self.outlives_ranks:
            return
        self.rpc.notify(self.servers[0], _HERE, coordinates)
        self.rpc.run_until(lambda: self._begun)
        job_end.go_on_without_the_lost(self.rpc.channel.has_lost)
        job_end.expect_losses(not coordinates)

    def tell_of_checkpoint(self, path: str) -> None:
        """Who tells from now on that variables are lost names this checkpoint. Called by: one rank, any thread."""
        self._last_checkpoint = path
        if not self._done:
            for server in self.servers:
                self.rpc.notify(server, _CHECKPOINT, path)

    def _hear_of_checkpoint(self, source: int, path: str) -> None:
        self._last_checkpoint = path
        first = next(one for one in self.servers if one not in self.rpc.channel.lost)
        if self._server is not None and self.rpc.rank == first:
            for client in self._server.clients - {source}:
                self.rpc.notify(client, _CHECKPOINT, path)

    def serve(self) -> None:
        """The work of a server: return when all that use it are done."""
        assert self._server is not None
        if not self._done:
            with interrupts.unheeded():
                self._server.serve()
            self._leave()

    def done(self) -> None:
        """This rank does not use the servers any more; with the chief's word, workers do not either."""
        if self._done:
            return
        self._leave()
        if self.roles.task_type == "chief":
            for worker in self.roles.ranks["worker"]:
                self.rpc.notify(worker, END)
        if self.rpc.rank not in self.servers:
            self.client.done()
        self._send_the_rest()
        if self.rpc.rank == self._coordinator and self.rpc.channel.lost:
            # Nobody waits for the others at the end then; mpirun would kill them if this rank fails.
            everybody = self.rpc.size - 1
            self.rpc.run_until(
                lambda: len(self.rpc.channel.lost) == everybody, _SECONDS_FOR_THE_OTHERS
            )

    def _send_the_rest(self) -> None:
        """To those that read until they have it: what found no room in a pipe goes out only while this rank reads."""
        to = (*self.servers, *(self.workers if self._coordinates else ()))
        if not self.rpc.run_until(lambda: not self.rpc.channel.unsent(to), _SECONDS_TO_SEND):
            names = ", ".join(map(self.name_of, self.rpc.channel.unsent(to)))
            job_end.end_job(
                f"ending the job: {self.name_of(self.rpc.rank)} was at its end for {_SECONDS_TO_SEND:g} s, and "
                f"{names} did not read what it had sent: see what they do (py-spy dump), or whether they were stopped",
                1,
            )

    def _leave(self) -> None:
        self._done = True
        atexit.unregister(self.done)

    def _end(self) -> None:
        self.ended = True

    def _comes(self, rank: int, coordinates: bool) -> None:
        self._here += 1
        self._coordinator = rank if coordinates else self._coordinator
        if self._here == self.rpc.size:
            for one in range(self.rpc.size):
                self.rpc.notify(one, _BEGIN, self._coordinator)

    def _may_begin(self, coordinator: int | None) -> None:
        self._begun, self._coordinator = True, coordinator

    def _what_died(self, rank: int) -> str:
        died = f"{self.name_of(rank)} has died"
        if rank not in self.servers:
            return died
        routes = self.client.routes
        holder = routes.holder_of(rank)
        here = None
        if self._server is not None and holder == self.rpc.rank:
            here = self._server.backup_copies
        given_up = list(here.given_up.values()) if here is not None else []
        if given_up or routes.is_lost_with(rank):
            lost = _named(given_up or self.client.names_lost())
            last = f"from its last checkpoint, {self._last_checkpoint}"
            return (
                f"{died}, and with it {lost}: the job must be started again, "
                f"{last if self._last_checkpoint else 'and it has no checkpoint of a CheckpointManager'}"
            )
        names = _named(list(here.names.values()) if here is not None else [])
        kept_there = self.name_of(routes.primary_of(rank) or 0)
        return (
            f"{died}; {self.name_of(holder)} goes on with {names}, of which there is no other copy now, nor of what "
            f"{kept_there} has made"
        )

    def _lost(self, rank: int) -> None:
        """A rank has died, or has left without a word."""
        if self._done or (self._server is not None and not self._needed(rank)):
            return
        if not self.outlives_ranks:
            self._lost_for_good(rank)
            return
        job_end.end_without_finalize()
        lost, coordinator = self.rpc.channel.lost, self._coordinator
        if rank == coordinator and not self.ended:
            self._end_job(f"{self.name_of(rank)} has died, which tells the others what to do")
        if coordinator in lost:
            return
        teller = coordinator
        holder = self.client.routes.holder_of(rank)
        if holder != rank:
            teller = holder  # which has the names of what it keeps
        elif teller is None:
            teller = next((one for one in self.servers if one not in lost), None)
        if self.rpc.rank != teller:
            return
        others = [one for one in self.clients if one not in lost and one != coordinator]
        if rank not in self.servers and not others and coordinator is None:
            self._end_job(f"{self.name_of(rank)}, the last worker, has died")
        tell(self._what_died(rank) if rank in self.servers else self._who_goes_on(rank, others))

    def _needed(self, rank: int) -> bool:
        """Whether this server is to tell of the rank: it is in use, and others did not come to their ends."""
        assert self._server is not None
        in_use = self._server.clients
        return rank in in_use or (rank in self.servers and bool(in_use))

    def _who_goes_on(self, lost: int, others: Sequence[int]) -> str:
        number = f"{len(others) or 'no'} other worker{'s' * (len(others) != 1)}"
        if self._coordinator is None:
            told = f"{self.name_of(lost)} has died; the job goes on with {number}"
            told += ", and nobody reads its share of the data"
            workers = [one for one in self.workers if one in others or one == lost]
            if workers[0] == lost and workers[1:]:
                told += f"; {self.name_of(workers[1])} saves checkpoints from now on"
            return told
        if not others:
            return f"{self.name_of(lost)} has died, and no worker is left"
        return f"{self.name_of(lost)} has died; {number} will execute what it had begun"

    def _lost_for_good(self, rank: int) -> None:
        """Launchers end the job as soon as they see it, and the observer tells who was the first; some never do."""
        needed = {*self.servers, *self.roles.ranks.get("chief", ())}
        if self.rpc.rank in self.servers:
            needed.update(self.clients)
        if rank in needed:
            time.sleep(_SECONDS_FOR_THE_FIRST)
            job_end.end_job(
                f"ending the job: {self.name_of(rank)} has died, or has left without a word, and "
                f"{self.name_of(self.rpc.rank)} needs it",
                1,
            )

    def _end_job(self, why: str) -> None:
        alive = [one for one in range(self.rpc.size) if one not in self.rpc.channel.lost]
        first = next((one for one in self.servers if one in alive), alive[0])
        if self.rpc.rank != first:
            time.sleep(_SECONDS_FOR_THE_FIRST)
        job_end.end_job(f"ending the job: {why}", 1)


def _named(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "what it kept"
