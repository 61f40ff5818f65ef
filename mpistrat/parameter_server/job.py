"""A job with servers, as one of its ranks sees it.

mpi4py is imported by this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import atexit
import weakref

from mpi4py import MPI

from mpistrat.cluster_resolver.job_roles import JobRoles
from mpistrat.cluster_resolver.shared_memory_limit import shared_bytes
from mpistrat.cluster_resolver.stall_limit import stall_seconds
from mpistrat.cluster_resolver.start_deadline import start_deadline
from mpistrat.communicators import job_end
from mpistrat.parameter_server.client import Client
from mpistrat.parameter_server.mail import Mail
from mpistrat.parameter_server.post import Post
from mpistrat.parameter_server.server import ParameterServer

# A notice to workers that run closures: the chief has no more.
END = "end"


class ServerJob:
    """What a rank needs to serve, or to use servers. Collective to make.

    Args:
        comm: the ranks of `roles`.
    Attributes:
        roles: who has which task.
        post: to all the ranks.
        client: to the servers; also on these.
        ended: whether the chief has said that there is no more to do.
    """

    def __init__(self, comm: MPI.Intracomm, roles: JobRoles) -> None:
        self.roles = roles
        with start_deadline("the duplication of a communicator"):
            duplicate = comm.Dup()
        mail = Mail(duplicate, pipes=shared_bytes() > 0)
        self.post = Post(mail, self.name_of, stall_seconds())
        self.servers = roles.ranks["ps"]
        self.client = Client(self.post, self.servers)
        self.ended = False
        self._done = False
        self.post.handle(END, lambda source, body: self._end())
        self.post.on_lost(self._lost)
        # Runs before the ranks wait for each other at their ends: handlers run last in, first out.
        atexit.register(_done, weakref.ref(self))

    @property
    def clients(self) -> tuple[int, ...]:
        """The ranks that use servers."""
        return tuple(rank for rank in range(self.post.size) if rank not in self.servers)

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

    def serve(self) -> None:
        """The work of a server: return when all that use it are done."""
        ParameterServer(self.post, self.clients, self.trainers).serve()
        self._done = True

    def done(self) -> None:
        """This rank does not use the servers any more; with the chief's word, workers do not either."""
        if self._done:
            return
        self._done = True
        if self.roles.task_type == "chief":
            for worker in self.roles.ranks["worker"]:
                self.post.tell(worker, END)
        if self.post.rank not in self.servers:
            self.client.done()

    def _end(self) -> None:
        self.ended = True

    def _lost(self, rank: int) -> None:
        """Without fault tolerant MPI, launchers end the job as soon as they see it; some never do."""
        needed = {*self.servers, *self.roles.ranks.get("chief", ())}
        if self.post.rank in self.servers:
            needed.update(self.clients)
        if rank in needed and not self._done:
            job_end.end_job(
                f"ending the job: {self.name_of(rank)} has died, or has left without a word, and "
                f"{self.name_of(self.post.rank)} needs it",
                1,
            )


def _done(job: weakref.ref[ServerJob]) -> None:
    alive = job()
    if alive is not None:
        alive.done()
