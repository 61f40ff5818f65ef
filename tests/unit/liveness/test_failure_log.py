"""What ranks that fail tell each other. Each rank of a test is a thread: locks are of open files."""

import threading
import time
from pathlib import Path

import pytest

from mpistrat.liveness import deadlines
from mpistrat.liveness.records import failure_log
from mpistrat.liveness.records.failure_log import FailureLog, NotedFailure, as_of_any_rank


@pytest.fixture(autouse=True)
def _on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "RANK_WAITS_FOR_NEXT_FAILURE", 0.6)
    monkeypatch.setattr(deadlines, "RANK_WAITS_FOR_ALL_FAILURES", 3.0)


class OtherNode:
    """The one in the next of two folders."""

    def __init__(self, folder: Path, *, is_first_node: bool) -> None:
        self._log, self.is_first_node = FailureLog(str(folder), 0, 4), is_first_node

    def tell_failure(self, failure: NotedFailure) -> None:
        self._log.note(failure)


def ended(
    folder: Path, size: int, errors: dict[int, str], *, nodes: int = 1
) -> tuple[list[int], list[str]]:
    """The ranks that have said their error, and the summaries, when the ranks of `errors` have ended with these."""
    folders = [folder / str(node) for node in range(nodes)]
    for each in folders:
        each.mkdir(exist_ok=True)
    said: list[int] = []
    summaries: list[str] = []

    def end(rank: int) -> None:
        node = rank * nodes // size
        others = OtherNode(folders[1 - node], is_first_node=node == 0) if nodes > 1 else None
        log = FailureLog(str(folders[node]), rank, size, others)
        log.add(errors[rank], lambda _: said.append(rank))
        summaries.append(log.sum_up())

    threads = [threading.Thread(target=end, args=[rank]) for rank in errors]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    return said, [text for text in summaries if text]


def test_an_error_of_all_ranks(tmp_path: Path) -> None:
    started = time.monotonic()
    said, summaries = ended(tmp_path, 4, dict.fromkeys(range(4), "a"))
    assert (said, summaries) == ([0], ["mpistrat: the same error on ranks 0-3\n"])
    assert time.monotonic() - started < 0.5  # waits for no other


def test_different_errors(tmp_path: Path) -> None:
    said, summaries = ended(tmp_path, 5, {3: "a", 0: "b", 1: "a", 4: "c", 2: "a"})
    assert said == [3, 0, 4]
    assert summaries == ["mpistrat: the error of rank 3: on ranks 1-3\n"]


def test_an_error_of_two_nodes(tmp_path: Path) -> None:
    """The first node speaks, also where a rank of the other has failed before."""
    said, summaries = ended(tmp_path, 4, dict.fromkeys((3, 0, 1, 2), "a"), nodes=2)
    assert (said, summaries[0]) == ([0], "mpistrat: the same error on ranks 0-3\n")


def test_different_errors_of_two_nodes(tmp_path: Path) -> None:
    said, summaries = ended(tmp_path, 4, {3: "a", 0: "b", 1: "b", 2: "a"}, nodes=2)
    assert said == [0, 3]
    assert sorted(summaries[0].splitlines()) == [
        "mpistrat: the error of rank 0: on ranks 0-1",
        "mpistrat: the error of rank 3: on ranks 2-3",
    ]


def test_ranks_that_name_one_of_them_or_each_itself(tmp_path: Path) -> None:
    errors = {0: "raw.of-0", 1: "raw.of-1", 2: "raw.own", 3: "other.own"}
    said, summaries = ended(tmp_path, 4, errors)
    assert said == [0, 3]
    assert summaries[0].startswith("mpistrat: the error of rank 0: on ranks 0-2\n")


def test_a_rank_that_has_heard_of_an_error_leaves_it_to_that_rank(tmp_path: Path) -> None:
    said: list[int] = []
    second = FailureLog(str(tmp_path), 1, 2)
    arguments = [failure_log.OF_ANOTHER_RANK, lambda _: said.append(1), 10.0]
    thread = threading.Thread(target=second.add, args=arguments)
    thread.start()
    first = FailureLog(str(tmp_path), 0, 2)
    first.add("a.b", lambda _: said.append(0))
    thread.join()
    assert (said, first.sum_up("mend it\n"), second.sum_up("mend it\n")) == ([0], "mend it\n", "")


def test_a_rank_alone(tmp_path: Path) -> None:
    started = time.monotonic()
    assert ended(tmp_path, 4, {2: "a"}) == ([2], [])
    assert time.monotonic() - started < 2.0


def test_what_failed_long_ago_is_another_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have gone on without that rank."""
    monkeypatch.setattr(deadlines, "NOTED_FAILURE_COUNTS", 0.3)
    assert ended(tmp_path, 4, {2: "a"}) == ([2], [])
    time.sleep(0.3)
    assert ended(tmp_path, 4, {1: "a"}) == ([1], [])


def test_a_rank_that_hangs_while_it_speaks_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "RANK_WAITS_FOR_LOCK_OF_FAILURES", 0.1)
    hangs, said = threading.Event(), []
    first = FailureLog(str(tmp_path), 0, 2)
    thread = threading.Thread(target=first.add, args=["a", lambda _: hangs.wait()])
    thread.start()
    time.sleep(0.05)
    started = time.monotonic()
    second = FailureLog(str(tmp_path), 1, 2)
    second.add("a", lambda _: said.append(1))
    assert (said, second.sum_up()) == ([1], "mpistrat: the same error on ranks 0-1\n")
    assert time.monotonic() - started < 0.9
    hangs.set()
    thread.join()


def test_another_rank_is_left_time_to_speak(tmp_path: Path) -> None:
    said: list[int] = []
    second = FailureLog(str(tmp_path), 1, 2)
    thread = threading.Thread(target=second.add, args=["a", lambda _: said.append(1), 10.0])
    thread.start()
    FailureLog(str(tmp_path), 0, 2).add("a", lambda _: said.append(0))
    thread.join()
    assert said == [0]


CODE = 'Traceback (most recent call last):\n  File "train.py", line 3, in f\n    g(rank=0)\n'


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ValueError: wrong", "ValueError: wrong"),
        ("ValueError: wrong on rank 0", "ValueError: wrong on rank 1"),
        ("TopologyError: (PMI_SIZE=2, PMI_RANK=0)", "TopologyError: (PMI_SIZE=2, PMI_RANK=1)"),
        ("ValueError: rank 0 has 3, rank 1 has 4", "ValueError: rank 0 has 3, rank 1 has 4"),
        ("TypeError: <A object at 0x7f12>", "TypeError: <A object at 0x7f34>"),
        ("[rank0]: ValueError: wrong", "[rank1]: ValueError: wrong"),
    ],
)
def test_the_same_error(first: str, second: str) -> None:
    assert as_of_any_rank(CODE + first, 0) == as_of_any_rank(CODE + second, 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ValueError: wrong", "TypeError: wrong"),
        ("ValueError: rank 1 is wrong", "ValueError: rank 2 is wrong"),
        ("ValueError: 0 rows", "ValueError: 1 rows"),
    ],
)
def test_other_errors(first: str, second: str) -> None:
    assert as_of_any_rank(CODE + first, 0) != as_of_any_rank(CODE + second, 1)
