"""How a strategy keeps variables: what each strategy with its own way of that implements."""

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
    """Makes a strategy's variables, and knows where their copies are.

    Args:
        devices: those that hold variables.

    Attributes:
        mirrored: the variables with a copy on each replica that the program still has, by number in the order of their
            making.
        on_every_replica: whether each replica's device has a copy.
        owns_initial_values: whether this rank's initial values may be everybody's.
    """

    mirrored: Mapping[int, MirroredVariable] = MappingProxyType({})
    on_every_replica = True
    owns_initial_values = True

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)

    @abc.abstractmethod
    def create(self, asked: VariableArguments) -> Variable:
        """A new variable. Called by: every rank, in the same order."""

    @abc.abstractmethod
    def copies(self, variable: Any) -> Sequence[Any]:
        """The copies on this rank that an update visits.

        Raises: ValueError or AssertionError for what is no variable of this strategy.
        """

    def non_slot_devices(self, variables: Sequence[Any]) -> Any:
        """Where state that belongs to no single one of `variables` is kept: with the first of them by name."""
        return min(variables, key=operator.attrgetter("name"))

    def colocated(self, variable: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, variables are placed with `variable`. A copy on each replica always is."""
        return contextlib.nullcontext()
