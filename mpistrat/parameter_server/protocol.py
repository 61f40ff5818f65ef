"""What clients ask of servers, and tell them: the names of messages, and what some of them carry."""

from __future__ import annotations

from typing import NamedTuple

from mpistrat.parameter_server.gate import Push
from mpistrat.parameter_server.optimizer_steps import Step
from mpistrat.parameter_server.tensors import InlineTensor, SharedTensor, TensorSpec

# Requests that read.
FIND, PULL, ROWS, OPTIMIZER_STATE = "find", "pull", "rows", "optimizer state"
# Requests that change something.
CREATE, UPDATE = "create", "update"
MAKE_OPTIMIZER, LOAD_OPTIMIZER_STATE = "make optimizer", "load optimizer state"
# A notice of the rank that makes arrays, and what others ask about it.
CANNOT_CREATE, PUBLISH, PUBLISHED = "cannot create", "publish", "published"
# Notices: of pieces of work that are over; of a client that needs the server no more.
FORGET, DONE = "forget", "done"
# Changes that a server makes by itself, and passes on: all workers have ended some rounds, as the number before which
# they are and how many workers took part in each; the gradients of a worker's steps from a number on are dropped.
END_ROUNDS, DROP_GRADIENTS = "end rounds", "drop gradients"


class NewArray(NamedTuple):
    """A new array: its first value is `value`, or zeros.

    Attributes:
        server: the one that was to make it; another one does, if that has died.
    """

    key: int
    server: int
    name: str
    spec: TensorSpec
    value: SharedTensor | InlineTensor | None


class Update(NamedTuple):
    """What one message asks for, once for each array that it is about.

    Attributes:
        key: of the array.
        method: of a variable, such as "assign_add"; or a step of an optimizer.
        operand: an array, or two: the indices and values of rows.
        work: the number of the piece of work that asks, or of the client's session, which is below 0; None for what is
            not repeated.
        number: of this update among those of this piece of work to this array, or of the session to all.
    """

    key: int
    method: str | Step
    operand: list[SharedTensor | InlineTensor]
    work: int | None = None
    number: int = 0


class Updates(NamedTuple):
    """Of one client to one server, to be made one after the other.

    Attributes:
        push: where others of them go to other servers.
        settled: of the client's session, nothing with a smaller number comes again; see `UpdateNumbers`.
    """

    updates: list[Update]
    push: Push | None = None
    settled: int = 0
