"""Records the mirrored variables of a program, in rounds.

A round ends when a variable that the round has assigned is assigned again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.context import current_local_replica
from mpistrat.tools.verify.recording import Recording, Step, sample
from mpistrat.variables.variable import MirroredVariable


def watch(recording: Recording, most: int, shaken: bool) -> list[Step]:
    """Record the values of variables after each update. Called by: the process of a run, once.

    Args:
        recording: gets the machine epsilon.
        most: number of rounds; then the program ends, unless `recording` has steps of optimizers.
        shaken: whether values are changed by rounding, for the control.
    Returns: a list that grows by each round.
    """
    rounds: list[Step] = []
    numbers: dict[MirroredVariable, int] = {}
    update = MirroredVariable._update

    def recorded(variable: MirroredVariable, method: str, operand: Any) -> Any:
        result = update(variable, method, operand)
        if current_local_replica():  # not the first replica of the rank
            return result
        number = numbers.setdefault(variable, len(numbers))
        key = f"variable {variable.name} (number {number})"
        if not rounds or key in rounds[-1].tensors["values"]:
            if len(rounds) >= most and not recording.steps:
                raise SystemExit(0)
            rounds.append(Step(tensors={"values": {}}))
        array = arrays.to_numpy(variable.read_value())
        if array.dtype.kind == "f":
            recording.epsilon = float(np.finfo(array.dtype).eps)
            if shaken:
                noise = np.sin(1e6 * array)  # draws no random numbers
                array = array * (1 + 2 * recording.epsilon * noise)
                variable.load_state(array)
        rounds[-1].tensors["values"][key] = sample(array)
        return result

    MirroredVariable._update = recorded  # type: ignore[assignment, method-assign]
    return rounds
