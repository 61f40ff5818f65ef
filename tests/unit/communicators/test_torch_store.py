"""Where the nodes of a job meet."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpistrat.communicators.torch_store import Ranks, address_that_all_reach
from mpistrat.topology import Topology


class Comm:
    """Of rank 0; `answers` are those of the three ranks, for the first two of its addresses."""

    def __init__(self, *answers: list[bool] | None) -> None:
        self.answers = answers

    def bcast(self, offer: Any) -> Any:
        return ("10.0.0.1", "10.1.0.1"), *offer[1:]

    def allgather(self, _: Any) -> list[list[bool] | None]:
        return list(self.answers)


def rank_0(*answers: list[bool] | None) -> Ranks:
    topology = Topology.from_hosts(0, ["n1", "n2", "n3"], "mpi")
    return SimpleNamespace(comm=Comm(*answers), rank=0, topology=topology)  # type: ignore[return-value]


def test_the_first_address_that_all_nodes_reach() -> None:
    assert address_that_all_reach(rank_0(None, [True, True], [True, True])) == "10.0.0.1"
    assert address_that_all_reach(rank_0(None, [True, True], [False, True])) == "10.1.0.1"


def test_no_address_that_all_nodes_reach() -> None:
    with pytest.raises(RuntimeError) as raised:
        address_that_all_reach(rank_0(None, [False, True], [False, False]))
    assert "cannot connect to that of rank 0 (n1)" in str(raised.value)
    assert "\n  10.0.0.1 is not reached from n2, n3\n  10.1.0.1 is not reached from n3\n" in str(
        raised.value
    )
