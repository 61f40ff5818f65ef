"""Lines through times, what one way gains over another, and how times grow with nodes."""

import math

import pytest

from mpistrat.communicators.costs.model import (
    Cost,
    fitted,
    fitted_in_two,
    link,
    over_nodes,
    slowest,
)

SIZES = [1 << k for k in range(15, 23)]


def test_a_line_is_found() -> None:
    cost = fitted(SIZES, [2e-5 + 3e-10 * nbytes for nbytes in SIZES])
    assert cost.alpha == pytest.approx(2e-5)
    assert cost.beta == pytest.approx(3e-10)
    assert cost.error == pytest.approx(0, abs=1e-9)
    assert cost.seconds(1 << 20) == pytest.approx(2e-5 + 3e-10 * (1 << 20))
    assert str(cost) == "20 us + 0.3 ns per byte (3.33 GB/s), fitted within 0 %"


def test_errors_count_by_their_part_of_the_time() -> None:
    """The best for three points, by hand: of 1 % up and down at both ends, whatever their sizes."""
    sizes = [1, 10**9]
    noisy = fitted([*sizes, *sizes], [0.99e-5, 0.99, 1.01e-5, 1.01])
    assert noisy.alpha == pytest.approx(1e-5, rel=1e-3)
    assert noisy.beta == pytest.approx(1e-9, rel=1e-3)
    assert noisy.error == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize(
    ("seconds", "alpha", "beta"),
    [
        ([1.0, 4.0], 0.0, (1 / 1 + 2 / 4) / (1 + 4 / 16)),
        ([4.0, 1.0], (1 / 4 + 1) / (1 / 16 + 1), 0.0),
    ],
)
def test_no_term_is_negative(seconds: list[float], alpha: float, beta: float) -> None:
    cost = fitted([1, 2], seconds)
    assert (cost.alpha, cost.beta) == (pytest.approx(alpha), pytest.approx(beta))
    assert cost.error > 0.1


def test_from_which_size_on_one_is_cheaper() -> None:
    memory, mpi = Cost(20e-6, 0.1e-9), Cost(10e-6, 0.3e-9)
    size = memory.cheaper_from(mpi)
    assert size == pytest.approx(50_000)
    assert memory.seconds(size) == pytest.approx(mpi.seconds(size))
    assert mpi.cheaper_from(memory) == math.inf
    assert Cost(1e-6, 0.1e-9).cheaper_from(mpi) == 0
    assert mpi.cheaper_from(mpi) == 0
    assert Cost(2.0, 1.0).cheaper_from(Cost(1.0, 1.0)) == math.inf


def test_costs_are_put_together() -> None:
    parts = [Cost(1.0, 20.0, 0.1), Cost(3.0, 4.0, 0.05)]
    assert parts[0].followed_by(parts[1]) == Cost(4.0, 24.0, 0.1)
    assert slowest(parts) == Cost(3.0, 20.0, 0.1)


def test_where_the_caches_end() -> None:
    seconds = [max(1e-5 + 1e-10 * nbytes, 3e-10 * nbytes - 1e-4) for nbytes in SIZES]
    end, lower, upper = fitted_in_two(SIZES, seconds)
    assert end == 1 << 19  # the lines meet at 550,000 bytes
    assert lower.beta == pytest.approx(1e-10)
    assert upper.seconds(SIZES[-1]) == pytest.approx(seconds[-1], rel=0.2)
    assert lower.error < 1e-9


@pytest.mark.parametrize(
    ("nodes", "steps", "crossings"), [(2, 2, 1), (3, 4, 4 / 3), (16, 8, 15 / 8)]
)
def test_between_nodes(nodes: int, steps: int, crossings: float) -> None:
    """Rabenseifner's: 2 log2(N) messages, and 2 (N - 1) / N of the bytes."""
    cost = over_nodes(nodes, 3e-6, 2e-10)
    assert cost.alpha == pytest.approx(steps * 3e-6)
    assert cost.beta == pytest.approx(crossings * 2e-10)
    assert link(cost, nodes) == (pytest.approx(3e-6), pytest.approx(2e-10))
