"""A coordinator whose workers are threads of this process: everything but the transport is real."""

from __future__ import annotations

import contextlib
import math
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from mpistrat.coordinator import ClusterCoordinator
from mpistrat.parameter_server.coordinator.dispatcher import Cluster
from mpistrat.parameter_server.coordinator.worker import Worker

_DEATH = "death"

Handler = Callable[[int, Any], None]


class ThreadsRpc:
    """As `RpcEndpoint`, between threads. Notices are pickled."""

    def __init__(self, rank: int, job: dict[int, ThreadsRpc]) -> None:
        self.rank = rank
        self.job = job
        self.channel = SimpleNamespace(
            lost=set(), wake=lambda: self.inbox.put(None), unsent=lambda to: []
        )
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.handlers: dict[str, Handler] = {}
        self.when_lost: list[Callable[[int], None]] = []
        self.dead = False
        self.notices: list[str] = []  # kinds of notices
        job[rank] = self

    def name_of(self, rank: int) -> str:
        return f"worker {rank - 1} (rank {rank})" if rank else "chief 0 (rank 0)"

    def handle(self, kind: str, handler: Handler) -> None:
        self.handlers[kind] = handler

    def on_lost(self, handler: Callable[[int], None]) -> None:
        self.when_lost.append(handler)

    def notify(self, to: int, kind: str, body: Any = None) -> None:
        if not self.dead:
            self.notices.append(kind)
            message = (self.rank, kind, pickle.dumps(body))
            self.job[to].inbox.put(message)

    def run_until(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        end = math.inf
        timeout = 0.01
        if seconds is not None:
            end = time.monotonic() + seconds
            timeout = seconds
        while not until():
            if time.monotonic() >= end:
                return False
            try:
                message = self.inbox.get(timeout=timeout)
            except queue.Empty:  # or another thread has read what this one waits for
                continue
            if message is None or self.dead:
                continue
            source, kind, body = message
            if kind == _DEATH:
                self.channel.lost.add(source)
                for handler in self.when_lost:
                    handler(source)
            else:
                self.handlers[kind](source, pickle.loads(body))
        return True


class Things:
    """Objects that every rank has."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}

    def reference_of(self, value: Any) -> str | None:
        for name, known in self.by_name.items():
            if known is value:
                return name
        return None

    def resolve(self, key: str) -> Any:
        return self.by_name[key]

    def reduction_of(self, value: Any) -> None:
        return None


class Threads:
    """A chief and its workers.

    Attributes:
        coordinator: of the chief.
        begun: (worker, id) of each closure, as they were.
        over: what the servers were told.
        things: that travel by reference.
    """

    def __init__(self, workers: int) -> None:
        self.job: dict[int, ThreadsRpc] = {}
        self.things = Things()
        self.begun: list[tuple[int, int]] = []
        self.over: list[tuple[list[int], int]] = []
        self.chief = ThreadsRpc(0, self.job)
        self._ended = False
        for index in range(workers):
            self._start(index)
        cluster = Cluster(
            rpc=self.chief,  # type: ignore[arg-type]
            workers=range(1, workers + 1),
            references=self.things,
            over=lambda over, before: self.over.append((over, before)),
            joined=lambda: None,
            is_needed=lambda rank: False,
        )
        strategy: Any = SimpleNamespace(extended=SimpleNamespace(cluster=cluster))
        self.strategy = strategy
        self.coordinator = ClusterCoordinator(strategy)

    def _start(self, index: int) -> None:
        @contextlib.contextmanager
        def in_closure(closure: int) -> Iterator[Callable[[], None]]:
            self.begun.append((index, closure))
            yield lambda: None

        rpc = ThreadsRpc(index + 1, self.job)
        worker = Worker(
            rpc,  # type: ignore[arg-type]
            chief=0,
            index=index,
            references=self.things,
            in_closure=in_closure,
        )
        threading.Thread(
            target=worker.serve, args=(lambda: self._ended or rpc.dead,), daemon=True
        ).start()

    def kill(self, worker: int) -> None:
        """It is not heard of again; what it executes goes on in vain."""
        self.job[worker + 1].dead = True
        self.job[worker + 1].inbox.put(None)
        self.chief.inbox.put((worker + 1, _DEATH, None))

    def stop(self) -> None:
        self._ended = True
        self.coordinator.end()
        for rpc in self.job.values():
            rpc.inbox.put(None)


def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until it is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never was"
        time.sleep(0.002)
