"""Comparing clocks that are made up: what is found is wrong by no more than it says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.trace.clocks import ROUNDS, Alignment, Comparison, compare


class Clocks:
    """Ours, and another that is ahead, asked over a network whose delays are given by way and back."""

    def __init__(self, ahead: int, delays: list[tuple[int, int]]) -> None:
        self.time = 1_000_000_000
        self.ahead = ahead
        self.delays = iter(delays)

    def now(self) -> int:
        return self.time

    def ask(self) -> int:
        there, back = next(self.delays)
        self.time += there
        theirs = self.time + self.ahead
        self.time += back
        return theirs


def test_equal_delays_give_the_exact_difference() -> None:
    clocks = Clocks(-7_000_000_000, [(500, 500)] * ROUNDS)
    found = compare(clocks.ask, clocks.now)
    assert (found.ahead, found.error) == (-7_000_000_000, 500)


@pytest.mark.parametrize("best", [0, 7, ROUNDS - 1])
def test_the_shortest_round_trip_counts(best: int) -> None:
    """The others are late on their way back only, which a mean would take for a difference."""
    delays = [(1000, 900_000)] * ROUNDS
    delays[best] = (1000, 1000)
    clocks = Clocks(123_456, delays)
    found = compare(clocks.ask, clocks.now)
    assert (found.ahead, found.error) == (123_456, 1000)


@given(
    st.integers(-(10**15), 10**15),
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=20, max_size=20),
)
def test_the_error_is_as_large_as_it_says_at_most(
    ahead: int, delays: list[tuple[int, int]]
) -> None:
    clocks = Clocks(ahead, delays)
    found = compare(clocks.ask, clocks.now)
    assert abs(found.ahead - ahead) <= found.error
    assert found.error <= min(there + back for there, back in delays) // 2 + 1


def test_one_comparison_moves_all_times() -> None:
    aligned = Alignment([Comparison(1000, 50, 3)])
    assert [aligned(t) for t in (0, 1000, 10**12)] == [50, 1050, 10**12 + 50]
    assert aligned.error == 3


def test_drift_is_evened_out() -> None:
    """A clock that loses 10 us in a second, over an hour."""
    hour = 3_600_000_000_000
    aligned = Alignment([Comparison(hour, 500 + hour // 100_000, 2), Comparison(0, 500, 1)])
    for passed in (0, hour // 3, hour // 2, hour):
        assert aligned(passed) == passed + 500 + passed // 100_000
    assert aligned(-1) == 499
    assert aligned(hour + 7) == aligned(hour) + 7
    assert aligned.error == 2


def test_order_is_kept() -> None:
    """Two comparisons close to each other differ by their errors: times must not turn round."""
    aligned = Alignment([Comparison(1000, 900, 1000), Comparison(3000, -900, 1000)])
    times = [aligned(t) for t in range(0, 5000, 10)]
    assert times == sorted(times)
