"""mpi4py's buffer calls, in loops as people write them.

On a device they need an MPI that was seen to take its memory.
"""

from __future__ import annotations

from typing import Any

import torch
from mpi4py import MPI

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.cluster_resolver import MPIClusterResolver
from mpistrat.communicators.transports.accelerator.device_memory_proof import why_not_proven
from mpistrat.tools.bench.rounds import CannotTakePart, Contestants, all_ranks
from mpistrat.tools.bench.work import Step, Work


def training_steps(work: Work) -> Contestants:
    _check(torch.device(work.device))
    return {"raw MPI, flat buffer": _copied(work), "raw MPI, .grad in the buffer": _in_place(work)}


def _check(device: torch.device) -> None:
    """Raise CannotTakePart on all ranks unless MPI was seen to take memory of `device`. Called by: every rank."""
    if device.type != "cpu":
        node = MPIClusterResolver().topology().node
        if reason := why_not_proven(all_ranks(), node, "torch", device.index):
            raise CannotTakePart(f"MPI was not seen to take memory of {device}: {reason}")


def _memory(buffer: Array) -> Any:
    """Return the float32 `buffer` as mpi4py's calls take it: a NumPy array, or [memory, count, datatype] on a device.

    For a device, first wait until it has done the work that it has been given.
    """
    if not arrays.is_on_accelerator(buffer):
        return arrays.to_numpy(buffer)  # mpi4py takes a NumPy array faster than a tensor
    torch.accelerator.synchronize(buffer.device)
    memory = MPI.buffer.fromaddress(buffer.data_ptr(), buffer.nbytes)
    return [memory, buffer.numel(), MPI.FLOAT]


def _flat_buffer(work: Work) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor, Any]:
    """Return the module, its optimizer, a flat buffer of zeros for all gradients, and pairs (view, parameter).

    Each view is the parameter's part of the buffer, in the parameter's shape.
    """
    module, optimizer = work.build()
    parameters = list(module.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), device=work.device)
    parts = zip(flat.split(sizes), parameters, strict=True)
    pairs = [(part.view(parameter.shape), parameter) for part, parameter in parts]
    return module, optimizer, flat, pairs


def _copied(work: Work) -> Step:
    """Return a step that copies the gradients into one flat buffer, calls Allreduce, and copies them back."""
    module, optimizer, flat, pairs = _flat_buffer(work)
    size = MPI.COMM_WORLD.size

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = work.loss(module)
        loss.backward()
        for part, parameter in pairs:
            part.copy_(parameter.grad)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, _memory(flat))
        flat.div_(size)
        for part, parameter in pairs:
            parameter.grad.copy_(part)
        optimizer.step()
        return loss.detach()

    return step


def _in_place(work: Work) -> Step:
    """Return a step that copies nothing: every `.grad` is a view of the one buffer that MPI reduces.

    It is the fastest loop that people write with mpi4py.
    """
    module, optimizer, flat, pairs = _flat_buffer(work)
    size = MPI.COMM_WORLD.size
    for part, parameter in pairs:
        parameter.grad = part

    def step() -> torch.Tensor:
        flat.zero_()
        loss = work.loss(module)
        (loss / size).backward()
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, _memory(flat))
        optimizer.step()
        return loss.detach()

    return step


def all_reduces(values: Array) -> Contestants:
    if arrays.is_on_accelerator(values):
        _check(values.device)
    result = arrays.copy(values)
    in_place = arrays.copy(values)

    def into_another() -> Array:
        MPI.COMM_WORLD.Allreduce(_memory(values), _memory(result))
        return result

    def over_itself() -> Array:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, _memory(in_place))
        return in_place

    return {"MPI": into_another, "MPI, in place": over_itself}
