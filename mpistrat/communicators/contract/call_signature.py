"""The signature of a call: a tuple with its operation and the few words that must be equal on all ranks."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from mpistrat.errors import CollectiveMismatchError
from mpistrat.liveness.records.record import text_of

# The other bits of a 64-bit word hold the call's number.
DIGEST_BITS = 56
# A signature keeps the texts of this many places; at more places it makes the texts again.
_MOST_SITES = 256


class _TextsOfCall(dict[tuple[str, str, int], tuple[bytes, int]]):
    """Texts of one call for the record, by (file, function, line). It makes a text at the place's first call."""

    def __init__(self, words: tuple[Any, ...]) -> None:
        self._words = words

    def __missing__(self, site: tuple[str, str, int]) -> tuple[bytes, int]:
        if len(self) == _MOST_SITES:
            self.clear()
        file, function, line = site
        text = self[site] = text_of(describe(self._words), f"{file}:{line} in {function}")
        return text


class CallSignature:
    """A kind of call. It is made once, and looked up when the program makes such a call again.

    Attributes:
        words: the operation, followed by the words that the ranks must agree on.
        digest: a hash of `words`, of `DIGEST_BITS` bits; equal on ranks that make the same call.
        texts: the call's text and the length of its name, for the record, by the place in the program; see
            `record.text_of`.
    """

    __slots__ = ("digest", "texts", "words")

    def __init__(self, words: tuple[Any, ...]) -> None:
        import hashlib  # here, because it would slow down `import mpistrat`

        hashed = hashlib.blake2b(repr(words).encode(), digest_size=DIGEST_BITS // 8).digest()
        self.words = words
        self.digest = int.from_bytes(hashed, "little")
        self.texts = _TextsOfCall(words)

    def __str__(self) -> str:
        return describe(self.words)


signature_of = functools.lru_cache(maxsize=4096)(CallSignature)


def describe(words: tuple[Any, ...]) -> str:
    """Return the call as a user would write it."""
    operation, *rest = words
    if operation == "raise":
        return f"raised {': '.join(rest)}"
    if f"{operation}()" in rest:  # the user's call has no operands
        return f"{operation}()"
    if rest[:1] == ["sum"] and any(str(w).startswith(("MEAN", "SUM of mean ")) for w in rest):
        rest[0] = "mean"  # the user asked for a mean: a sum that each rank divides
    return f"{operation}({', '.join(str(part) for part in rest if part != '')})"


def mismatch(calls: list[tuple[tuple[Any, ...], str]], rank: int) -> CollectiveMismatchError:
    """Return an error that shows one line for each run of consecutive ranks that made the same call at the same place.

    Args:
        calls: for each rank, the words of its call and its place in the program.
        rank: this rank.
    """
    lines = []
    start, raised = 0, ""
    for (words, site), same in itertools.groupby(calls):
        end = start + len(list(same))
        ranks = f"rank {start}" if end == start + 1 else f"ranks {start}-{end - 1}"
        lines.append(f"  {ranks}: {describe(words)}\n      at {site}")
        if words[0] == "raise":
            _, kind, message = words
            raised += f"{site} ({ranks}): {message or kind}\n"
        start = end
    error = CollectiveMismatchError(
        f"the ranks did not call the same collective (this is rank {rank} of {len(calls)}):\n"
        + "\n".join(lines)
        + "\nEvery rank must make the same calls, in the same order, with the same shapes and dtypes."
    )
    error.raised_by_rank = raised
    return error
