"""Choose the transport of a buffer on an accelerator by its library: torch and CuPy have different groups."""

from __future__ import annotations

from collections.abc import Callable

from mpistrat.arrays import Array, is_on_gpu, is_torch
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.transport import Move, Transport
from mpistrat.communicators.transports.accelerator.buffers import DeviceTransport
from mpistrat.options import CommunicationImplementation


class LibraryDispatcher(Transport):
    """Hands each buffer on an accelerator to the transport of the buffer's library, torch or CuPy.

    `use_gpus` makes one library's transport; the other one is made when its first buffer comes. Kernels of two groups
    must not run together on one accelerator, because on different ranks each kernel may hold the cores that the other
    waits for. So a rank waits until one library's collectives have ended before it uses the other library.

    Args:
        of_torch, of_cupy: collective functions that make the transport for torch's tensors, and for CuPy's arrays.

    Attributes:
        made: the transports that exist; the key is True for torch's tensors, False for CuPy's arrays.
    """

    takes_device_buffers = True

    def __init__(
        self, of_torch: Callable[[], DeviceTransport], of_cupy: Callable[[], DeviceTransport]
    ) -> None:
        self._make = {True: of_torch, False: of_cupy}
        self.made: dict[bool, DeviceTransport] = {}
        self._last: DeviceTransport | None = None

    def of(self, torch: bool) -> DeviceTransport:
        """Return the transport of torch's tensors (`torch=True`) or of CuPy's arrays.

        Collective at the first call, which makes the transport.
        """
        if torch not in self.made:
            self.made[torch] = self._make[torch]()
        return self.made[torch]

    @property
    def ordered_by_streams(self) -> bool:  # type: ignore[override]
        return any(transport.ordered_by_streams for transport in self.made.values())

    def choose(self, collective: Collective) -> Move | None:
        transport = self.to_use(collective.buffer)
        if transport is None:
            return None
        return transport.choose(collective)

    def to_use(self, buffer: Array) -> DeviceTransport | None:
        """Return the transport for the library of `buffer`; None for a buffer on the host. Collective.

        If the rank's last such call used the other library, this waits until that library's collectives have ended.
        """
        if not is_on_gpu(buffer):
            return None
        chosen = self.made.get(is_torch(buffer))
        if chosen is None or chosen is not self._last:
            if self._last is not None:
                self._last.wait_until_idle()
            chosen = self._last = self.of(is_torch(buffer))
        return chosen

    def explain(self, rest: str) -> str:
        names = {True: "tensors", False: "CuPy arrays"}
        text = ""
        for torch, transport in self.made.items():
            name = "buffers"
            if len(self.made) > 1:
                name = names[torch]
            text += f"{name} on GPUs: {transport.why}\n"
        return f"{text}buffers on the host: {rest}"


class ForcedTransport(Transport):
    """Hands buffers on accelerators to the transport for the `implementation` that a program asks for (NCCL, …).

    A transport of `dispatcher` that has no replacement for `implementation` in its `forced` is used itself.
    """

    takes_device_buffers = True

    def __init__(
        self, dispatcher: LibraryDispatcher, implementation: CommunicationImplementation
    ) -> None:
        self._dispatcher = dispatcher
        self._implementation = implementation

    def _of(self, transport: DeviceTransport) -> Transport:
        return transport.forced.get(self._implementation, transport)

    @property
    def ordered_by_streams(self) -> bool:  # type: ignore[override]
        made = self._dispatcher.made.values()
        return any(self._of(transport).ordered_by_streams for transport in made)

    def choose(self, collective: Collective) -> Move | None:
        transport = self._dispatcher.to_use(collective.buffer)
        if transport is None:
            return None
        return self._of(transport).choose(collective)

    def explain(self, rest: str) -> str:
        return self._dispatcher.explain(rest)
