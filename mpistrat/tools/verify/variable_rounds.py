"""Records the mirrored variables of a program, in rounds.

A round ends when a variable that the round has assigned is assigned again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.context import current_local_replica
from mpistrat.tools.verify.recording import Recording, Sample, Step, sample
from mpistrat.variables.variable import MirroredVariable, Variable


class VariableRounds:
    """Records the values of variables after the program's assignments.

    Args:
        recording: gets the machine epsilon.
        ended: is called with each round that has ended.
        shaken: whether the numbers that are assigned are changed by rounding, for the control.
    """

    def __init__(
        self, recording: Recording, ended: Callable[[Step], None], *, shaken: bool
    ) -> None:
        self._recording = recording
        self._ended = ended
        self._noise = np.random.default_rng(7) if shaken else None
        self._known: dict[int, Variable] = {}  # by id; it holds them, so that no id is taken twice
        self._round: dict[str, Sample] = {}

    def watch(self) -> None:
        """Replace the methods that assign variables. Called by: the process of a run, once."""
        for name in ("assign", "assign_add", "assign_sub"):
            setattr(Variable, name, self._recorded(getattr(Variable, name)))

    def finish(self) -> None:
        """End the round."""
        if self._round:
            step = Step(tensors={"values": self._round})
            self._round = {}
            self._ended(step)

    def _recorded(self, assign: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        @functools.wraps(assign)
        def recorded(variable: Any, value: Any) -> Any:
            is_equal = isinstance(variable, MirroredVariable)  # on all replicas
            if not is_equal or current_local_replica() not in (0, None):
                return assign(variable, value)
            self._known.setdefault(id(variable), variable)
            key = f"variable {variable.name} (number {[*self._known].index(id(variable))})"
            if key in self._round:
                self.finish()
            result = assign(variable, self._shaken(value))
            array = arrays.to_numpy(variable.read_value())
            if array.dtype.kind == "f":
                self._recording.epsilon = float(np.finfo(array.dtype).eps)
            self._round[key] = sample(array)
            return result

        return recorded

    def _shaken(self, value: Any) -> Any:
        dtype = np.asarray(value).dtype if isinstance(value, (float, np.ndarray)) else None
        if self._noise is None or dtype is None or dtype.kind != "f":
            return value
        drawn = self._noise.uniform(-2, 2, np.shape(value))
        return (value * (1 + np.finfo(dtype).eps * drawn)).astype(dtype)
