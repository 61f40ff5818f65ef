"""Numbers and ranks in words."""

from __future__ import annotations

from collections.abc import Iterable


def ranks_in_words(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0-3, 7"."""
    numbers = sorted(ranks)
    return f"rank{'s' * (len(numbers) > 1)} {runs_in_words(numbers)}"


def runs_in_words(numbers: Iterable[int]) -> str:
    """ "0-3, 7" """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def bytes_in_words(number: float) -> str:
    """ "64 MB": units of 1000, three digits."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def count(number: int, what: str) -> str:
    """ "1 core", "2 cores" """
    return f"{number} {what}{'s' * (number != 1)}"
