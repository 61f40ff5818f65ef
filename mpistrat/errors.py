"""Exception classes. TensorFlow's users know most of their names from `except` clauses."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING


class OpError(Exception):
    """The base class of errors that operations on distributed values raise.

    Example:
        >>> issubclass(ms.errors.OutOfRangeError, ms.errors.OpError)
        True

    Troubleshooting: OpError
    """


class InvalidArgumentError(OpError, ValueError):
    """Operands do not fit each other: their shapes, dtypes or structures differ.

    Example:
        >>> try:
        ...     ms.Variable([1.0, 2.0]).assign([1.0, 2.0, 3.0])
        ... except ms.errors.InvalidArgumentError as error:
        ...     print(error)
        variable 'Variable' has shape [2], the operand [3]

    Troubleshooting: InvalidArgumentError
    """


class NotFoundError(OpError):
    """A file, a reader, a device or another entity that was asked for does not exist.

    Example, on several ranks::

        options = ms.InputOptions(experimental_auto_shard_policy="FILE")
        try:
            dataset = strategy.experimental_distribute_dataset(batches, options)
        except ms.errors.NotFoundError:  # `batches` is no FileDataset
            dataset = strategy.experimental_distribute_dataset(batches)

    Troubleshooting: NotFoundError
    """


class OutOfRangeError(OpError):
    """An iterator has no further element.

    Example:
        >>> iterator = iter(ms.OneDeviceStrategy("cpu").experimental_distribute_dataset([]))
        >>> try:
        ...     iterator.get_next()
        ... except ms.errors.OutOfRangeError as error:
        ...     print(error)
        the distributed dataset has ended

    Troubleshooting: OutOfRangeError
    """


class FailedPreconditionError(OpError):
    """The system is not in the state that the operation needs.

    For example, a parameter server gets an update of a scheduled function that is over.

    Example, on several ranks::

        def step():  # the chief takes this worker for dead, and has let another worker do the step
            try:
                total.assign_add(1.0)
            except ms.errors.FailedPreconditionError as error:
                print(error)
                raise

    Troubleshooting: FailedPreconditionError
    """


class AbortedError(OpError):
    """Another party has ended the operation. The package does not raise it; programs written for TensorFlow may.

    Example:
        >>> try:
        ...     raise ms.errors.AbortedError("the input was closed")
        ... except ms.errors.OpError as error:
        ...     print(error)
        the input was closed

    Troubleshooting: AbortedError
    """


class CancelledError(OpError):
    """The operation was cancelled before it finished: a scheduled function, because another function failed.

    Example, on several ranks::

        value = coordinator.schedule(step)
        try:
            coordinator.join()  # raises the error of the function that failed, and cancels the others
        except OSError as error:
            print(error)

    Example, on several ranks::

        try:
            print(value.fetch())
        except ms.errors.CancelledError:  # `join` has raised the cause, and it is mended
            value = coordinator.schedule(step)

    Troubleshooting: CancelledError
    """


class DeadlineExceededError(OpError):
    """The operation did not finish within its time limit.

    Example:
        >>> issubclass(ms.errors.StallError, ms.errors.DeadlineExceededError)
        True

    Troubleshooting: DeadlineExceededError
    """


class StallError(DeadlineExceededError):
    """Other ranks have not reached a collective within MPISTRAT_STALL_SECONDS; the text names them and their calls.

    With MPISTRAT_ON_STALL=raise the waiting ranks raise this error. They also raise it if the rank that they wait for
    has left the collective because of an error. The communicator cannot be used any more.

    Example, on several ranks::

        try:
            loss = strategy.reduce("SUM", loss, axis=None)
        except ms.errors.StallError as error:
            print(error)
            raise

    Troubleshooting: StallError
    """


class UnavailableError(OpError):
    """A peer that the operation needs cannot be reached, such as a server that has died.

    Example, on several ranks::

        try:
            coordinator.join()
        except ms.errors.UnavailableError as error:  # all workers have died
            raise SystemExit(f"start the job again: {error}")

    Troubleshooting: UnavailableError
    """


class RankLostError(UnavailableError):
    """A rank of the communicator has failed, and the communicator cannot be used any more.

    If the training function of `run_elastic` lets the error pass, `run_elastic` goes on with the other ranks.

    Example, on several ranks::

        try:
            loss = strategy.reduce("SUM", loss, axis=None)
        except ms.errors.RankLostError:
            log.close()
            raise

    Troubleshooting: RankLostError
    """


class TooFewReplicasError(UnavailableError):
    """Fewer replicas are left than `min_replicas` of `run_elastic`. All ranks that are left raise it.

    Example:
        >>> def train(elastic):
        ...     return elastic.strategy(devices=["cpu"])
        >>> ms.fault_tolerance.run_elastic(train, min_replicas=2)
        Traceback (most recent call last):
        mpistrat.errors.TooFewReplicasError: 1 replicas are left, and min_replicas=2 are wanted. ...

    Troubleshooting: TooFewReplicasError
    """


class ClosureInputError(RuntimeError):
    """A worker could not make an input of a scheduled function, such as its dataset.

    Attributes:
        original: the exception of the function that makes the input; None if that function did not raise one.

    Example, on several ranks::

        try:
            value = coordinator.schedule(step, args=(iterator,)).fetch()
        except ms.errors.ClosureInputError as error:
            print(error.original)

    Troubleshooting: ClosureInputError
    """

    original: Exception | None = None


class CollectiveMismatchError(RuntimeError):
    """The ranks called different collectives, or the same collective with operands that do not fit each other.

    All ranks of the group raise it, before any bytes move.

    Attributes:
        raised_by_rank: a text with the place and the message of each error that a rank raised instead of calling the
            collective, a line each; "" if no rank raised an error.

    Example, on several ranks::

        try:
            total = strategy.reduce("SUM", np.zeros(2 + rank), axis=None)
        except ms.errors.CollectiveMismatchError as error:
            print(error)

    Troubleshooting: CollectiveMismatchError
    """

    raised_by_rank = ""


class DivergenceError(RuntimeError):
    """Mirrored parameters, buffers, optimizer states or variables are not equal on all ranks any more.

    All ranks raise it, with the same text.

    Attributes:
        name: name of the first value that differs, in the order parameters, buffers, optimizer states, variables.
        ranks: ranks with other bits than the majority; empty if there is no majority.

    Example, on several ranks::

        try:
            loss.backward()  # a DivergenceSentinel compares the ranks
        except ms.errors.DivergenceError as error:
            print(error.name, error.ranks)
            raise

    Troubleshooting: DivergenceError
    """

    def __init__(self, message: str, name: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.ranks = ranks


class TopologyError(RuntimeError):
    """The environment, the launcher and MPI disagree about the ranks, or a variable of the environment is wrong.

    Example:
        >>> cluster = ms.cluster_resolver.ClusterSpec({"worker": ["a", "b"]})
        >>> resolver = ms.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=0)
        >>> ms.MultiWorkerMirroredStrategy(cluster_resolver=resolver)  # one rank was started
        Traceback (most recent call last):
        mpistrat.errors.TopologyError: SimpleClusterResolver says this is rank 0 of 2, MPI says ...

    Troubleshooting: TopologyError
    """


def listed(ranks: Sequence[int], most: int | None = None) -> str:
    """Return ranks as text, for messages: "rank 3", "ranks 1, 2". Only the first `most` ranks are in it."""
    shown = ", ".join(str(rank) for rank in ranks[:most])
    if most is not None and len(ranks) > most:
        shown += ", …"
    if len(ranks) == 1:
        return f"rank {shown}"
    return f"ranks {shown}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, for messages: "1 rank", "2 ranks"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def __dir__() -> list[str]:
    return fnmatch.filter(globals(), "*Error")


if not TYPE_CHECKING:  # type checkers find the classes without it
    __all__ = __dir__()
