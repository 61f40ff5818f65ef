from collections.abc import Callable, Iterator

import pytest

from support.parameter_servers.coordinated_threads import Threads


@pytest.fixture
def start() -> Iterator[Callable[[int], Threads]]:
    """A function that starts a coordinator with so many workers."""
    started: list[Threads] = []

    def start(workers: int = 2) -> Threads:
        started.append(Threads(workers))
        return started[-1]

    yield start
    for threads in started:
        threads.stop()
