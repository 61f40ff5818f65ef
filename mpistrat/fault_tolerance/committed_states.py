"""Keeps the last two states that a rank has committed (kept to go back to if a rank is lost), in memory."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from mpistrat import arrays, nest


class CommittedStates:
    """The last two committed states of this rank.

    The older state is needed if another rank has committed one step less than this rank when a rank is lost. A new
    state is copied into the memory of the older state.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, Any]] = []  # (step, state), the older first

    @property
    def last(self) -> int | None:
        """The step that was committed last; None if no state is kept."""
        if self._kept:
            return self._kept[-1][0]
        return None

    @property
    def nbytes(self) -> int:
        """Size of the arrays of the last state, in bytes; 0 if no state is kept."""
        leaves = nest.flatten(self._kept[-1:])
        return sum(int(leaf.nbytes) for leaf in leaves if arrays.is_array(leaf))

    def keep(self, step: int, state: Any) -> None:
        memory = None
        if len(self._kept) > 1:
            memory = self._kept.pop(0)[1]
        self._kept.append((step, copied(state, memory)))

    def back_to(self, step: int | None) -> Any:
        """Return a copy of the state that was committed after `step`, and drop later states.

        Args:
            step: a step whose state is kept; with None all states are dropped.
        Returns: the copy; None if `step` is None.
        Raises: RuntimeError if no state of `step` is kept.
        """
        if step is None:
            self._kept = []
            return None
        steps = [kept for kept, _ in self._kept]
        if step not in steps:
            raise RuntimeError(f"step {step} was to be restored, but this rank keeps {steps}")
        self._kept = self._kept[: steps.index(step) + 1]
        # The objects that load the copy may keep it, and write to it.
        return copied(self._kept[-1][1])


def copied(value: Any, memory: Any = None) -> Any:
    """Return a copy of `value`: nested dicts, lists and tuples of arrays and other values.

    Args:
        memory: an older copy, or None. If an array in it has the type, shape, dtype and device of the array at the same
            place in `value`, it is overwritten and becomes a part of the result.
    """
    if isinstance(value, dict):
        by_key = memory if isinstance(memory, dict) else {}
        return {key: copied(part, by_key.get(key)) for key, part in value.items()}
    if type(value) in (list, tuple):
        known = memory if type(memory) is type(value) else ()
        pairs = itertools.zip_longest(value, known[: len(value)])
        return type(value)(copied(part, older) for part, older in pairs)
    if isinstance(value, (str, bytes, int, float, type(None))):
        return value
    if not arrays.is_array(value) or value.dtype == object:
        return copy.deepcopy(value)
    value = arrays.detach(value)
    if _layout(memory) != _layout(value):
        return arrays.copy(value)
    memory[...] = value
    return memory


def _layout(value: Any) -> tuple[Any, ...]:
    """Return (type, shape, dtype, device) of an array. With equal ones, an array fits into the other's memory."""
    attributes = [getattr(value, name, None) for name in ("shape", "dtype", "device")]
    return type(value), *attributes
