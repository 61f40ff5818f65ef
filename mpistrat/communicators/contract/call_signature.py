"""The signature of a call: its operation and what must be equal on all ranks, as a tuple of few words."""

from __future__ import annotations

import functools
from typing import Any

from mpistrat.errors import CollectiveMismatchError
from mpistrat.liveness.records.record import text_of

# The rest of a word of 64 bits is the call's number.
DIGEST_BITS = 56
# Places whose texts a signature keeps; if a program makes a call at more places, texts are made again.
_MOST_SITES = 256


class CallSignature:
    """A kind of call. It is made once, and looked up when the program makes such a call again.

    Attributes:
        words: the operation, then what the ranks must agree on.
        digest: a hash of the words, equal on ranks that make the same call.
        texts: what the record keeps of this call, by file, function and line of the program; see `record.text_of`.
    """

    __slots__ = ("digest", "texts", "words")

    def __init__(self, words: tuple[Any, ...]) -> None:
        import hashlib  # here, because it makes importing mpistrat slower

        hashed = hashlib.blake2b(repr(words).encode(), digest_size=DIGEST_BITS // 8).digest()
        self.words = words
        self.digest = int.from_bytes(hashed, "little")
        self.texts: dict[tuple[str, str, int], tuple[bytes, int]] = {}

    def learn(self, site: tuple[str, str, int]) -> tuple[bytes, int]:
        """Make the text of a call that the program makes at `site` for the first time."""
        if len(self.texts) == _MOST_SITES:
            self.texts.clear()
        file, function, line = site
        text = self.texts[site] = text_of(str(self), f"{file}:{line} in {function}")
        return text

    def __str__(self) -> str:
        return describe(self.words)


signature_of = functools.lru_cache(maxsize=4096)(CallSignature)


def describe(words: tuple[Any, ...]) -> str:
    """The call as a user would write it."""
    operation, *rest = words
    if operation == "raise":
        return f"raised {': '.join(rest)}"
    if f"{operation}()" in rest:  # the program's call, which has no operands
        return f"{operation}()"
    if rest[:1] == ["sum"] and any(str(w).startswith(("MEAN", "SUM of mean ")) for w in rest):
        rest[0] = "mean"  # which the program asked for: a sum that each rank divides
    return f"{operation}({', '.join(str(part) for part in rest if part != '')})"


def mismatch(everyone: list[tuple[tuple[Any, ...], str]], rank: int) -> CollectiveMismatchError:
    """With one line for each group of consecutive ranks that made the same call at the same place."""
    lines = []
    start, raised = 0, ""
    for r in range(1, len(everyone) + 1):
        if r == len(everyone) or everyone[r] != everyone[start]:
            ranks = f"rank {start}" if r == start + 1 else f"ranks {start}-{r - 1}"
            words, site = everyone[start]
            lines.append(f"  {ranks}: {describe(words)}\n      at {site}")
            if words[0] == "raise":
                _, kind, message = words
                raised += f"{site} ({ranks}): {message or kind}\n"
            start = r
    error = CollectiveMismatchError(
        f"the ranks did not call the same collective (this is rank {rank} of {len(everyone)}):\n"
        + "\n".join(lines)
        + "\nEvery rank must make the same calls, in the same order, with the same shapes and dtypes."
    )
    error.raised_by_rank = raised
    return error
