"""Keeps the objects that a communicator needs for each kind of call, so that the next such call is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias

from mpistrat.arrays import Array, dtype_name, is_cupy, is_on_accelerator, is_on_xla
from mpistrat.communicators import operand_checks
from mpistrat.communicators.contract.call_signature import CallSignature, signature_of
from mpistrat.communicators.contract.joint_errors import RaisingTogether
from mpistrat.communicators.node.slots import SharedSlots, Slot
from mpistrat.communicators.node.small_calls import SmallCall, small_call
from mpistrat.communicators.transport import Operands

# The operation, the label and the scale; ranks compare them. A call without a reduction has ("", label, None).
Agreed: TypeAlias = tuple[str, str, float | None]
# How many kinds of calls are kept. Beyond them a kind is made again.
_KNOWN_CALLS = 4096


class KnownCall(NamedTuple):
    """A kind of call: all calls of one operation, dtype, shape, root and label.

    Attributes:
        signature: the description of the call that ranks compare.
        small: moves the call's bytes through slots (shared memory) while the ranks agree; None if a transport moves
            them.
        slot: the slot that this rank fills for the call; None if it fills none.
        meets: True if a transport moves the bytes of a buffer on the host, at least one byte. An all-reduce then ends
            on no rank before all ranks have entered it, so it may go without agreement inside `following`.
    """

    signature: CallSignature
    small: SmallCall | None
    slot: Slot | None
    meets: bool


class KnownCalls:
    """The kinds of calls that a communicator has made so far. It keeps at most 4,096, then begins anew.

    Args:
        size: number of ranks in the communicator.
        slots: shared memory for small calls; None if the ranks have none.
        takes_device_buffers: whether the communicator takes buffers on accelerators.
        last_words: words that end the signature of each call.
        raise_together: raises its argument here, and CollectiveMismatchError on the other ranks.
    """

    def __init__(
        self,
        size: int,
        slots: SharedSlots | None,
        takes_device_buffers: bool,
        last_words: tuple[str, ...],
        raise_together: Callable[[Exception], NoReturn],
    ) -> None:
        self._size = size
        self._slots = slots
        self._last_words = last_words
        self._takes_device_buffers = takes_device_buffers
        self._raise_together = raise_together
        self._known: dict[tuple[Any, ...], KnownCall] = {}

    def find(self, call: str, operands: Operands, agreed: Agreed) -> KnownCall:
        """Return the kind of a call. The first call of a kind checks its operands.

        Args:
            call: the operation, such as "all_reduce".
            agreed: the reduction's operation, label and scale.

        Raises: ValueError or TypeError if the operands do not fit the call; the other ranks raise
            CollectiveMismatchError.
        """
        buffer = operands.buffer
        out = operands.out
        of_out = kind = None
        if out is not None:
            of_out = out.dtype, out.shape
        if self._takes_device_buffers:
            kind = kind_of(buffer)
        counts = operands.sent, operands.received
        key = (call, agreed, buffer.dtype, buffer.shape, operands.root, of_out, counts, kind)
        known = self._known.get(key)
        if known is None:
            with RaisingTogether(self._raise_together):
                known = self._learn(call, operands, agreed)
            if len(self._known) == _KNOWN_CALLS:
                self._known.clear()
            self._known[key] = known
        return known

    def forget(self, takes_device_buffers: bool) -> None:
        """Forget all kinds, because the communicator has other transports from now on (`Router.move_by`)."""
        self._known.clear()
        self._takes_device_buffers = takes_device_buffers

    def _learn(self, call: str, operands: Operands, agreed: Agreed) -> KnownCall:
        buffer = operands.buffer
        _check(call, operands, agreed, self._size)
        small = None
        on_host = not is_on_accelerator(buffer)
        if self._slots is not None and on_host:
            small = small_call(call, self._slots, operands)
        slot = small if small is not None and small.writes else None
        signature = signature_of((*words_of(call, operands, agreed), *self._last_words))
        meets = small is None and on_host and buffer.nbytes > 0
        return KnownCall(signature, small, slot, meets)


def _check(call: str, operands: Operands, agreed: Agreed, size: int) -> None:
    """Check the operands of `call` on `size` ranks. Raises: ValueError or TypeError if they do not fit `call`."""
    buffer = operands.buffer
    out = operands.target
    if agreed[0]:
        operand_checks.check_reduction(agreed[0], agreed[2], buffer)
    if call == "all_reduce":
        operand_checks.check_out(buffer, out)
    elif call == "reduce_scatter":
        operand_checks.check_parts(buffer, out, size)
    elif call == "all_gather_into":
        operand_checks.check_gathered(buffer, out, size)
    elif call == "all_to_all":
        operand_checks.check_exchange(buffer, out, operands.sent, operands.received, size)


def words_of(call: str, operands: Operands, agreed: Agreed) -> tuple[Any, ...]:
    """Return the words of a call's signature: operation, root, dtype and device, shape, label and scale.

    Where shapes may differ between ranks, words for the equal part replace the shape: "2 dimensions", "rows of (3,)".
    """
    op = agreed[0]
    buffer = operands.buffer
    words: list[Any] = [call, op] if op else [call]
    if call in ("reduce", "broadcast"):
        words.append(operands.root)
    if call == "all_gather":
        shape: Any = f"{buffer.ndim} dimensions"
    elif call == "all_to_all":
        shape = f"rows of {tuple(buffer.shape[1:])}"
    else:
        shape = tuple(buffer.shape)
    return *words, kind_of(buffer), shape, *words_of_label(agreed)


def words_of_label(agreed: Agreed) -> tuple[str, ...]:
    """Return the label, and the words for the scale if there is one."""
    _, label, factor = agreed
    if factor is None:
        return (label,)
    return label, f"times {factor!r}"


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
