"""Keys of the tensors that a strategy has on servers: two ranks that have one name it by its place there."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from mpistrat.parameter_server.modules.remote_tensors import RemoteTensors

# Of a tensor's parts, in order: the server's rank, and the array's number there.
Places = tuple[tuple[int, int], ...]
PARAMETER, ROWS, BUFFER = "parameter", "rows of a parameter", "buffer"
# All that the other rank needs to find its tensor, or to make it: the kind, the places, the device, `requires_grad`.
TensorKey = tuple[str, Places, str, bool]


class TensorReferences:
    """Gives tensors their keys, and finds them again. It keeps none alive."""

    def __init__(self, tensors: RemoteTensors) -> None:
        self._tensors = tensors
        self._by_place: weakref.WeakValueDictionary[Places, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )

    def key_of(self, value: Any) -> TensorKey | None:
        """None for what is not a tensor on servers."""
        if not isinstance(value, torch.Tensor) or value not in self._tensors:
            return None
        remote = self._tensors[value]
        places = tuple((address.server, address.key) for address in remote.addresses)
        self._by_place[places] = value
        kind = BUFFER
        if isinstance(value, torch.nn.Parameter):
            kind = ROWS if remote.rows_only else PARAMETER
        return kind, places, value.device.type, value.requires_grad

    def find(self, key: TensorKey) -> torch.Tensor:
        """This rank's tensor, which has been given this key."""
        return self._by_place[key[1]]
