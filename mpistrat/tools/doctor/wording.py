"""Write numbers in words."""

from __future__ import annotations


def bytes_in_words(number: float) -> str:
    """Return a number of bytes in words: "64 MB". Units of 1000, three digits."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def count(number: int, what: str) -> str:
    """Return a number with its noun: "1 core", "2 cores"."""
    return f"{number} {what}{'s' * (number != 1)}"
