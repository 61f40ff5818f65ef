"""What a rank of a job with servers does when checkpoints are saved and restored."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpistrat.machine.notices import tell
from mpistrat.parameter_server.protocol.snapshot import consistent_snapshot
from mpistrat.parameter_server.rpc.remote_errors import attributed_error
from mpistrat.replicas.checkpoint_role import CheckpointRole

if TYPE_CHECKING:
    from mpistrat.parameter_server.job.job import ServerJob


class CheckpointsOfJob(CheckpointRole):
    """One rank saves and restores what is on the servers; the others follow.

    Args:
        owns: whether this rank makes variables.
        paused: a context in which no function of a coordinator is half executed.
    """

    all_take_part = False

    def __init__(
        self,
        job: ServerJob,
        owns: bool,
        paused: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._job, self._owns, self._paused = job, owns, paused
        self._published = itertools.count()

    @property
    def saves(self) -> bool:
        """The rank that makes variables; of workers that train by themselves the first that is still alive."""
        if self._owns or "chief" in self._job.roles.ranks:
            return self._owns
        died = self._job.rpc.channel.has_died
        first = next((rank for rank in self._job.workers if not died(rank)), None)
        return self._job.rpc.rank == first

    @property
    def restores(self) -> bool:
        return self._owns

    @property
    def has_followers(self) -> bool:
        return self._owns and len(self._job.clients) > 1

    @contextlib.contextmanager
    def unchanging(self) -> Iterator[None]:
        with self._paused(), consistent_snapshot(self._job.client.routes):
            yield

    def already_written(self) -> contextlib.AbstractContextManager[None]:
        return self._job.client.already_written()

    def completed(self, path: str, restored: bool = False) -> None:
        self._job.tell_of_checkpoint(path)
        if restored:
            servers = len(self._job.servers)
            tell(
                f"the job goes on from {path}, with {servers} parameter server{'s' * (servers > 1)}",
                "INFO",
            )

    def tell_followers(self, what: str, value: Any, error: Exception | None = None) -> None:
        self._job.client.publish((what, next(self._published)), (value, error))

    @contextlib.contextmanager
    def telling_failure(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            failed = f"{self._job.name_of(self._job.rpc.rank)} has not {what}"
            self.tell_followers(what, None, attributed_error(error, failed))
            raise

    def follow(self, what: str) -> Any:
        value, error = self._job.client.await_published((what, next(self._published)))
        if error is not None:
            raise error
        return value
