"""Keeps variables on a rank's XLA device."""

from __future__ import annotations

from mpistrat import arrays
from mpistrat.strategies.replicated_variables import CopyPerReplica
from mpistrat.variables.variable import Variable
from mpistrat.variables.variable_arguments import VariableArguments


class VariablesOnDevice(CopyPerReplica):
    """Makes each variable of a `TPUStrategy` a torch tensor on the rank's device, even from a NumPy array or number."""

    def create(self, asked: VariableArguments) -> Variable:
        with self.communicator.raising_together():
            value = asked.initial_array()
            if not arrays.is_cupy(value):
                value = arrays.to_device(arrays.as_tensor(value), self.devices[0])
        return super().create(asked._replace(initial_value=value, dtype=None))
