"""Where a torch parameter or buffer is on the servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from mpistrat.parameter_server.client import Address


@dataclasses.dataclass(eq=False)
class RemoteTensor:
    """
    Attributes:
        addresses: of its parts, which are its rows in order; one of all of it, if it is not split.
        version: of the tensor when it was last what the servers had.
    """

    addresses: Sequence[Address]
    version: int = -1

    @property
    def split(self) -> bool:
        return len(self.addresses) > 1

    @property
    def rows(self) -> list[int]:
        """How many each part has."""
        return [address.spec.shape[0] for address in self.addresses]

    def pieces(self, tensor: torch.Tensor) -> list[tuple[Address, torch.Tensor]]:
        """What `tensor`, of the same shape, has for each part."""
        if not self.split:
            return [(self.addresses[0], tensor)]
        return list(zip(self.addresses, tensor.split(self.rows), strict=True))

    def by_part(self, indices: torch.Tensor) -> list[tuple[Address, int, slice]]:
        """Of ascending indices of rows, which are in each part; with the first row of the part."""
        parts = []
        first = 0
        for address, rows in zip(self.addresses, self.rows, strict=True):
            bounds = torch.tensor([first, first + rows], device=indices.device)
            begin, end = torch.searchsorted(indices, bounds).tolist()
            parts.append((address, first, slice(begin, end)))
            first += rows
        return parts
