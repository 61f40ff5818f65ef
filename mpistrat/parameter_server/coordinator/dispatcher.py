"""The chief's side of closures: it sends them to workers, and receives their results."""

from __future__ import annotations

import atexit
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat.errors import UnavailableError
from mpistrat.machine.notices import tell
from mpistrat.parameter_server.coordinator.closures import Closure, ClosureQueue
from mpistrat.parameter_server.coordinator.failures import unpack_error
from mpistrat.parameter_server.coordinator.per_worker import ResourceTable
from mpistrat.parameter_server.coordinator.pickling import References
from mpistrat.parameter_server.coordinator.worker import (
    CLOSURES,
    OUTCOMES,
    RETURNED,
    SECONDS_TO_KEEP,
)
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint


@dataclass
class Cluster:
    """The chief's connection to the workers: `strategy.extended.cluster` on the chief.

    Attributes:
        workers: the workers' ranks, by worker index.
        over: called with ids of closures that no worker executes again, and the id before which all have ended. It
            tells the servers, so that they forget the outcomes of these closures' updates.
        joined: called when all closures have ended without an error.
        is_needed: returns whether a dead rank had the last copy of variables, so that no closure can be executed.
        coordinator: the only `ClusterCoordinator` of the strategy; None before it is made.
    """

    rpc: RpcEndpoint
    workers: Sequence[int]
    references: References
    over: Callable[[list[int], int], None]
    joined: Callable[[], None]
    is_needed: Callable[[int], bool]
    coordinator: Any = None


# A worker gets closures in advance: as many as it executes in about this many seconds, and at most this many.
_SECONDS_AHEAD = 5e-3
_MOST_AHEAD = 64
_FEWEST_OVER = 64  # closures that have ended before the chief tells the servers


