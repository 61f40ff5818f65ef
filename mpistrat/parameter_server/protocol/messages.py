"""The protocol between clients and servers: the methods of their requests and notices, and what these carry.

Small arrays are in the message itself, large ones in memory that both sides map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators.host_views import view_of
from mpistrat.parameter_server.rpc import segments

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

# A pipe copies a message in pieces. From this many bytes on, shared memory is quicker.
_SMALL = 1 << 13

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
    """A new array: its first value is `value`.

    Attributes:
        server: the server that is to make it. Its backup does when that server has died.
    """

    key: int
    server: int
    name: str
    spec: TensorSpec
    value: PackedTensor


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


class TensorSpec(NamedTuple):
    """What an array is, without its numbers.

    Attributes:
        dtype: its name, such as "float32".
        is_torch: whether it is a torch tensor, or a NumPy array.
    """

    shape: tuple[int, ...]
    dtype: str
    is_torch: bool

    @staticmethod
    def of(array: Array) -> TensorSpec:
        return TensorSpec(tuple(array.shape), arrays.dtype_name(array), arrays.is_torch(array))

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize

    @property
    def itemsize(self) -> int:
        return int(self.native_dtype.itemsize)

    @property
    def native_dtype(self) -> Any:
        """The dtype as an object of its library."""
        if not self.is_torch:
            return np.dtype(self.dtype)
        import torch

        return getattr(torch, self.dtype)

    def empty(self) -> Array:
        """An array of this spec without memory of its own: a prototype for others."""
        if not self.is_torch:
            return np.broadcast_to(np.empty((), self.dtype), self.shape)
        import torch

        return torch.empty((), dtype=self.native_dtype, device="cpu").expand(self.shape)

    def array_in(self, memory: np.ndarray) -> Array:
        """The bytes `memory` as an array of this spec, in place."""
        array: Array = memory
        if self.is_torch:
            import torch

            array = torch.from_numpy(memory)
        return array.view(self.native_dtype).reshape(self.shape)


class Address(NamedTuple):
    """Names an array on a server; equal on all ranks.

    Attributes:
        server: the rank of the server that makes it.
        key: the array's number.
    """

    server: int
    key: int
    name: str
    spec: TensorSpec


class SharedTensor(NamedTuple):
    """An array in memory that both sides map."""

    handle: segments.RegionHandle
    spec: TensorSpec


class InlineTensor(NamedTuple):
    """An array in the message itself, as bytes: a tensor would need torch to be unpickled, and NumPy lacks dtypes."""

    data: np.ndarray
    spec: TensorSpec

    def copied(self) -> InlineTensor:
        """The same with data of its own, which does not change with the array."""
        return InlineTensor(self.data.copy(), self.spec)


PackedTensor = SharedTensor | InlineTensor


def inline(array: Array) -> InlineTensor:
    """`array`, on the host, as part of a message."""
    view = np.ascontiguousarray(view_of(array))
    return InlineTensor(view.reshape(-1).view(np.uint8), TensorSpec.of(array))


def pack(
    tensors: Sequence[Array], buffers: segments.Buffers | None
) -> tuple[list[PackedTensor], segments.SharedRegion | None]:
    """Arrays of any device, for a message.

    Args: buffers: memory that the receiver can map; None where it cannot.
    Returns: also the region to give back once the receiver has read it, if there is one.
    """
    on_host = [arrays.to_host(arrays.detach(array)) for array in tensors]
    specs = [TensorSpec.of(array) for array in on_host]
    rooms = [segments.whole_lines(spec.nbytes) for spec in specs]
    if buffers is None or sum(rooms) <= _SMALL:
        return [inline(array) for array in on_host], None
    region = buffers.take(sum(rooms))
    packed: list[PackedTensor] = []
    first = 0
    for array, spec, room in zip(on_host, specs, rooms, strict=True):
        part = region.part(first, spec.nbytes)
        spec.array_in(part.memory)[...] = array
        packed.append(SharedTensor(part.handle, spec))
        first += room
    return packed, region


def unpack(packed: PackedTensor, mappings: segments.Mappings) -> Array:
    """The array, in the memory in which it came."""
    if isinstance(packed, InlineTensor):
        return packed.spec.array_in(packed.data)
    return packed.spec.array_in(mappings.at(packed.handle))


def inlined(body: Any, mappings: segments.Mappings) -> Any:
    """A message's body with InlineTensors in place of SharedTensors, for a receiver that cannot map these."""
    if isinstance(body, SharedTensor):
        return inline(unpack(body, mappings))
    if isinstance(body, list):
        return [inlined(item, mappings) for item in body]
    if isinstance(body, tuple):
        items = [inlined(item, mappings) for item in body]
        return type(body)(*items) if hasattr(body, "_fields") else tuple(items)
    return body
