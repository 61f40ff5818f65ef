"""`backward()` inside `run` ends with the reduction of what it added to `.grad`.

`torch.autograd.backward` is wrapped, once per process. Its end, unlike the callbacks of the autograd
engine, is a place where a replica may wait for another: it is outside the engine, on the thread of the
replica, and after reentrant checkpointing, too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from mpistrat.context import current_mode

if TYPE_CHECKING:
    from mpistrat.pytorch.gradients import GradientReducer

_original = torch.autograd.backward


def install() -> None:
    """Wrap `torch.autograd.backward`, which `Tensor.backward` calls, if it is not yet."""
    if torch.autograd.backward is _original:
        torch.autograd.backward = _reducing_backward


def reducer_here() -> GradientReducer | None:
    """The reducer of the strategy whose replica runs here; None outside run or with one replica."""
    mode = current_mode()
    if mode.replica_context is None or mode.strategy.num_replicas_in_sync == 1:
        return None
    mirroring = mode.strategy._mirroring
    return None if mirroring is None else mirroring.reducer


def inside_backward() -> bool:
    """Whether this thread is in a hook or a function that the autograd engine calls."""
    return torch._C._current_graph_task_id() != -1


@functools.wraps(_original)
def _reducing_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    arguments = (tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
    reducer = reducer_here()
    # A backward inside a backward (reentrant checkpointing) is part of the outer one.
    if reducer is None or inside_backward():
        _original(*arguments)
        return
    if create_graph:
        raise RuntimeError(
            "backward(create_graph=True) inside run is not supported: the graph of a reduction over "
            "replicas cannot be built into .grad. Use torch.autograd.grad(..., create_graph=True) for "
            "the inner derivative, and call backward() on the loss that contains it"
        )
    with reducer.contribution():
        _original(*arguments)
