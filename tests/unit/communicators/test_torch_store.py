"""Where the nodes of a job meet."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from mpistrat.communicators import torch_store
from mpistrat.communicators.torch_store import Ranks, address_that_all_reach
from mpistrat.machine.addresses import listen
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


@pytest.mark.parametrize(("chosen", "inside"), [(0, 0), (1, 2), (2, 2)])
def test_the_level_of_torch_s_log(
    monkeypatch: pytest.MonkeyPatch, chosen: int, inside: int
) -> None:
    """While a store connects, warnings are kept back, but where the user wants to see more; also if it fails."""
    level, seen = torch_store.level_of_log(), []

    def connect(*_: object, master_listen_fd: int) -> None:
        os.close(master_listen_fd)
        seen.append(torch_store.level_of_log().value)
        raise RuntimeError("no route to host")

    monkeypatch.setattr(torch_store.c10d, "TCPStore", connect)
    before, level.value = level.value, chosen
    try:
        with pytest.raises(RuntimeError, match="no route"):
            torch_store.store_at(listen(torch_store.LOOPBACK), 2)
        assert (seen, level.value) == ([inside], chosen)
    finally:
        level.value = before
    assert before == 1, (
        "torch's default; the test shows nothing where this torch does not show its level"
    )
