"""`Collective`: a call of all ranks that moves buffers, as a value."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from mpistrat.arrays import Array, dtype_name, is_cupy, is_on_accelerator, is_on_xla, is_torch
from mpistrat.communicators.reduction import Compressor

if TYPE_CHECKING:
    from mpistrat.communicators.node.slots import SharedSlots
    from mpistrat.communicators.node.small_calls import SmallCall


class Collective(abc.ABC):
    """A call of all ranks of a group that moves buffers: its operands, and all that differs between collectives.

    Each subclass is one collective. A method of `Communicator` makes an object for each call; a router finds the kind
    of the call by `key`, and a transport moves the bytes.

    Attributes:
        name: the collective's name, as of the method of `Communicator`.
        buffer: this rank's input.
        label: words that must be equal on all ranks. A reduction has its own label.
        sizes_differ: whether the ranks' buffers may have different shapes, so that no rank knows the others' sizes.
        compressor: adds up the values in fewer bytes; None where nothing is added up, or where nothing is compressed.
    """

    __slots__ = ()
    name: ClassVar[str]
    buffer: Array
    label: str
    sizes_differ: ClassVar[bool] = False

    @property
    def compressor(self) -> Compressor | None:
        return None

    @abc.abstractmethod
    def key(self) -> tuple[Any, ...]:
        """Return the kind of this call. Calls of equal kinds have equal checks, words and small forms."""

    def check(self, size: int) -> None:  # noqa: B027 - some collectives take every buffer
        """Check the operands of this rank, one of `size`. Raises: ValueError or TypeError if they do not fit."""

    def words(self) -> tuple[Any, ...]:
        """Return the words of the call's signature. They must be equal on all ranks."""
        shape = self.equal_shape()
        return self.name, *self.roles(), kind_of(self.buffer), shape, *self.labels()

    def roles(self) -> tuple[Any, ...]:
        """Return the words after the name: the operation and the root, where the collective has them."""
        return ()

    def equal_shape(self) -> Any:
        """Return the shape, or words for the part of it that is equal on all ranks: "2 dimensions"."""
        return tuple(self.buffer.shape)

    def labels(self) -> tuple[str, ...]:
        """Return the label, and the words for a scale if there is one."""
        return (self.label,)

    def can_slice(self) -> bool:
        """Whether the ranks can combine slices of the buffers themselves, without MPI's reductions."""
        return True

    def small_form(self, slots: SharedSlots) -> SmallCall | None:
        """Return the object that makes calls of this kind through `slots`, shared memory with room for each rank.

        All ranks return an object, or all return None.
        Returns: None if the buffer is too large for a slot, or if only MPI can combine its dtype; a transport then
            moves the bytes.
        """
        return None

    def alone(self) -> Any:  # noqa: B027 - the buffer itself may be the result
        """Make the call in a group of one rank: write the result into the operands, or return it.

        Where `buffer` is the result, there is nothing to do.
        """


class Mover(Protocol):
    """The transport that a collective uses when other collectives make it (`by_others`)."""

    rank: int

    def move(self, collective: Collective) -> Any:
        """Move the bytes of `collective`. Raises: TypeError if this transport does not take it."""


def check_contiguous(buffer: Array, out: Array) -> None:
    """Check the memory of `buffer` and `out`. Raises: ValueError unless both are C-contiguous."""
    for name, array in (("buffer", buffer), ("out", out)):
        contiguous = array.is_contiguous() if is_torch(array) else array.flags.c_contiguous
        if not contiguous:
            raise ValueError(
                f"{name} must be C-contiguous, got an array of shape {tuple(array.shape)} with other strides; copy it "
                "first"
            )


def described(array: Array) -> str:
    """Return the array's dtype and shape for messages: "float32 of (2, 3)"."""
    return f"{dtype_name(array)} of {tuple(array.shape)}"


def kind_of(buffer: Array) -> str:
    """Return words for the buffer's dtype and kind of device: "float32", "float32 on a GPU", "float32 on a GPU (CuPy)".

    They are part of the signature that ranks compare, because ranks choose the transport by them.
    """
    name = dtype_name(buffer)
    if not is_on_accelerator(buffer):
        return name
    if is_on_xla(buffer):
        return f"{name} on an XLA device"
    if is_cupy(buffer):
        return f"{name} on a GPU (CuPy)"
    return f"{name} on a GPU"
