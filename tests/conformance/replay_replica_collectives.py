"""Area replica_collectives: all_reduce and all_gather inside run, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conformance.stage import Handler, Stage, ctx, replica_id


def all_reduce(stage: Stage) -> Any:
    values = stage.decode_all(stage.inputs["values"])

    def program() -> Any:
        return ctx().all_reduce(stage.program["reduce_op"], values[replica_id()])

    return {"per_replica": stage.on_replicas(stage.strategy(), program)}


def all_gather(stage: Stage) -> Any:
    values = stage.decode_all(stage.inputs["values"])

    def program() -> Any:
        return ctx().all_gather(values[replica_id()], axis=stage.program["axis"])

    return {"per_replica": stage.on_replicas(stage.strategy(), program)}


def grad_all_reduce(stage: Stage) -> Any:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return ctx().all_reduce(stage.program["reduce_op"], x * x).sum()

    return _gradients(stage, lambda: torch.tensor([1.0 + replica_id(), 2.0]), loss)


def grad_all_gather(stage: Stage) -> Any:
    def loss(x: torch.Tensor) -> torch.Tensor:
        gathered = ctx().all_gather(x * x, axis=stage.program["axis"])
        return (2 * gathered).sum()

    return _gradients(stage, lambda: torch.arange(1.0, 3 + replica_id()), loss)


def _gradients(
    stage: Stage,
    operand: Callable[[], torch.Tensor],
    loss: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    def program() -> torch.Tensor:
        x = operand().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(x), x)
        return gradient

    return {"per_replica": stage.on_replicas(stage.strategy(), program)}


def all_reduce_on_saved_context_after_run(stage: Stage) -> Any:
    saved: list[Any] = []
    stage.strategy().run(lambda: saved.append(ctx()))
    return saved[0].all_reduce("SUM", stage.array(1.0))


def get_replica_context_in_scope(stage: Stage) -> Any:
    with stage.strategy().scope():
        return {"value": {"replica_context_is_none": ctx() is None}}


HANDLERS: dict[str, Handler] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "grad_all_reduce": grad_all_reduce,
    "grad_all_gather": grad_all_gather,
    "all_reduce_on_saved_context_after_run": all_reduce_on_saved_context_after_run,
    "get_replica_context_in_scope": get_replica_context_in_scope,
}
