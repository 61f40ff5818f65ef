"""The signature of a call: its operation and what must be equal on all ranks, as a tuple of few words."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from mpistrat.errors import CollectiveMismatchError
from mpistrat.liveness.records.record import text_of

# The rest of a word of 64 bits is the call's number.
DIGEST_BITS = 56
# Places whose texts a signature keeps; if a program makes a call at more places, texts are made again.
_MOST_SITES = 256


class _TextsOfCall(dict[tuple[str, str, int], tuple[bytes, int]]):
    """Texts of a call by file, function and line. A text is made when the program first makes the call there."""

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
        words: the operation, then what the ranks must agree on.
        digest: a hash of the words, equal on ranks that make the same call.
        texts: what the record keeps of this call, by its place in the program; see `record.text_of`.
    """

    __slots__ = ("digest", "texts", "words")

    def __init__(self, words: tuple[Any, ...]) -> None:
        import hashlib  # here, because it makes importing mpistrat slower

        hashed = hashlib.blake2b(repr(words).encode(), digest_size=DIGEST_BITS // 8).digest()
        self.words = words
        self.digest = int.from_bytes(hashed, "little")
        self.texts = _TextsOfCall(words)

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


def mismatch(calls: list[tuple[tuple[Any, ...], str]], rank: int) -> CollectiveMismatchError:
    """With one line for each group of consecutive ranks that made the same call at the same place.

    Args: calls: by rank, the words and the place.
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
