"""`VariableStore`: the interface by which a strategy makes its variables and finds their copies."""

from __future__ import annotations

import abc
import contextlib
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mpistrat.variables.variable import MirroredVariable, Variable
from mpistrat.variables.variable_arguments import VariableArguments


class VariableStore(abc.ABC):
    """Makes a strategy's variables, and knows where their copies are. Each strategy has a store of its own kind.

    Args:
        devices: names of the devices that hold variables.
    Attributes:
        mirrored: the live variables with a copy on each replica, by their number in the order of creation.
        on_every_replica: whether each replica's device has a copy.
        owns_initial_values: whether this rank's initial values may become the initial values on all ranks.
    """

    mirrored: Mapping[int, MirroredVariable] = MappingProxyType({})
    on_every_replica = True
    owns_initial_values = True

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)

    @abc.abstractmethod
    def create(self, asked: VariableArguments) -> Variable:
        """Make a new variable.

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
        """Return where to keep state of all `variables` together: by default beside the first one by name."""
        return min(variables, key=operator.attrgetter("name"))

    def colocated(self, variable: Any) -> contextlib.AbstractContextManager[None]:
        """Return a scope in which new variables are placed beside `variable`; without effect by default."""
        return contextlib.nullcontext()
