"""When a job is over because a rank has left."""

from mpistrat.liveness.deadlines import COORDINATOR_WAITS_FOR_JOINT_EXITS
from mpistrat.liveness.ending.exit_coordinator import (
    ExitCoordinator,
    Left,
    Waits,
)


def left(rank: int, calls: dict[str, int], code: int = 0) -> Left:
    return Left(rank, f"rank {rank} of 3", f"called sys.exit({code})", code, calls)


def waits(rank: int, call: int, communicator: str = "a") -> Waits:
    return Waits(f"rank {rank} of 3", communicator, call, "barrier()\n      at x.py:1 in f")


def test_waiting_alone_is_no_reason() -> None:
    exit_coordinator = ExitCoordinator(3)
    exit_coordinator.receive(waits(0, 5), 0.0)
    assert exit_coordinator.verdict(1000.0) is None


def test_leaving_is_no_reason_while_nobody_waits() -> None:
    exit_coordinator = ExitCoordinator(3)
    exit_coordinator.receive(left(1, {"a": 4}), 0.0)
    exit_coordinator.receive(left(2, {"a": 4}), 0.0)
    assert exit_coordinator.verdict(1000.0) is None


def test_a_rank_left_that_another_waits_for() -> None:
    for order in (1, -1):
        exit_coordinator = ExitCoordinator(3)
        for message in (waits(0, 5), left(1, {"a": 4}))[::order]:
            assert exit_coordinator.verdict(0.0) is None
            exit_coordinator.receive(message, 0.0)
        assert exit_coordinator.verdict(0.0) == (
            "rank 1 of 3 called sys.exit(0), but another rank waits for it in a collective.\n"
            "  rank 1: left after collective number 4\n"
            "  rank 0 of 3: in collective number 5, barrier()\n      at x.py:1 in f\n"
            "Every rank must make the same calls. Did it skip some: another number of batches, a `return` or sys.exit()"
            " for one rank only, an `if rank == 0:` around a collective?",
            1,
        )


def test_old_waits_and_the_last_collective_are_no_reason() -> None:
    exit_coordinator = ExitCoordinator(3)
    exit_coordinator.receive(waits(0, 3), 0.0)
    exit_coordinator.receive(waits(0, 4), 0.0)  # which rank 1 had entered when it left
    exit_coordinator.receive(left(1, {"a": 4}), 0.0)
    assert exit_coordinator.verdict(1000.0) is None


def test_ranks_that_are_not_members_are_not_missed() -> None:
    exit_coordinator = ExitCoordinator(3)
    exit_coordinator.receive(waits(0, 7, "a"), 0.0)
    exit_coordinator.receive(left(1, {"b": 2}), 0.0)
    assert exit_coordinator.verdict(1000.0) is None
    exit_coordinator.receive(waits(2, 3, "b"), 0.0)
    text, _ = exit_coordinator.verdict(0.0) or ("", 0)
    assert "rank 1: left after collective number 2" in text
    assert "rank 2 of 3: in collective number 3" in text


def test_many_ranks_that_left_are_one_line() -> None:
    exit_coordinator = ExitCoordinator(1000)
    exit_coordinator.receive(waits(0, 5), 0.0)
    for rank in range(1, 500):
        exit_coordinator.receive(left(rank, {"a": 4}, code=6 if rank == 300 else 0), 0.0)
    text, code = exit_coordinator.verdict(0.0) or ("", 0)
    assert code == 6
    assert "(so did ranks 2, 3, 4, 5, 6, 7, 8, 9, …)" in text


def test_a_failing_exit_is_a_reason_unless_all_leave() -> None:
    exit_coordinator = ExitCoordinator(3)
    exit_coordinator.receive(left(0, {"a": 4}), 0.0)
    exit_coordinator.receive(left(1, {"a": 4}, code=3), 1.0)
    assert exit_coordinator.verdict(1.0 + COORDINATOR_WAITS_FOR_JOINT_EXITS / 2) is None
    assert exit_coordinator.verdict(1.1 + COORDINATOR_WAITS_FOR_JOINT_EXITS) == (
        "rank 1 of 3 called sys.exit(3) while 1 of 3 ranks still worked",
        3,
    )
    exit_coordinator.receive(left(2, {"a": 4}), 3.0)
    assert exit_coordinator.all_left()
    assert exit_coordinator.verdict(1000.0) is None


def test_what_a_rank_would_raise_on_all_is_told() -> None:
    exit_coordinator = ExitCoordinator(2)
    raising = Waits(
        "rank 0 of 2", "a", 5, "raised E\n      at x.py:1 in f", "E: why\nmpistrat: mend it"
    )
    for message in (raising, left(1, {"a": 4})):
        exit_coordinator.receive(message, 0.0)
    text, _ = exit_coordinator.verdict(0.0) or ("", 0)
    assert text.endswith("raised E\n      at x.py:1 in f\nE: why\nmpistrat: mend it")
