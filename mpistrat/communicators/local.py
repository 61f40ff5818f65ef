"""The communicator of one rank."""

from __future__ import annotations

from typing import Any

from mpistrat.communicators.collective_calls import CollectiveCalls
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.communicator import Communicator


class LocalCommunicator(CollectiveCalls):
    """A group of one rank, without MPI. Collectives with an `out` copy `buffer` into it.

    Reductions apply their scale. `all_gather` returns a list with `buffer` itself, and `split` returns this object.
    """

    rank = 0
    size = 1
    takes_device_buffers = True

    def make(
        self, collective: Collective, cause: Exception | None = None, follows: bool = False
    ) -> Any:
        collective.check(1)
        return collective.alone()

    def explain(self) -> str:
        return "one rank: nothing moves"

    def broadcast_object(self, value: Any, root: int = 0, *, label: str = "") -> Any:
        return value

    def all_gather_object(self, value: Any, *, label: str = "") -> list[Any]:
        return [value]

    def barrier(self, *, label: str = "") -> None:
        pass

    def split(self, color: int, key: int = 0) -> Communicator:
        return self
