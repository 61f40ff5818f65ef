"""The protocol between clients and servers: the methods of their requests and notices, and what these carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpistrat.parameter_server.protocol.tensors import PackedTensor, TensorSpec

# Requests that read.
FIND, PULL, ROWS, OPTIMIZER_STATE = "find", "pull", "rows", "optimizer state"
# Requests that change something.
CREATE, UPDATE = "create", "update"
MAKE_OPTIMIZER, LOAD_OPTIMIZER_STATE = "make optimizer", "load optimizer state"
# Notices of the rank that creates arrays, and the request of ranks that wait for them.
CANNOT_CREATE, PUBLISH, PUBLISHED = "cannot create", "publish", "published"
# Notices: nobody repeats some pieces of work any more; a client does not use the server any more.
FORGET, DONE = "forget", "done"
# Changes that a server makes by itself and forwards to its backup. END_ROUNDS: all workers have ended the rounds before
# a number; the body has that number and how many workers took part in each round. DROP_GRADIENTS: the gradients of a
# worker's steps are dropped; the body is the first of these steps.
END_ROUNDS, DROP_GRADIENTS = "end rounds", "drop gradients"
# Notices of a worker: it has ended so many steps; the step after so many has failed. Both have a `Push`, too.
ENDED, FAILED = "steps ended", "step failed"
# Requests of a worker: may the next step begin; how many steps each worker has ended.
MAY_BEGIN, STEPS = "may begin", "steps"

# A server's function: calls its argument when all changes made so far outlive the server.
WhenSafe = Callable[[Callable[[], None]], None]


class Push(NamedTuple):
    """One of several messages that together change several servers.

    Attributes:
        number: grows, among the pushes of one client.
        servers: the ranks of all these servers.
        part: the server for which this message was made, though its backup may get it; None where all get the same.
    """

    number: int
    servers: tuple[int, ...]
    part: int | None = None


class NewArray(NamedTuple):
    """A new array: its first value is `value`, or zeros.

    Attributes:
        server: the server that is to make it. Its backup does when that server has died.
    """

    key: int
    server: int
    name: str
    spec: TensorSpec
    value: PackedTensor | None


class GradientMethod(NamedTuple):
    """The method of an update whose operand is a gradient.

    Attributes:
        optimizer: its number, equal on all workers.
        hyperparameters: of the worker's param group now.
        round: the worker's step, if the gradients of all workers' steps of this number are to be combined; else None.
        mean: whether the gradients are combined by their mean over all workers that ended the step, as in
            `MultiWorkerMirroredStrategy`, where a worker without a gradient counts with zeros; otherwise by their sum.
    """

    optimizer: int
    hyperparameters: Mapping[str, Any]
    round: int | None = None
    mean: bool = False


class Update(NamedTuple):
    """A change of one array.

    Attributes:
        key: of the array.
        method: a variable's method, such as "assign_add", or the step of an optimizer.
        operand: an array, or two: the indices and values of rows.
        work: the number of the piece of work that the update belongs to, or of the client's session, which is below 0;
            None for an update that is not repeated.
        number: of this update among those of the piece of work to this array, or among all of the session.
    """

    key: int
    method: str | GradientMethod
    operand: list[PackedTensor]
    work: int | None = None
    number: int = 0


class Updates(NamedTuple):
    """Updates of one client for one server, to be made one after the other.

    Attributes:
        push: where other updates of the same push go to other servers.
        settled: no update of the client's session with a smaller number comes again; see `UpdateNumbers`.
    """

    updates: list[Update]
    push: Push | None = None
    settled: int = 0
