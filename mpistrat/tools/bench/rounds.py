"""Comparing contestants in one run: rounds in which all take their turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from mpistrat.communicators import Communicator
from mpistrat.strategies import MultiWorkerMirroredStrategy

ROUNDS = 9
# As long as a contestant's turn should last, where its calls are not counted out.
SECONDS_PER_TURN = 0.1


def all_ranks() -> Communicator:
    """The communicator of all ranks of the job. Called by: every rank."""
    return MultiWorkerMirroredStrategy().extended.communicator


def compare(
    contestants: Mapping[str, Callable[[], object]],
    repeat: int | None = None,
    num_rounds: int = ROUNDS,
) -> dict[str, list[float]]:
    """Microseconds per call, of each round; a round times `repeat` calls of each contestant in turn.

    Called by: every rank. A turn's time is the slowest rank's. `repeat`: None for as many as 0.1 s allow.
    """
    communicator = all_ranks()
    rounds: dict[str, list[float]] = {name: [] for name in contestants}
    for call in contestants.values():
        for _ in range(max(2, (repeat or 1) // 10)):
            call()

    def turn(call: Callable[[], object], calls: int) -> float:
        communicator.barrier()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return max(communicator.all_gather_object(time.perf_counter() - started)) / calls

    if repeat is None:
        longest = max(turn(call, 1) for call in contestants.values())
        repeat = max(1, round(SECONDS_PER_TURN / longest))
    for _ in range(num_rounds):
        for name, call in contestants.items():
            rounds[name].append(turn(call, repeat) * 1e6)
    return rounds


def medians(rounds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median round of each contestant."""
    return {name: statistics.median(times) for name, times in rounds.items()}
