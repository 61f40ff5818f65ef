"""Variables on a rank's XLA device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat import arrays
from mpistrat.strategies.replicated_variables import CopyPerReplica
from mpistrat.variables.store import VariableStore
from mpistrat.variables.variable import Variable
from mpistrat.variables.variable_arguments import VariableArguments


class VariablesOnDevice(VariableStore):
    """Torch tensors on the rank's device, also where NumPy arrays or numbers are given; `copies` keeps them."""

    def __init__(self, copies: CopyPerReplica) -> None:
        super().__init__(copies.devices)
        self._copies = copies
        self.mirrored = copies.mirrored

    def create(self, asked: VariableArguments) -> Variable:
        with self._copies.communicator.raising_together():
            value = asked.initial_array()
            if not arrays.is_cupy(value):
                value = arrays.to_device(arrays.as_tensor(value), self.devices[0])
        return self._copies.create(asked._replace(initial_value=value, dtype=None))

    def copies(self, variable: Any) -> Sequence[Any]:
        return self._copies.copies(variable)
