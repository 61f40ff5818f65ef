"""Buffers on accelerators by the library that they are of: torch's tensors and CuPy's arrays have different groups."""

from __future__ import annotations

from collections.abc import Callable

from mpistrat.arrays import is_on_gpu, is_torch
from mpistrat.communicators.transport import Exchange, Operands, Transport
from mpistrat.communicators.transports.accelerator.buffers import DeviceTransport
from mpistrat.options import CommunicationImplementation


class LibraryDispatcher(Transport):
    """Hands a buffer to the transport of its library, which is made when the first such buffer comes.

    Kernels of two libraries' groups must not be under way together on one accelerator: each may hold what the other
    waits for, on different ranks. So the ranks let those of one library end before they use the other.

    Args:
        of_torch, of_cupy: make the transports. Collective.

    Attributes:
        made: the transports that there are, by whether they are of torch's tensors.
    """

    takes_device_buffers = True

    def __init__(
        self, of_torch: Callable[[], DeviceTransport], of_cupy: Callable[[], DeviceTransport]
    ) -> None:
        self._make = {True: of_torch, False: of_cupy}
        self.made: dict[bool, DeviceTransport] = {}
        self._last: DeviceTransport | None = None

    def of(self, torch: bool) -> DeviceTransport:
        """The transport of torch's tensors, or of CuPy's arrays. Collective when it is made."""
        if torch not in self.made:
            self.made[torch] = self._make[torch]()
        return self.made[torch]

    @property
    def ordered_by_streams(self) -> bool:  # type: ignore[override]
        return any(transport.ordered_by_streams for transport in self.made.values())

    def choose(self, call: str, operands: Operands) -> Exchange | None:
        transport = self.to_use(operands)
        return None if transport is None else transport.choose(call, operands)

    def to_use(self, operands: Operands) -> DeviceTransport | None:
        """The transport of a call's buffers, whose turn it is; None for buffers on the host. Collective."""
        if not is_on_gpu(operands.buffer):
            return None
        chosen = self.made.get(is_torch(operands.buffer))
        if chosen is None or chosen is not self._last:
            if self._last is not None:
                self._last.wait_until_idle()
            chosen = self._last = self.of(is_torch(operands.buffer))
        return chosen

    def explain(self, rest: str) -> str:
        names = {True: "tensors", False: "CuPy arrays"}
        several = len(self.made) > 1
        lines = [
            f"{names[torch] if several else 'buffers'} on GPUs: {transport.why}\n"
            for torch, transport in self.made.items()
        ]
        return f"{''.join(lines)}buffers on the host: {rest}"


class ForcedTransport(Transport):
    """As `dispatcher`, by the transport of `implementation` where there are several."""

    takes_device_buffers = True

    def __init__(
        self, dispatcher: LibraryDispatcher, implementation: CommunicationImplementation
    ) -> None:
        self._dispatcher, self._implementation = dispatcher, implementation

    def _of(self, transport: DeviceTransport) -> Transport:
        return transport.forced.get(self._implementation, transport)

    @property
    def ordered_by_streams(self) -> bool:  # type: ignore[override]
        made = self._dispatcher.made.values()
        return any(self._of(transport).ordered_by_streams for transport in made)

    def choose(self, call: str, operands: Operands) -> Exchange | None:
        transport = self._dispatcher.to_use(operands)
        return None if transport is None else self._of(transport).choose(call, operands)

    def explain(self, rest: str) -> str:
        return self._dispatcher.explain(rest)
