"""`VariableStore`: the interface by which a strategy makes its variables and finds their copies."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mpistrat.variables.variable import MirroredVariable, Variable
from mpistrat.variables.variable_arguments import VariableArguments


class VariableStore(abc.ABC):
    """Makes a strategy's variables, and finds their copies. Each kind of strategy has a subclass of its own.

    Args:
        devices: names of this rank's devices that hold variables.
    Attributes:
        mirrored: the live variables with a copy on each replica, by their number in the order of creation.
        on_every_replica: whether each replica's device has a copy.
        owns_initial_values: False if this rank does not use the initial values that the program gives, because another
            rank makes the variables with its own; this rank waits until they are made.
    """

    mirrored: Mapping[int, MirroredVariable] = MappingProxyType({})
    on_every_replica = True
    owns_initial_values = True

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)

    @abc.abstractmethod
    def create(self, asked: VariableArguments) -> Variable:
        """Make a new variable, with the initial value of one rank on all ranks.

        Called by: every rank, in the same order.
        Args:
            asked: the checked arguments of `Variable`.
        """

    @abc.abstractmethod
    def copies(self, variable: Any) -> Sequence[Any]:
        """Return the copies on this rank that `extended.update` changes.

        Raises: ValueError or AssertionError if `variable` is no variable of this strategy.
        """

    def non_slot_devices(self, variables: Sequence[Any]) -> Any:
        """Return the place for state that belongs to all `variables` together, as `extended.non_slot_devices` does.

        Returns: a device, a tuple of devices, or a variable to keep the state beside; by default the variable with the
            alphabetically first name.
        """
        return min(variables, key=lambda variable: variable.name)

    def colocated(self, variable: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context in which new variables are placed on the servers of `variable`. By default it does nothing.

        Called by: `extended.colocate_vars_with`.
        """
        return contextlib.nullcontext()
