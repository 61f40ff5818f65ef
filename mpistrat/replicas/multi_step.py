"""Several steps of a loop in one call, as in the v1 API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpistrat.context import get_replica_context, get_strategy
from mpistrat.reduce_op import ReduceOp


class MultiStepContext:
    """The outputs of the step function of `experimental_run_steps_on_iterator`.

    Attributes:
        last_step_outputs: outputs of the last step, by name.
        non_tensor_outputs: other outputs, by name.
    """

    def __init__(self, initial_outputs: Mapping[str, Any] | None = None) -> None:
        self.last_step_outputs: dict[str, Any] = dict(initial_outputs or {})
        self.non_tensor_outputs: dict[str, Any] = {}

    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Keep `output` in `last_step_outputs[name]`; with a `reduce_op`, reduce it over all replicas first.

        Raises:
            AssertionError: inside `run` without a `reduce_op`.
        """
        context = get_replica_context()
        if context is not None:
            if reduce_op is None:
                raise AssertionError(
                    f"set_last_step_output({name!r}) inside run needs a reduce_op: 'sum' or 'mean'"
                )
            output = context.all_reduce(reduce_op, output)
        elif reduce_op is not None:
            output = get_strategy().reduce(reduce_op, output, axis=None)
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Keep `output` in `non_tensor_outputs[name]`, as it is."""
        self.non_tensor_outputs[name] = output
