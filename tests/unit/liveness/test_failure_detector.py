"""Who has not come to a collective."""

from pathlib import Path

from mpistrat.liveness.observer.failure_detector import find_ranks, waits
from mpistrat.liveness.observer.node_accounts import Account
from mpistrat.liveness.records import job_folder
from mpistrat.liveness.records.job_folder import JobFolder
from mpistrat.liveness.records.record import SINCE, text_of
from support.job_records import new_record


def test_who_is_missing(folders: Path) -> None:
    folder, _ = JobFolder.create("job-1234")
    records = [new_record(job_folder.record_of(folder.path, rank), rank) for rank in range(3)]
    for rank, calls in enumerate((3, 2, 3)):
        slot = records[rank].new_slot(7, 3)
        assert slot is not None
        records[rank].enter(slot, calls, *text_of("barrier()", "x.py:1 in f"))
        if rank == 1:
            records[rank].words[slot + SINCE] = 0
    (wait,) = waits(find_ranks(folder.path))
    assert wait.slot.calls == 3
    assert [rank.number for rank in wait.waiting] == [0, 2]
    assert [rank.number for rank in wait.missing] == [1]
    assert wait.elsewhere == 0


def test_who_has_come_and_does_not_wait_is_on_this_node(folders: Path) -> None:
    """As a rank that was stopped while its device was busy."""
    folder, _ = JobFolder.create("job-1234")
    for rank in range(2):
        record = new_record(job_folder.record_of(folder.path, rank), rank)
        slot = record.new_slot(7, 3)  # of three ranks
        assert slot is not None
        record.enter(slot, 3, *text_of("barrier()", "x.py:1 in f"))
        if rank == 1:
            record.words[slot + SINCE] = 0
    (wait,) = waits(find_ranks(folder.path))
    assert ([rank.number for rank in wait.waiting], wait.missing, wait.elsewhere) == ([0], [], 1)


def test_who_has_never_come_to_a_group_that_was_noted(folders: Path) -> None:
    """Rank 1, on this node, and rank 6, on another; rank 0 is in no such group."""
    folder, _ = JobFolder.create("job-1234")
    records = [new_record(job_folder.record_of(folder.path, rank), rank) for rank in range(3)]
    slot = records[2].new_slot(7, 4, first=1)
    assert slot is not None
    records[2].enter(slot, 1, *text_of("new_group([1, 2, 5, 6])", "x.py:1 in f"))
    job_folder.note_members(folder.path, 7, [1, 2, 5, 6])
    (wait,) = waits(find_ranks(folder.path))
    assert [rank.number for rank in wait.waiting] == [2]
    assert [rank.number for rank in wait.missing] == [1]
    assert wait.elsewhere == 2
    account = Account({"4": {}, "5": {"7": 1}, "6": {"8": 3}}, [])
    assert account.missing(wait.slot.group, wait.slot.calls, wait.members) == [6]
