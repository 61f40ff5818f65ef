"""Records the steps of torch's optimizers, with the losses, inputs and buffers that belong to them.

It also makes dropout an identity, because its random numbers belong to a rank. A process makes one recording.
"""

from __future__ import annotations

import os
import sys
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.nn import Module, functional
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as step_hooks
from torch.utils import _pytree as pytree

from mpistrat import arrays
from mpistrat.context import current_local_replica
from mpistrat.pytorch import hooks
from mpistrat.pytorch.gradients.reducer import replica_here
from mpistrat.tools.verify.recording import Recording, Step, sample

_DROPOUTS = (
    "dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
)

_call = Module.__call__
_backward = Tensor.backward
_torch_save = torch.save
_recording = Recording(0)  # `watch` puts the process's recording here
_most = 0  # steps to record
_is_shaken = False
_step = Step()  # the step that is not over
_depth = 0  # calls of modules around this code
_roots: dict[str, Module] = {}  # the modules that the program calls, by their classes
_names: dict[Any, str] = {}  # of their parts and parameters
_optimizers: dict[Optimizer, int] = {}
_random_states: list[Tensor] = []  # at each forward since the last backward()


def watch(recording: Recording, most: int, *, shaken: bool) -> None:
    """Record each optimizer step of the process, and end the process after the last one.

    Called by: the process of a run, once.
    Args:
        recording: gets the steps and facts.
        most: number of steps to record.
        shaken: whether parameters are changed by rounding, for the control: before the first forward, and before and
            after each step.
    """
    global _recording, _most, _is_shaken
    _recording = recording
    _most = most
    _is_shaken = shaken
    torch.manual_seed(recording.rank)  # as in a job without seeds
    torch.save = _save
    Module.__call__ = _recorded_call  # type: ignore[method-assign]
    Tensor.backward = _recorded_backward  # type: ignore[assignment, method-assign]
    for name in _DROPOUTS:
        setattr(functional, name, _no_dropout)
    step_hooks.register_optimizer_step_pre_hook(_note_step)


def use_gloo() -> None:
    """Have the program's default process group be of gloo."""
    original = distributed.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        original("gloo", *args, **kwargs)

    distributed.init_process_group = init_process_group


def _save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    """Do the work of `torch.save`. Its file is opened by C++, and so without an audit event."""
    sys.audit("open", f, "wb", os.O_WRONLY)
    _torch_save(obj, f, *args, **kwargs)


def _recorded_call(module: Module, *args: Any, **kwargs: Any) -> Any:
    """Do the work of `Module.__call__`. Calls from outside all modules give their names and inputs."""
    global _depth
    _step.calls += 1
    if _depth == 0:
        _note_module(module)
        if module.training and torch.is_grad_enabled():
            _note_inputs([args, kwargs])
    _depth += 1
    try:
        output = _call(module, *args, **kwargs)
    finally:
        _depth -= 1
    if isinstance(output, Tensor) and output.requires_grad:
        _note_precision(output)
    return output


def _recorded_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    if _random_states and not torch.equal(_random_states[0], torch.get_rng_state()):
        _step.draws = True
    _random_states.clear()
    _backward(loss, *args, **kwargs)
    here = replica_here()
    weight = 1.0
    if here is not None:
        weight = here[1].share or 0.0
    elif distributed.is_initialized():
        weight /= distributed.get_world_size()
    _step.losses.append((loss.sum().item(), weight))


def _no_dropout(input: Any, p: float = 0.5, training: bool = True, inplace: Any = False) -> Any:
    _recording.switched_off |= training and p > 0
    return input


def _note_module(module: Module) -> None:
    """Note the parts of a module, and switch off the dropout of attention and RNNs: they hand it on."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    kind = type(inner).__name__
    if _is_shaken and _roots.get(kind) is not inner:  # before its first forward
        for parameter in inner.parameters():
            _shake(parameter)
    _roots[kind] = inner
    parts = [*inner.named_parameters(prefix=kind), *inner.named_modules(prefix=kind)]
    for name, part in parts:
        _names[part] = name
        if part._backward_hooks or getattr(part, "_post_accumulate_grad_hooks", None):
            _recording.hooks.add(name)
        if isinstance(getattr(part, "dropout", None), float):
            _recording.switched_off |= part.dropout > 0
            part.dropout = 0.0
        if isinstance(part, _BatchNorm) and part.training and not isinstance(part, SyncBatchNorm):
            _recording.norms.add(type(part).__name__)


def _note_inputs(arguments: list[Any]) -> None:
    _random_states.append(torch.get_rng_state())
    leaves = pytree.tree_leaves(arguments)
    inputs = [_on_host(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    for array in inputs:
        _step.inputs += np.abs(array).sum(dtype=float)
    if inputs and inputs[0].ndim:
        _step.examples += [zlib.crc32(row) for row in inputs[0]]


def _shake(parameter: Tensor) -> None:
    epsilon = max(_recording.epsilon, torch.finfo(parameter.dtype).eps)
    noise = torch.sin(parameter.data.float() * 1e6)  # draws no random numbers
    parameter.data.mul_(1 + 2 * epsilon * noise)


def _note_precision(tensor: Tensor) -> None:
    _recording.epsilon = max(_recording.epsilon, torch.finfo(tensor.dtype).eps)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Note the tensors of an optimizer. Called by: torch, before and after each step in turn."""
    global _step
    if current_local_replica() or hooks.is_twin(optimizer):
        return
    if not _optimizers:  # after the hook that ends steps of shared parameters
        step_hooks.register_optimizer_step_post_hook(_note_step)
    place = _optimizers.setdefault(optimizer, len(_optimizers))
    parameters = {}
    gradients = {}
    for number, parameter in enumerate(hooks.parameters_of(optimizer)):
        key = f"parameter {number} of optimizer {place}"
        parameters[key] = parameter
        if parameter.grad is not None:
            gradients[key] = parameter.grad
        if _is_shaken:
            _shake(parameter)
        _recording.labels[key] = _names.get(parameter, key)
        _note_precision(parameter)
    if "before" not in _step.tensors:
        _note("before", parameters)
        _note("gradients", gradients)
        return
    if hooks.has_closure(args, kwargs):
        _note("gradients", gradients)
    _note("values", parameters)
    for kind, root in _roots.items():
        _note("buffers", dict(root.named_buffers(prefix=kind)))
    _step.rates = [float(group.get("lr", 0)) for group in optimizer.param_groups]
    _recording.steps.append(_step)
    _step = Step()
    if len(_recording.steps) >= _most:
        raise SystemExit(0)


def _note(kind: str, tensors: dict[str, Tensor]) -> None:
    samples = _step.tensors.setdefault(kind, {})
    for key, tensor in tensors.items():
        samples[key] = sample(_on_host(tensor))


def _on_host(tensor: Any) -> np.ndarray:
    """Return the numbers of a tensor; of a sharded tensor, the numbers of this rank's part."""
    if arrays.is_sharded(tensor):
        tensor = tensor.to_local()
    return arrays.to_numpy(tensor.to_dense())
