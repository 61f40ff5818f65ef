"""What the ranks of programs/preempted.py have noted, and what must be true of it."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

PROGRAM = Path(__file__).parent / "programs" / "preempted.py"


def until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def starts_of(folder: Path, ranks: int) -> list[list[tuple[int, int]]]:
    """By rank, for each start: steps restored, and steps done at its end."""
    found = []
    for rank in range(ranks):
        file = folder / f"rank{rank}"
        starts: list[tuple[int, int]] = []
        for line in file.read_text().splitlines() if file.exists() else []:
            what, _, number = line.partition(" ")
            if what == "start":
                starts.append((int(number), int(number)))
            elif what == "step":
                starts[-1] = (starts[-1][0], int(number))
        found.append(starts)
    return found


def steps_done(folder: Path, ranks: int) -> int:
    """Of the rank that is least far, in its last start."""
    return min((starts[-1][1] if starts else 0) for starts in starts_of(folder, ranks))


def check_resumed(folder: Path, ranks: int, starts: int, undisturbed: Path) -> int:
    """The training came to its end after so many starts, with the same bits; returns the most steps lost at once."""
    by_rank = starts_of(folder, ranks)
    assert [len(item) for item in by_rank] == [starts] * ranks
    assert all(item == by_rank[0] for item in by_rank), "the ranks did not stop at the same steps"
    lost = [before[1] - after[0] for before, after in zip(by_rank[0], by_rank[0][1:], strict=False)]
    assert all(0 <= item <= 1 for item in lost), f"steps lost: {lost}"
    assert np.array_equal(np.load(folder / "final.npy"), np.load(undisturbed / "final.npy"))
    return max(lost, default=0)
