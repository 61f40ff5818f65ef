"""What the death of a rank means for a job with servers, and which rank tells people."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpistrat.liveness import job_end
from mpistrat.machine.notices import tell

if TYPE_CHECKING:
    from mpistrat.parameter_server.job import ServerJob

# One rank says why the job ends, and ends it. The others, who would say the same, leave it this time.
_SECONDS_FOR_THE_FIRST = 5.0


class Losses:
    """Judges each death. Args: job: as this rank sees it."""

    def __init__(self, job: ServerJob) -> None:
        self._job = job

    def describe(self, rank: int) -> str:
        """What is said of a rank that has died, in errors and to people."""
        job, died = self._job, f"{self._job.name_of(rank)} has died"
        if rank not in job.servers:
            return died
        routes = job.client.routes
        holder = routes.holder_of(rank)
        names: list[str] = []
        given_up: list[str] = []
        if job.server is not None and holder == job.rpc.rank:
            copies = job.server.backup_copies
            names, given_up = list(copies.names.values()), list(copies.given_up.values())
        if given_up or routes.is_lost_with(rank):
            last = "it has no checkpoint of a CheckpointManager"
            return (
                f"{died}, and with it {_quoted(given_up or job.client.names_lost())}: the job must be started again, "
                + (
                    f"from its last checkpoint, {job.checkpoint}"
                    if job.checkpoint
                    else f"and {last}"
                )
            )
        primary = job.name_of(routes.primary_of(rank) or 0)
        return (
            f"{died}; {job.name_of(holder)} goes on with {_quoted(names)}, of which there is no other copy now, nor of "
            f"what {primary} has made"
        )

    def lost(self, rank: int) -> None:
        """A rank has died, or has left without a word. End the job, or let one rank say who goes on."""
        job = self._job
        if job.is_done or (
            job.server is not None and not _is_needed(rank, job, job.server.clients)
        ):
            return
        if not job.outlives_ranks:
            self._lost_for_good(rank)
            return
        job_end.end_without_finalize()
        lost, coordinator = job.rpc.channel.lost, job.coordinator
        if rank == coordinator and not job.ended:
            self._end_job(f"{job.name_of(rank)} has died, which tells the others what to do")
        if coordinator in lost:
            return
        teller = job.client.routes.holder_of(rank)  # has the names of a dead server's arrays
        if teller == rank and coordinator is not None:
            teller = coordinator
        elif teller == rank:
            teller = next((server for server in job.servers if server not in lost), -1)
        if job.rpc.rank != teller:
            return
        others = [client for client in job.clients if client not in {*lost, coordinator}]
        if rank not in job.servers and not others and coordinator is None:
            self._end_job(f"{job.name_of(rank)}, the last worker, has died")
        tell(self.describe(rank) if rank in job.servers else self._who_goes_on(rank, others))

    def _who_goes_on(self, lost: int, others: Sequence[int]) -> str:
        job, died = self._job, f"{self._job.name_of(lost)} has died"
        number = f"{len(others) or 'no'} other worker{'s' * (len(others) != 1)}"
        if job.coordinator is not None:
            if not others:
                return f"{died}, and no worker is left"
            return f"{died}; {number} will execute what it had begun"
        text = f"{died}; the job goes on with {number}, and nobody reads its share of the data"
        workers = [worker for worker in job.workers if worker in {*others, lost}]
        if workers[0] == lost and workers[1:]:
            text += f"; {job.name_of(workers[1])} saves checkpoints from now on"
        return text

    def _lost_for_good(self, rank: int) -> None:
        """End the job if this rank needs the other one.

        Launchers end a job as soon as they see a death, and the observer says who was the first; some never do.
        """
        job = self._job
        needed = {*job.servers, *job.roles.ranks.get("chief", ())}
        if job.server is not None:
            needed.update(job.clients)
        if rank in needed:
            time.sleep(_SECONDS_FOR_THE_FIRST)
            job_end.end_job(
                f"ending the job: {job.name_of(rank)} has died, or has left without a word, and "
                f"{job.name_of(job.rpc.rank)} needs it",
                1,
            )

    def _end_job(self, why: str) -> None:
        job = self._job
        lost = job.rpc.channel.lost
        first = next(alive for alive in (*job.servers, *job.clients) if alive not in lost)
        if job.rpc.rank != first:
            time.sleep(_SECONDS_FOR_THE_FIRST)
        job_end.end_job(f"ending the job: {why}", 1)


def _is_needed(rank: int, job: ServerJob, clients: set[int]) -> bool:
    """Whether the rank is a client of this server, or another server while this one is in use."""
    return rank in clients or (rank in job.servers and bool(clients))


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "what it kept"
