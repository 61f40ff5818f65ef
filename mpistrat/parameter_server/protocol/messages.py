"""The protocol between clients and servers: the methods and the bodies of their messages.

A message contains small arrays itself, and refers to large arrays in memory that both sides map.
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
FIND = "find"
PULL = "pull"
ROWS = "rows"
OPTIMIZER_STATE = "optimizer state"
# Requests that change something.
CREATE = "create"
UPDATE = "update"
MAKE_OPTIMIZER = "make optimizer"
LOAD_OPTIMIZER_STATE = "load optimizer state"
# Notices of the rank that makes arrays: CANNOT_CREATE: an array's number, and the error of making it. PUBLISH: a name
# and a value. PUBLISHED: another rank's request for the value of a name, answered once the name is published.
CANNOT_CREATE = "cannot create"
PUBLISH = "publish"
PUBLISHED = "published"
# FORGET: no rank repeats some closures any more. DONE: a client does not use the server any more.
FORGET = "forget"
DONE = "done"
# Changes that a server makes by itself and forwards to its backup. END_ROUNDS: all workers have ended the rounds with
# smaller numbers than the body's; the body also tells how many workers took part in each round. DROP_GRADIENTS: the
# server drops the gradients of a worker's steps; the body is the number of the first dropped step.
END_ROUNDS = "end rounds"
DROP_GRADIENTS = "drop gradients"
# Notices of a worker: ENDED: it has ended a number of steps. FAILED: its step of that number has failed. The body of
# each is the number and a `Push`.
ENDED = "steps ended"
FAILED = "step failed"
# Requests of a worker: MAY_BEGIN: wait until all workers have ended a number of steps. STEPS: the steps of each worker.
MAY_BEGIN = "may begin"
STEPS = "steps"

# A pipe copies a message in pieces. For more bytes than this, shared memory is quicker.
_SMALL = 1 << 13

# A server's function: `when_safe(call, *args)` calls `call(*args)` when the backup has made all changes that the server
# has made so far.
WhenSafe = Callable[..., None]


class Push(NamedTuple):
    """Marks the messages that belong together when one client changes several servers at the same time.

    Attributes:
        number: grows with each push of a client.
        servers: the ranks of all servers that get a message.
        part: the server that this message is for, also if its backup gets it; None if all get the same message.
    """

    number: int
    servers: tuple[int, ...]
    part: int | None = None


class NewArray(NamedTuple):
    """The body of CREATE: a new array, with the first value `value`.

    Attributes:
        key: the array's number.
        server: the rank of the server that makes the array; if it has died, its backup does.
    """

    key: int
    server: int
    name: str
    spec: TensorSpec
    value: PackedTensor


class GradientMethod(NamedTuple):
    """The method of an update that steps an optimizer with a gradient.

    Attributes:
        optimizer: the optimizer's number, equal on all workers.
        round: the number of the worker's step, if the server combines the gradients of all workers' steps of that
            number; None if the server applies the gradient at once.
        mean: whether the server divides the combined gradient by the number of workers that ended the step, so that a
            worker without a gradient counts with zeros, as in `MultiWorkerMirroredStrategy`. False takes the sum.
    """

    optimizer: int
    hyperparameters: Mapping[str, Any]
    round: int | None = None
    mean: bool = False


class Update(NamedTuple):
    """A change of one array.

    Attributes:
        key: the array's number.
        method: a variable's method, such as "assign_add", or the step of an optimizer.
        operand: one array for the whole, or two arrays: the indices and the values of rows.
        work: the id (above 0) of the closure that makes the update, or the number (below 0) of the client's session;
            None for an update that is never repeated.
        number: in a closure, how many updates of this array precede this update; in a session, a number that grows.
    """

    key: int
    method: str | GradientMethod
    operand: list[PackedTensor]
    work: int | None = None
    number: int = 0


class Updates(NamedTuple):
    """The body of UPDATE: updates of one client for one server, in order.

    Attributes:
        push: marks the updates that the client sends to other servers at the same time; None without any.
        settled: a number; the client sends no update of its session (outside closures) with a smaller number again.
    """

    updates: list[Update]
    push: Push | None = None
    settled: int = 0


class TensorSpec(NamedTuple):
    """The shape and dtype of an array.

    Attributes:
        dtype: the dtype's name, such as "float32".
        is_torch: True for a torch tensor, False for a NumPy array.
    """

    shape: tuple[int, ...]
    dtype: str
    is_torch: bool

    @staticmethod
    def of(array: Array) -> TensorSpec:
        shape = tuple(array.shape)
        return TensorSpec(shape, arrays.dtype_name(array), arrays.is_torch(array))

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize

    @property
    def itemsize(self) -> int:
        return int(self.native_dtype.itemsize)

    @property
    def native_dtype(self) -> Any:
        """The dtype as a `torch.dtype` or a NumPy dtype."""
        if not self.is_torch:
            return np.dtype(self.dtype)
        import torch

        return getattr(torch, self.dtype)

    def empty(self) -> Array:
        """Return an array of this shape and dtype, to check operands against. It has the memory of one element."""
        if not self.is_torch:
            return np.broadcast_to(np.empty((), self.dtype), self.shape)
        import torch

        return torch.empty((), dtype=self.native_dtype, device="cpu").expand(self.shape)

    def array_in(self, memory: np.ndarray) -> Array:
        """Return a view of `memory`, a NumPy array of bytes, as an array of this spec."""
        array: Array = memory
        if self.is_torch:
            import torch

            array = torch.from_numpy(memory)
        return array.view(self.native_dtype).reshape(self.shape)


class Address(NamedTuple):
    """The address of an array on a server, equal on all ranks.

    Attributes:
        server: the rank of the server that makes the array.
        key: the array's number.
    """

    server: int
    key: int
    name: str
    spec: TensorSpec


class SharedTensor(NamedTuple):
    """An array as a message refers to it, in memory that the sender and the receiver map."""

    handle: segments.RegionHandle
    spec: TensorSpec


class InlineTensor(NamedTuple):
    """An array in the message itself, as `data` of dtype uint8.

    A pickled tensor would need torch on the receiver, and a NumPy array lacks some of torch's dtypes.
    """

    data: np.ndarray
    spec: TensorSpec

    def copied(self) -> InlineTensor:
        """Return a copy with its own bytes, so that later changes of the array do not change the message."""
        return InlineTensor(self.data.copy(), self.spec)


PackedTensor = SharedTensor | InlineTensor


def inline(array: Array) -> InlineTensor:
    """Return `array`, which is in host memory, for a message. A contiguous array's memory is used, not copied."""
    view = np.ascontiguousarray(view_of(array))
    data = view.reshape(-1).view(np.uint8)
    return InlineTensor(data, TensorSpec.of(array))


