"""The signature of a call: its operation and the words (dtype, shape, label, …) that must be equal on all ranks."""

from __future__ import annotations

import functools
import itertools
import zlib
from typing import Any

from mpistrat.errors import CollectiveMismatchError
from mpistrat.liveness.records.record import text_of

# The bits of a stamp: a hash of the call, and above it a hash of the line of the program that makes the call. The other
# bits of a 64-bit word hold the call's number.
DIGEST_BITS = 40
LINE_BITS = 16
# A signature keeps the texts of this many lines that make the call; at more lines it forgets all and makes them again.
_MOST_SITES = 256

_Site = tuple[str, str, int]  # the file, the function and the line


class _TextsOfCall(dict[_Site, tuple[bytes, int, int]]):
    """From the line of the program that makes a call, to the call's text and its stamp.

    The text is for the rank's record. The stamp is `digest`, and above it a hash of the line. Missing ones are made at
    their first use.
    """

    def __init__(self, words: tuple[Any, ...], digest: int) -> None:
        self._words = words
        self._digest = digest

    def __missing__(self, site: _Site) -> tuple[bytes, int, int]:
        if len(self) == _MOST_SITES:
            self.clear()
        file, function, line = site
        text, call_bytes = text_of(describe(self._words), f"{file}:{line} in {function}")
        line_hash = zlib.crc32(text[call_bytes:]) % (1 << LINE_BITS)
        self[site] = text, call_bytes, line_hash << DIGEST_BITS | self._digest
        return self[site]


class CallSignature:
    """The description of a call that ranks compare. `signature_of` returns the same object for equal words.

    Attributes:
        words: the operation, followed by the words that must be equal on all ranks: dtype, shape, label, scale.
        digest: a hash of `words`, of `DIGEST_BITS` bits; equal on ranks that make the same call.
        texts: from (file, function, line) of the program to the text for the rank's record, in bytes, how many of its
            bytes name the call (see `record.text_of`), and the stamp that ranks compare (see `CallAgreement`).
    """

    __slots__ = ("digest", "texts", "words")

    def __init__(self, words: tuple[Any, ...]) -> None:
        import hashlib  # imported here, so that `import mpistrat` stays fast

        hashed = hashlib.blake2b(repr(words).encode(), digest_size=DIGEST_BITS // 8).digest()
        self.words = words
        self.digest = int.from_bytes(hashed, "little")
        self.texts = _TextsOfCall(words, self.digest)

    def __str__(self) -> str:
        return describe(self.words)


signature_of = functools.lru_cache(maxsize=4096)(CallSignature)


def describe(words: tuple[Any, ...]) -> str:
    """Return the call that `words` describe as text for people: "all_reduce(mean, float32, (2,), loss)"."""
    operation, *rest = words
    if operation == "raise":
        kind = rest[0]
        message = rest[-1]
        if not message.startswith(kind):
            message = ": ".join(rest)
        return f"raised {message}"
    if f"{operation}()" in rest:  # the user's call has no operands
        return f"{operation}()"
    if rest[:1] == ["sum"]:
        means = [word for word in rest if str(word).startswith(("MEAN", "SUM of mean "))]
        if means:
            rest[0] = "mean"  # the user asked for a mean: a sum that each rank divides
    listed = ", ".join(str(part) for part in rest if part != "")
    return f"{operation}({listed})"


def mismatch(calls: list[tuple[tuple[Any, ...], str]], rank: int) -> CollectiveMismatchError:
    """Return, but do not raise, an error that shows the call of each rank, for all ranks of `calls`.

    Consecutive ranks that made the same call on the same line of the program share an entry.

    Args:
        calls: for each rank, the words of its call, and the line of the program that made it, as text.
        rank: this rank's number.
    """
    lines = []
    start = 0
    raised = ""
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
