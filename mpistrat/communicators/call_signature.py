"""What a collective is called with: its operation and what all ranks must give alike, as a tuple of few words."""

from __future__ import annotations

import functools
from typing import Any

from mpistrat.communicators.agreement import DIGEST_BITS
from mpistrat.flight_recorder.record import text_of


@functools.lru_cache(maxsize=4096)
def recorded(
    signature: tuple[Any, ...], file: str, function: str, line: int
) -> tuple[int, bytes, int]:
    """The digest of a signature, and what is recorded of the call."""
    import hashlib  # here, because it makes importing mpistrat slower

    hashed = hashlib.blake2b(repr(signature).encode(), digest_size=DIGEST_BITS // 8).digest()
    site = f"{file}:{line} in {function}"
    return int.from_bytes(hashed, "little"), *text_of(describe(signature), site)


def describe(signature: tuple[Any, ...]) -> str:
    """A collective as a user would write it."""
    operation, *rest = signature
    if operation == "raise":
        return f"raised {': '.join(rest)}"
    return f"{operation}({', '.join(str(part) for part in rest if part != '')})"


def explain_difference(everyone: list[tuple[tuple[Any, ...], str]], rank: int) -> str:
    """One line for each group of consecutive ranks that made the same call at the same place."""
    lines = []
    start = 0
    for r in range(1, len(everyone) + 1):
        if r == len(everyone) or everyone[r] != everyone[start]:
            ranks = f"rank {start}" if r == start + 1 else f"ranks {start}-{r - 1}"
            signature, site = everyone[start]
            lines.append(f"  {ranks}: {describe(signature)}\n      at {site}")
            start = r
    return (
        f"the ranks did not call the same collective (this is rank {rank} of {len(everyone)}):\n"
        + "\n".join(lines)
        + "\nEvery rank must make the same calls, in the same order, with the same shapes and dtypes."
    )
