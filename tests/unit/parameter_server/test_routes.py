"""Where a request goes when servers die."""

import re
from typing import Any

import pytest

from mpistrat.errors import UnavailableError
from mpistrat.parameter_server.protocol.routes import Routes
from mpistrat.parameter_server.rpc.channel import LOST
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint

SERVERS = (1, 2)


class Channel:
    """Of rank 0: batches of messages that come, and who can be seen to have died, before that is read or after."""

    rank = 0
    size = 3

    def __init__(self) -> None:
        self.coming: list[list[tuple[int, Any]]] = []
        self.lost: set[int] = set()
        self.dead: set[int] = set()
        self.sent: list[tuple[int, Any]] = []

    def send(self, to: int, message: Any) -> None:
        self.sent.append((to, message))

    def receive(self, seconds: float | None) -> list[tuple[int, Any]]:
        batch = self.coming.pop(0)
        self.lost.update(source for source, message in batch if message is LOST)
        return batch

    def shares_memory_with(self, rank: int) -> bool:
        return False

    def has_died(self, rank: int) -> bool:
        return rank in self.lost | self.dead


@pytest.mark.parametrize("second", ["lives", "died before", "died after"])
def test_the_error_tells_of_both_servers(second: str) -> None:
    """The second one may die after the first one's death was read, and before its answer is waited for."""
    channel: Any = Channel()
    rpc = RpcEndpoint(channel)
    routes = Routes(rpc, SERVERS, replicated=True)
    rpc.describe_death = lambda rank: (
        f"rank {rank} has died, "
        + ("with the last copy" if routes.is_lost_with(rank) else "the other goes on")
    )
    request = routes.call(1, "pull", None)
    if second == "died before":
        channel.dead.add(2)
    channel.coming = [[(1, LOST)]]
    rpc.run_until(lambda: request.come)
    if second == "died after":
        channel.dead.add(2)
    if second == "lives":
        with pytest.raises(
            IndexError
        ):  # it waits for the answer of the other server, of which nothing comes
            request.wait()
        assert [to for to, _ in channel.sent] == [1, 2]
    else:
        with pytest.raises(
            UnavailableError, match=re.escape("rank 1 has died, with the last copy")
        ):
            request.wait()
        assert [to for to, _ in channel.sent] == [1]
