"""Exception classes, named as TensorFlow's users know them where they would catch them."""

from __future__ import annotations

__all__ = [
    "AbortedError",
    "CancelledError",
    "ClosureInputError",
    "CollectiveMismatchError",
    "DeadlineExceededError",
    "DivergenceError",
    "FailedPreconditionError",
    "InvalidArgumentError",
    "NotFoundError",
    "OpError",
    "OutOfRangeError",
    "RankLostError",
    "StallError",
    "TooFewReplicasError",
    "TopologyError",
    "UnavailableError",
]


def __dir__() -> list[str]:
    return __all__


class OpError(Exception):
    """Base of the errors that an operation on distributed values raises."""


class InvalidArgumentError(OpError, ValueError):
    """Operands do not fit each other (shapes, dtypes, structures)."""


class NotFoundError(OpError):
    """A requested entity, a file or a reader, does not exist."""


class OutOfRangeError(OpError):
    """The end of an iterator was passed."""


class FailedPreconditionError(OpError):
    """The system is not in the state that the operation needs."""


class AbortedError(OpError):
    """The operation was ended by another party."""


class CancelledError(OpError):
    """The operation was cancelled before it could finish."""


class DeadlineExceededError(OpError):
    """The operation did not finish within its time limit."""


class StallError(DeadlineExceededError):
    """Other ranks did not come to a collective within MPISTRAT_STALL_SECONDS; says which, and what they do instead.

    Raised with MPISTRAT_ON_STALL=raise, by the ranks that wait; and by those that wait for a rank that
    an error has made leave the collective. The communicator cannot be used any more.
    """


class UnavailableError(OpError):
    """A peer that the operation needs cannot be reached."""


class RankLostError(UnavailableError):
    """A rank of the communicator has failed: nothing moves in it any more. `run_elastic` goes on with the others."""


class TooFewReplicasError(UnavailableError):
    """Fewer replicas are left than training was to go on with. Raised by all ranks that are left."""


class ClosureInputError(RuntimeError):
    """A worker could not make what a scheduled function needs of it, such as its dataset.

    Attributes: original: why.
    """

    original: Exception | None = None


class CollectiveMismatchError(RuntimeError):
    """The ranks called different collectives, or the same one with different operands.

    Raised by every rank of the group, before any bytes move.

    Attributes: raised_by_rank: place and text of each error that ranks have raised in place of a collective, in lines.
    """

    raised_by_rank = ""


class DivergenceError(RuntimeError):
    """What is mirrored is not equal on all ranks any more. Raised by every rank, with the same text.

    Attributes:
        name: the first tensor that differs.
        ranks: which ranks have other bits than the majority; empty where there is no majority.
    """

    def __init__(self, message: str, name: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.ranks = ranks


class TopologyError(RuntimeError):
    """The environment, the launcher and MPI disagree about who is who."""
