"""Explains the errors that recording a step raises, in the words of the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat import arrays, nest
from mpistrat.liveness.call_site import raised_at
from mpistrat.values import DistributedValues


def early_read(step: str, error: BaseException, on_host: Sequence[str]) -> str:
    """Return the error text for a step that read a value before its end.

    Args:
        step: the rank and the step's name, such as "rank 0: train_step".
        on_host: names of the operations that XLA left to the host in this step.
    """
    left = f". XLA leaves to the host: {', '.join(on_host)}" if on_host else ""
    return (
        f"{step} asks inside run for a value, or for a shape that depends on values{_where(error)}: item(), "
        "float(), print, `if tensor`, nonzero(), a boolean mask, torch.compile, a GradScaler and LBFGS ask. But run "
        "records operations first and computes them later. Return the tensor and read it after run, and use "
        f"torch.where for masks{left}"
    )


def inference_mode(step: str, error: BaseException) -> str:
    """Return the error text for a step that used torch.inference_mode() inside `run`."""
    return (
        f"{step} uses torch.inference_mode() inside run{_where(error)}, which torch_xla is not made for: use "
        f"torch.no_grad() there, or inference_mode() around run ({error})"
    )


def array_on_host(step: str, error: BaseException, arguments: Any, device: str) -> str:
    """Return the error text for a step that computed with an array that is not on `device`.

    The text names the arguments that are not on XLA devices, or says that no argument is the cause.

    Args:
        step: the rank and the step's name, such as "rank 0: train_step".
        arguments: a nest of one replica's arguments. Distributed values among them count as being on the device.
        device: the rank's device, such as "xla:0".
    """
    leaves = [
        leaf
        for leaf in nest.flatten(arguments)
        if arrays.is_array(leaf) or isinstance(leaf, DistributedValues)
    ]
    found = [
        f"argument array {i} ({arrays.described(leaf)})"
        for i, leaf in enumerate(leaves)
        if arrays.is_array(leaf) and not arrays.is_on_xla(leaf)
    ]
    which = f": {', '.join(found)}" if found else ", which is none of its arguments"
    return (
        f"{step} computes with an array of the host{_where(error)}{which}. A distributed dataset brings batches to the "
        f"device; bring other tensors there by .to({device!r}), strategy.extended.worker_devices[0], and make them "
        f"there with device= ({error})"
    )


def _where(error: BaseException) -> str:
    where = raised_at(error)
    return f", at {where}" if where else ""