class Dispatcher:
    """Sends the queue's closures (scheduled functions) to workers as they become free.

    A worker that executes short closures gets several at a time, and more before it has ended them all. If a worker
    dies, the other workers get its closures. If a server dies with the last copy of variables, all closures fail. A
    thread reads the workers' messages until `end`, or the program's end.
    """

    def __init__(self, cluster: Cluster, queue: ClosureQueue, resources: ResourceTable) -> None:
        self._cluster = cluster
        self._queue = queue
        self._resources = resources
        self._rpc = cluster.rpc
        self._lock = threading.RLock()  # taken before the queue's
        self._workers = {
            rank: _LivingWorker(index, rank) for index, rank in enumerate(cluster.workers)
        }
        self._ended = False
        self._rpc.handle(OUTCOMES, self._take_outcomes)
        self._rpc.handle(RETURNED, self._take_back)
        self._rpc.on_lost(self._lose)
        for rank in sorted(self._rpc.channel.lost):
            self._lose(rank)
        # Exit handlers run last in, first out, so this handler runs before the job's handler ends the workers.
        atexit.register(self.end)
        threading.Thread(target=self._read, name="mpistrat coordinator", daemon=True).start()

    def hand_out(self) -> None:
        """Send waiting closures to workers that have room for more, first to the worker with the fewest in hand.

        Called by: threads that have changed the queue or a worker's closures.
        """
        with self._lock:
            for worker in sorted(self._workers.values(), key=lambda worker: len(worker.in_hand)):
                waiting = len(self._queue)
                if not waiting:
                    return
                room = worker.ahead - len(worker.in_hand)
                share = min(room, math.ceil(waiting / len(self._workers)))
                # A worker that still has closures gets the next ones in groups, not one by one.
                if share > 0 and (not worker.in_hand or share >= worker.ahead // 2):
                    self._send(worker, self._queue.take(share))

    def end(self) -> None:
        """Stop sending closures. Unfinished ones fail with UnavailableError, and a message on stderr counts them.

        Called by: the coordinator's `end`, and the process's exit.
        """
        atexit.unregister(self.end)
        with self._lock:  # so that no other thread has taken a closure and not sent it
            self._ended = True
            left = UnavailableError("the strategy was shut down: its workers have left")
            waiting, under_way, error = self._queue.close(left)
        self._rpc.channel.wake()
        notes = []
        if waiting or under_way:
            notes.append(
                f"of the scheduled functions {waiting} were not executed, and {under_way} may or may not have been"
            )
        if error is not None:
            notes.append(f"one function raised {type(error).__name__}: {error!s:.300}")
        if notes:
            text = "; ".join(notes)
            tell(f"the chief came to its end without ClusterCoordinator.join(): {text}", "ERROR")

    def _send(self, worker: _LivingWorker, closures: list[Closure]) -> None:
        if not closures:
            return
        needed: dict[int, bytes] = {}
        for closure in closures:
            worker.in_hand[closure.id] = closure
            closure.result.worker = worker.index
            for resource in closure.resources:
                if resource.id not in worker.known:
                    worker.known.add(resource.id)
                    needed[resource.id] = resource.packed_for(worker.index)
        while self._resources.dropped:
            dropped = self._resources.dropped.popleft()
            for other in self._workers.values():
                if dropped in other.known:
                    other.known.remove(dropped)
                    other.dropped.append(dropped)
        body = [(closure.id, closure.name, closure.payload) for closure in closures]
        dropping = worker.dropped
        worker.dropped = []
        self._rpc.notify(worker.rank, CLOSURES, (needed, dropping, body))

    def _take_outcomes(self, source: int, body: Any) -> None:
        outcomes, seconds = body
        with self._lock:
            worker = self._workers.get(source)
            if worker is None or self._ended:  # a dead worker: others have its closures
                return
            worker.took(seconds / len(outcomes))
            name = self._rpc.name_of(source)
            ended = []
            for closure, packed, failure in outcomes:
                error = None
                if failure is not None:
                    error = unpack_error(failure, name, self._cluster.references.resolve)
                ended.append((worker.in_hand.pop(closure), packed, error))
            self._queue.end(ended)
            over, over_before = self._queue.over(_FEWEST_OVER)
            if over:
                self._cluster.over(over, over_before)
            self.hand_out()

    def _take_back(self, source: int, ids: Any) -> None:
        with self._lock:
            worker = self._workers.get(source)
            if worker is None:
                return
            worker.took(SECONDS_TO_KEEP)
            self._queue.put_back([worker.in_hand.pop(closure) for closure in ids])
            self.hand_out()

    def _lose(self, rank: int) -> None:
        if self._cluster.is_needed(rank):
            self._queue.close(self._rpc.death_error(rank))
            return
        with self._lock:
            worker = self._workers.pop(rank, None)
            if worker is None:
                return
            closures = list(worker.in_hand.values())
            for closure in closures:
                closure.repeated = True
            self._queue.put_back(closures)
            if not self._workers:
                name = self._rpc.name_of(rank)
                no_worker = UnavailableError(
                    f"no worker is left to execute closures: the last one, {name}, has died, "
                    "and under MPI none comes back"
                )
                self._queue.close(no_worker)
            self.hand_out()

    def _read(self) -> None:
        try:
            self._rpc.run_until(lambda: self._ended)
        except Exception as error:  # no other code would report it
            failed = UnavailableError(
                f"the chief cannot hear its workers any more: {type(error).__name__}: {error}"
            )
            failed.__cause__ = error
            self._queue.close(failed)


class _LivingWorker:
    """A living worker, as the chief sees it.

    Attributes:
        in_hand: the closures that the worker has got and not ended, by id, in order.
        ahead: the number of closures that the worker may have in hand.
        known: the ids of the resources that the worker has.
        dropped: the ids of resources that the worker must forget, sent with its next closures.
    """

    def __init__(self, index: int, rank: int) -> None:
        self.index = index
        self.rank = rank
        self.in_hand: dict[int, Closure] = {}
        self.ahead = 1
        self.known: set[int] = set()
        self.dropped: list[int] = []
        # Expected for a closure: a slow closure raises it at once, and later quick closures lower it bit by bit.
        self._seconds = 0.0

    def took(self, seconds: float) -> None:
        """Adapt `ahead` to the seconds that one closure of this worker has taken (the mean of a message's closures)."""
        self._seconds = max(seconds, 0.8 * self._seconds + 0.2 * seconds)
        expected = max(self._seconds, 1e-9)
        ahead = int(_SECONDS_AHEAD / expected)
        self.ahead = max(1, min(_MOST_AHEAD, ahead))