def pack(
    tensors: Sequence[Array], buffers: segments.Buffers | None
) -> tuple[list[PackedTensor], segments.SharedRegion | None]:
    """Prepare arrays of any device for a message.

    Args: buffers: this process's memory; None if the receiver cannot map it.
    Returns: the packed arrays, and their region, to be given back once the receiver has read it. The region is None if
        the arrays are in the message itself: without `buffers`, or if they have at most 8 KB together.
    """
    on_host = [arrays.to_host(arrays.detach(array)) for array in tensors]
    specs = [TensorSpec.of(array) for array in on_host]
    rooms = [segments.whole_lines(spec.nbytes) for spec in specs]
    nbytes = sum(rooms)
    if buffers is None or nbytes <= _SMALL:
        return [inline(array) for array in on_host], None
    region = buffers.take(nbytes)
    packed: list[PackedTensor] = []
    first = 0
    for array, spec, room in zip(on_host, specs, rooms, strict=True):
        part = region.part(first, spec.nbytes)
        spec.array_in(part.memory)[...] = array
        packed.append(SharedTensor(part.handle, spec))
        first += room
    return packed, region


def unpack(packed: PackedTensor, mappings: segments.Mappings) -> Array:
    """Return a message's array, without a copy: in the message's bytes, or in the sender's memory, mapped here.

    Raises: OSError if the sender has died before its memory was mapped.
    """
    if isinstance(packed, InlineTensor):
        return packed.spec.array_in(packed.data)
    return packed.spec.array_in(mappings.at(packed.handle))


def inlined(body: Any, mappings: segments.Mappings) -> Any:
    """Return a message's body with an InlineTensor in place of each SharedTensor, for a receiver on another node."""
    if isinstance(body, SharedTensor):
        return inline(unpack(body, mappings))
    if isinstance(body, list):
        return [inlined(item, mappings) for item in body]
    if isinstance(body, tuple):
        items = [inlined(item, mappings) for item in body]
        if hasattr(body, "_fields"):
            return type(body)(*items)
        return tuple(items)
    return body
