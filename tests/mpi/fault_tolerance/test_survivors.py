"""Of those that go on without lost ranks what needs no loss; tests/launch kills ranks."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpistrat.fault_tolerance import survivors as survivors_module
from mpistrat.fault_tolerance.survivors import Survivors
from mpistrat.liveness.ending.job_end import job_end


@pytest.mark.parametrize("lost", [False, True])
def test_a_rank_that_is_lost_when_all_are_done(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    """MPI_Finalize might wait for it."""
    skipped: list[bool] = []
    monkeypatch.setattr(job_end(), "end_without_finalize", lambda: skipped.append(True))
    group = SimpleNamespace(stop_looking=lambda: None, has_lost=lambda: lost)
    monkeypatch.setattr(survivors_module, "RevocableGroup", lambda comm: group)
    comm: Any = SimpleNamespace(rank=0, size=2, Dup=lambda: None)
    Survivors(comm).end()
    assert skipped == [True] * lost


class SmallerComm:
    """Of which all ranks may have told their steps, and some may not know it: one was lost meanwhile."""

    def __init__(self, *agree: bool) -> None:
        self._agree = agree
        self.agreed_to: list[int] = []

    def allgather(self, step: int) -> list[int]:
        return [step, step + 1]

    def Ack_failed(self) -> int:  # noqa: N802
        return 0

    def Agree(self, flag: int) -> int:  # noqa: N802
        self.agreed_to.append(flag)
        return flag and self._agree[0]

    def Shrink(self) -> "SmallerComm":  # noqa: N802
        return SmallerComm(*self._agree[1:])


def test_ranks_go_on_when_all_know_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has heard all steps, but another has not, for one more rank was lost: it would shrink once more."""
    groups: list[Any] = []

    def group_of(comm: Any) -> Any:
        calls: list[str] = []
        groups.append(
            SimpleNamespace(
                comm=comm,
                calls=calls,
                revoke=lambda: calls.append("revoke"),
                stop_looking=lambda: calls.append("stop_looking"),
                has_lost=lambda: False,
            )
        )
        return groups[-1]

    monkeypatch.setattr(survivors_module, "RevocableGroup", group_of)
    monkeypatch.setattr(survivors_module, "discard", lambda comm: None)
    monkeypatch.setattr(survivors_module, "members", lambda comm, besides: [len(groups)])
    comm: Any = SimpleNamespace(rank=0, size=2, Dup=lambda: SmallerComm(True, False, True))
    assert Survivors(comm).go_on(7) == ([1, 2], 7)
    assert [group.calls for group in groups] == [["revoke", "stop_looking"]] * 2 + [[]]
    assert [group.comm.agreed_to for group in groups] == [[], [1], [1]]
