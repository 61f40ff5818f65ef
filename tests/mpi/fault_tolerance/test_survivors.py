"""Of those that go on without lost ranks what needs no loss; tests/launch kills ranks."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpistrat.communicators import job_end
from mpistrat.fault_tolerance.survivors import Survivors


@pytest.mark.parametrize("lost", [False, True])
def test_a_rank_that_is_lost_when_all_are_done(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    """MPI_Finalize might wait for it."""
    skipped: list[bool] = []
    monkeypatch.setattr(job_end, "end_without_finalize", lambda: skipped.append(True))
    survivors: Any = Survivors.__new__(Survivors)
    survivors._family = SimpleNamespace(stop_looking=lambda: None, has_lost=lambda: lost)
    survivors.end()
    assert skipped == [True] * lost
