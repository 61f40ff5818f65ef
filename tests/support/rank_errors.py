"""What a call raised on every rank: for tests of errors that only some ranks cause. Every rank calls these."""

from collections.abc import Callable
from typing import Any

import mpistrat as ms


def errors_of_ranks(call: Callable[[], Any]) -> list[tuple[str, str, str]]:
    """Of what `call` raised, by rank: class, message, and class of the cause; "" where there is none."""
    from mpi4py import MPI

    mine = ("", "", "")
    try:
        call()
    except Exception as error:
        cause = type(error.__cause__).__name__ if error.__cause__ else ""
        mine = (type(error).__name__, str(error), cause)
    return MPI.COMM_WORLD.allgather(mine)


def assert_all_raise(own: str, faulty: int, call: Callable[[], Any]) -> None:
    """`call` fails with `own` on rank `faulty` alone; so all ranks raise the mismatch, which says that."""
    errors = errors_of_ranks(call)
    if len(errors) == 1:
        assert errors[0][0] == own, errors
        return
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}, errors
    assert all(f"rank {faulty}: raised {own}: " in message for _, message, _ in errors), errors
    assert [cause for _, _, cause in errors if cause] == [own]


def assert_usable(strategy: ms.Strategy) -> None:
    """The strategy's ranks still understand each other: every replica's 1 is added up."""
    import numpy as np

    total = strategy.reduce("sum", strategy.run(lambda: np.ones(3)), axis=None)
    assert total.tolist() == [strategy.num_replicas_in_sync] * 3
