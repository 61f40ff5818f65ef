"""Area cross_device_ops: which hooks of a user's own CrossDeviceOps a strategy calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mpistrat as ms
from conformance.outcomes import CannotInterpret, probe
from conformance.stage import Handler, Stage, ctx, device


class _Recording(ms.CrossDeviceOps):
    """Notes which hook is called, and leaves the work to ReductionToOneDevice."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._worker = ms.ReductionToOneDevice()

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        self.calls.append("reduce")
        return self._worker.reduce(reduce_op, per_replica_value, destinations, options)

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Sequence[Any], options: Any
    ) -> Any:
        self.calls.append(f"batch_reduce:{len(value_destination_pairs)}")
        return self._worker.batch_reduce(reduce_op, value_destination_pairs, options)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        self.calls.append("broadcast")
        return self._worker.broadcast(tensor, destinations)


def custom_cross_device_ops(stage: Stage) -> Any:
    recording = _Recording()
    strategy = ms.MirroredStrategy([device(i) for i in range(stage.k)], recording)
    programs = _programs(stage, strategy)
    what = stage.program["what"]
    if what not in programs:
        raise CannotInterpret(f"what {what!r}")
    result = probe(programs[what])
    return {"calls": recording.calls, "result": result}


def _programs(stage: Stage, strategy: Any) -> dict[str, Callable[[], Any]]:
    t = stage.array

    def in_run(program: Callable[[], Any]) -> Callable[[], Any]:
        # A copy on each replica: results that happen to be one object would be unwrapped by run.
        return lambda: strategy.run(lambda: copy.deepcopy(program()))

    def assign_add() -> None:
        with strategy.scope():
            variable = ms.Variable(t(1.0), aggregation=ms.VariableAggregation.SUM)

        def update() -> None:
            variable.assign_add(t(1.0))

        strategy.run(update)

    def operand() -> Any:
        return strategy.run(lambda: t(1.0))

    return {
        "strategy_reduce": lambda: strategy.reduce("SUM", operand(), axis=None),
        "all_reduce_1": in_run(lambda: ctx().all_reduce("SUM", t(1.0))),
        "all_reduce_3": in_run(lambda: ctx().all_reduce("SUM", [t(1.0) for _ in range(3)])),
        "all_reduce_int32": in_run(lambda: ctx().all_reduce("SUM", t(1, "int32"))),
        "all_gather": in_run(lambda: ctx().all_gather(t([1.0]), axis=0)),
        "var_assign_add": assign_add,
    }


HANDLERS: dict[str, Handler] = {"custom_cross_device_ops": custom_cross_device_ops}
