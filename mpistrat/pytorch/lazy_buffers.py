"""Gradients that XLA has yet to compute: they are joined and parted inside its graphs, not by writing into views."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpistrat import xla
from mpistrat.communicators import Communicator
from mpistrat.pytorch.flat_buffers import FlatBuffers, alike
from mpistrat.pytorch.registry import Registry
from mpistrat.pytorch.wires import Wire
from mpistrat.wire_formats import WireFormat


class LazyBuffers(FlatBuffers):
    """As `FlatBuffers`; parameters on the host are treated as there.

    Args:
        sum_of_rank: the sum over the cores of this rank, inside the graph.

    Where XLA does not connect the ranks, what was recorded so far is computed; the sums go through host memory, and a
    second graph goes on with them.
    """

    def __init__(
        self,
        registry: Registry,
        wire_format: WireFormat | None,
        sum_of_rank: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(registry, wire_format)
        self._sum_of_rank = sum_of_rank

    def reduce(
        self,
        communicator: Communicator,
        slots: list[int],
        parameters: list[torch.Tensor | None],
        contributions: list[list[torch.Tensor | None]],
        scale: float | None,
    ) -> list[torch.Tensor]:
        """As `FlatBuffers.reduce`. A gradient that is summed leaves `.grad` and `contributions`.

        Else the graph would have it as a result of its own.
        """
        on_host = [slot for slot in slots if parameters[slot].device.type != "xla"]  # type: ignore[union-attr]
        sums = super().reduce(communicator, on_host, parameters, contributions, scale)
        found = dict(zip(on_host, sums, strict=True))
        (own,) = contributions
        lazy = [slot for slot in slots if slot not in found]
        for (dtype, _), group in alike(lazy, parameters).items():
            pieces = []
            for slot in group:
                parameter, gradient = parameters[slot], own[slot]
                assert parameter is not None
                own[slot] = parameter.grad = None
                if gradient is None:
                    gradient = torch.zeros_like(parameter)
                pieces.append((gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1))
            flat = torch.cat(pieces)
            shapes = [parameters[slot].shape for slot in group]  # type: ignore[union-attr]
            lengths = [len(piece) for piece in pieces]
            del pieces, gradient
            label = f"gradients of {len(group)} parameters{self.wires}"
            total = self._sum(communicator, flat, label, scale, self.wires.of(group))
            parts = total.to(dtype).split(lengths)
            views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            found.update(zip(group, views, strict=True))
        return [found[slot] for slot in slots]

    def _sum(
        self,
        communicator: Communicator,
        flat: torch.Tensor,
        label: str,
        scale: float | None,
        wire: Wire | None,
    ) -> torch.Tensor:
        flat = self._sum_of_rank(flat)
        if communicator.size == 1:
            return flat if scale is None else flat * scale
        if communicator.takes_device_buffers:
            communicator.all_reduce(flat, label=label, scale=scale, wire=wire)
            return flat
        device = flat.device
        host = xla.to_host(flat)
        del flat
        buffer = self._buffer(communicator, len(host), host.dtype, host.device)
        buffer.copy_(host)
        communicator.all_reduce(buffer, label=label, scale=scale, wire=wire)
        (total,) = xla.start().put([buffer], device)
        return total
